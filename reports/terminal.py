"""The printed form of an audit: one screen of a terminal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from leakaudit.errors import ResultsError
from leakaudit.files.regular_files import read_regular
from leakaudit.gate.evidence import Index
from leakaudit.gate.verdict import Verdict
from leakaudit.reports.cells import attack_names, cell_for, defense_names, shown_name
from leakaudit.reports.escaping import plain
from leakaudit.reports.measures import found_in, means_of
from leakaudit.reports.redaction import RedactedResult, redact
from leakaudit.reports.verdict_screen import new_console, print_verdict
from leakaudit.results.as_sent import shipped_column
from leakaudit.results.canaries import bounded, strongest
from leakaudit.results.conformance import in_words as conformance_in_words
from leakaudit.results.files import load_results
from leakaudit.results.membership import in_words as members_in_words
from leakaudit.results.schema import AttemptStatus, Results, TextMode
from leakaudit.results.wording import counted

_STATES = {
    "text leaked": "bold red",
    "words leaked": "red",
    "labels leaked": "dark_orange",
    "in reach, not found": "yellow",
    "out of time": "yellow",
    "no leak event": "green",
    "not judged": "yellow",
    "error": "magenta",
}
_SENT = "none"
"""The defence under which the update is attacked as the run sends it."""


def print_summary(run_dir: Path, console: Console | None = None) -> None:
    """Print the verdict, the rules, the matrix and the path of the report.

    Args:
        run_dir: folder with `results.json`, `verdict.json` and `report.html`.
        console: where to print; standard output if None.

    Raises:
        ResultsError: the results or the verdict cannot be read.
    """
    try:
        verdict = Verdict.model_validate_json(read_regular(run_dir / "verdict.json"))
    except (OSError, ValidationError):
        raise ResultsError(f"{run_dir / 'verdict.json'}: cannot be read; `leakaudit gate` writes one") from None
    redacted = redact(load_results(run_dir), [], verdict, TextMode.HASH)
    print_audit(redacted, new_console(console), run_dir / "report.html")


def print_audit(redacted: RedactedResult, console: Console, report: Path | None = None) -> None:
    """Print a redacted audit and the path of its report.

    Text from the results is never read as markup, and its control characters are printed as codes.
    """
    print_verdict(redacted.verdict, console=console)
    if attack_names(redacted.results):
        console.print()
        _print_matrix(redacted.results, console)
    if redacted.results.conformance is not None:
        console.print()
        console.print(Text(plain(f"privacy mechanism: {conformance_in_words(redacted.results.conformance)}")))
    if (worst := strongest(redacted.results.canaries)) is not None:
        console.print()
        console.print(Text(plain(f"secrets under {worst.defense}: {bounded(worst)}")))
        console.print(Text(plain(" ".join(worst.notes)), style="dim"))
    if (members := redacted.results.membership) is not None:
        console.print()
        console.print(Text(plain(f"membership: {members_in_words(members)}")))
    if report is not None:
        console.print()
        console.print(Text(f"report: {plain(str(report))}"), soft_wrap=True)


@dataclass(frozen=True)
class _Cell:
    """A cell of the matrix: one attack under one defence."""

    state: str
    counts: str
    """How many steps leaked, or why none could be counted; may be empty."""
    measured: str
    """Means of the metrics; may be empty."""

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(line for line in (", ".join(filter(None, [self.state, self.counts])), self.measured) if line)


_PADDING = 1
"""Number of blanks on the right of a column."""


def _cell(results: Results, attack: str, defense: str, index: Index) -> _Cell:
    attempts = [a for a in index.of_defense.get(defense, ()) if a.attack == attack]
    finished = [a for a in attempts if a.finished]
    found = cell_for(results, attack, defense, index)
    if not finished:
        return _Cell(plain(found.state), plain(", ".join(found.lines[:1])), "")
    late = sum(a.status is AttemptStatus.BUDGET_EXHAUSTED for a in finished)
    of = f"{late} out of time" if found.steps else f"{late} of {counted(len(finished), 'step')}"
    counts = [*found.steps, *([of] if late else [])]
    means = means_of(finished, results, in_per_cent=False)
    measured = plain(", ".join(filter(None, [*means, found_in(finished)])))
    return _Cell(plain(found.state), ", ".join(counts), measured)


def _title(results: Results, defense: str) -> str:
    """Return the title of a defence.

    For the update as it was sent, the title names the defence that the run ships.
    """
    if defense != shipped_column(results):
        return plain(shown_name(results, defense))
    shipped = sorted({step.shipped_defense for step in results.steps} - {_SENT})
    return plain(f"as shipped: {', '.join(shipped)}") if shipped else shown_name(results, defense)


def _print_matrix(results: Results, console: Console) -> None:
    """Print every attack under every defence.

    Defences are columns of one table if that fits the terminal, else separate lists.
    """
    attacks, defenses = attack_names(results), defense_names(results)
    index = Index(results)
    cells = {(a, d): _cell(results, a, d, index) for a in attacks for d in defenses}
    widths = [max(map(cell_len, map(plain, ["attack", *attacks])))]
    for defense in defenses:
        lines = [line for attack in attacks for line in cells[attack, defense].lines]
        widths.append(max(map(cell_len, [_title(results, defense), *lines])))
    if sum(widths) + _PADDING * len(widths) <= console.width:
        console.print(_side_by_side(results, attacks, defenses, cells))
        return
    for defense in defenses:
        console.print(Text(_title(results, defense), style="bold", overflow="fold"))
        for attack in attacks:
            cell = cells[attack, defense]
            row = Text.assemble((f"{plain(attack)}: ", "dim"), _coloured(cell, "; "))
            console.print(Padding(row, (0, 0, 0, 2)), overflow="fold")


def _side_by_side(
    results: Results, attacks: list[str], defenses: list[str], cells: dict[tuple[str, str], _Cell]
) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, _PADDING, 0, 0), header_style="dim")
    table.add_column(Text("attack"), overflow="fold")
    for defense in defenses:
        table.add_column(Text(_title(results, defense)), overflow="fold")
    for attack in attacks:
        table.add_row(Text(plain(attack)), *(_coloured(cells[attack, defense], "\n") for defense in defenses))
    return table


def _coloured(cell: _Cell, between: str) -> Text:
    return Text(between.join(cell.lines), style=_STATES.get(cell.state, "dim"))
