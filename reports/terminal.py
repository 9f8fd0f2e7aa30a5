"""The audit on one screen of a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from leakaudit.errors import ResultsError
from leakaudit.gate import RuleVerdict, Status, Verdict
from leakaudit.reports.page import MEANINGS, attack_names, cell_for, defense_names, plain
from leakaudit.reports.redaction import RedactedResult, redact
from leakaudit.scores import TextMode, load_results

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_COLOURS = {Status.PASS: "green", Status.FAIL: "red", Status.INCONCLUSIVE: "yellow", Status.ERROR: "magenta"}
_STATES = {
    "sentence leaked": "bold red",
    "words leaked": "red",
    "labels leaked": "dark_orange",
    "in reach, not found": "yellow",
    "out of time": "yellow",
    "no leak event": "green",
    "error": "magenta",
}
_MOST_RULES = 8
_MOST_DEFENSES = 4


def print_summary(run_dir: Path, console: Console | None = None) -> None:
    """Print what the audit in `run_dir` came to: verdict, rules, attacks against defences, where the report is.

    Args:
        run_dir: folder with `results.json`, `verdict.json` and `report.html`.
        console: where to print; standard output if None.

    Raises:
        ResultsError: the results or the verdict cannot be read.
    """
    try:
        verdict = Verdict.model_validate_json((run_dir / "verdict.json").read_bytes())
    except (OSError, ValidationError):
        raise ResultsError(f"{run_dir / 'verdict.json'}: cannot be read; `leakaudit gate` writes one") from None
    redacted = redact(load_results(run_dir), [], verdict, TextMode.HASH)
    print_audit(redacted, _console(console), run_dir / "report.html")


def print_audit(redacted: RedactedResult, console: Console, report: Path | None = None) -> None:
    """Print a redacted audit and the path of its report.

    Text from the results is printed as text: no markup is read from it, and control characters appear as their codes.
    """
    from rich.text import Text

    print_verdict(redacted.verdict, console=console)
    if attack_names(redacted.results):
        console.print()
        console.print(_matrix(redacted))
    if report is not None:
        console.print()
        console.print(Text(f"report: {plain(str(report))}"), soft_wrap=True)


def print_verdict(verdict: Verdict, *, quiet: bool = False, console: Console | None = None) -> None:
    """Print a verdict in its own numbers, and under it each rule; only the verdict if `quiet`."""
    from rich.text import Text

    console = _console(console)
    head = Text()
    head.append(f" {verdict.verdict} ", style=f"bold reverse {_COLOURS[verdict.verdict]}")
    if quiet:
        head.append(f" {plain(verdict.sentence)}")
        console.print(head, soft_wrap=True)
        return
    head.append(f" {MEANINGS[verdict.verdict]}", style="bold")
    console.print()
    console.print(head)
    console.print(Text(plain(verdict.sentence)))
    console.print()
    for rule in verdict.rules[:_MOST_RULES]:
        line = Text()
        shown, colour = _status(rule)
        line.append(f"{shown:<13}", style=colour)
        line.append(rule.id)
        line.append(f"  {plain(_seen(rule))}", style="dim")
        console.print(line)
    if len(verdict.rules) > _MOST_RULES:
        console.print(Text(f"and {len(verdict.rules) - _MOST_RULES} more rules in the report", style="dim"))


def _status(rule: RuleVerdict) -> tuple[str, str]:
    """Return word and colour of a rule's status: a rule that only warns says WARN where another would not pass."""
    if rule.level == "warn" and rule.status is not Status.PASS:
        return "WARN", "yellow"
    return rule.status, _COLOURS[rule.status]


def _console(console: Console | None) -> Console:
    from rich.console import Console

    return console or Console(highlight=False)


def _seen(rule: RuleVerdict) -> str:
    if rule.k is not None:
        return f"{rule.k} of {rule.n} {'step' if rule.n == 1 else 'steps'}" if rule.n else "no evidence"
    return f"{rule.subject} {rule.observed:.2f}" if rule.observed is not None else "no evidence"


def _matrix(redacted: RedactedResult) -> Table:
    from rich.table import Table
    from rich.text import Text

    results = redacted.results
    defenses = defense_names(results)[:_MOST_DEFENSES]
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(Text("attack"))
    for defense in defenses:
        table.add_column(Text(plain(defense)))

    def cell(attack: str, defense: str) -> Text:
        found = cell_for(results, attack, defense)
        first = found.lines[0] if found.lines else ""
        said = first if first.startswith(found.state) else ", ".join(part for part in (found.state, first) if part)
        return Text(plain(said), style=_STATES.get(found.state, "dim"))

    for attack in attack_names(results):
        table.add_row(Text(plain(attack)), *(cell(attack, defense) for defense in defenses))
    return table
