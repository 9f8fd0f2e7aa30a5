"""`leakaudit show`: an audit, or one part of it, on one screen of a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from leakaudit.cli.common import EXISTING, clear_errors
from leakaudit.cli.judging import Judged, Yardstick, judging, read_judged
from leakaudit.errors import ConfigError

if TYPE_CHECKING:
    from leakaudit.gate.verdict import Verdict
    from leakaudit.results.schema import Attempt, Results

MOST_LINES = 16
"""Most attempts that the terminal shows; `--json` has all."""


@click.command(short_help="Show an audit, or a part of it, on one screen.")
@click.argument("run_dir", type=EXISTING)
@click.argument("part", type=click.Choice(["rule", "step", "attack"]), required=False)
@click.argument("name", required=False)
@judging
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@clear_errors
def show(run_dir: Path, part: str | None, name: str | None, as_json: bool, by: Yardstick) -> None:
    """Show the audit in RUN_DIR, or its `rule ID`, `step N` or `attack NAME`.

    The results are judged anew by the policy. No text is shown. Exit codes: 0 shown, whatever the verdict (`leakaudit gate` ends with the
    verdict's code); 2 usage error or an unknown name; 5 the results cannot be read.
    """
    from datetime import UTC, datetime

    if part is not None and name is None:
        raise click.UsageError(f"{part} needs a name, such as `leakaudit show RUN {_EXAMPLES[part]}`")
    judged = read_judged(run_dir, by)
    verdict = judged.verdict(datetime.now(UTC))
    if part is None or name is None:
        _show_all(judged, verdict, as_json)
    elif part == "rule":
        _show_rule(verdict, name, as_json)
    else:
        _show_attempts(judged, run_dir, part, name, as_json)


_EXAMPLES = {"rule": "rule sentence-rate", "step": "step 120", "attack": "attack span"}


def _show_all(judged: Judged, verdict: Verdict, as_json: bool) -> None:
    from rich.console import Console

    from leakaudit.reports.redaction import redact
    from leakaudit.reports.terminal import print_audit
    from leakaudit.results.schema import TextMode

    redacted = redact(judged.results, [], verdict, TextMode.HASH)
    if as_json:
        document = {"verdict": verdict.model_dump(mode="json", by_alias=True), "matrix": _matrix(redacted.results)}
        document["canaries"] = [
            one.model_dump(mode="json") | {"verdict": one.verdict} for one in redacted.results.canaries
        ]
        click.echo(json.dumps(document, indent=1))
        return
    print_audit(redacted, Console(highlight=False))


def _matrix(results: Results) -> list[dict[str, Any]]:
    """Return each attack under each defence.

    Each has the state and the counts that the terminal shows.
    """
    from leakaudit.gate.evidence import Index
    from leakaudit.reports.cells import attack_names, cell_for, defense_names

    index = Index(results)
    cells = ((a, d, cell_for(results, a, d, index)) for d in defense_names(results) for a in attack_names(results))
    summaries = {(s.attack, s.defense): s.model_dump(mode="json") for s in results.summaries}
    return [
        {"attack": a, "defense": d, "state": cell.state, "shown": cell.lines, "summary": summaries.get((a, d))}
        for a, d, cell in cells
    ]


def _show_rule(verdict: Verdict, name: str, as_json: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    from leakaudit.reports.escaping import plain
    from leakaudit.reports.wording import rule_seen

    rule = next((rule for rule in verdict.rules if rule.id == name), None)
    if rule is None:
        raise _unknown("rule", name, [rule.id for rule in verdict.rules])
    if as_json:
        click.echo(rule.model_dump_json(indent=1))
        return
    console = Console(highlight=False)
    console.print(Text(f"{rule.word}  {plain(rule.id)}", style="bold"))
    console.print(Text(plain(rule_seen(rule))))
    console.print(Text(f"`leakaudit explain {plain(rule.id)}` says what it asks.", style="dim"))


def _attempts_of(judged: Judged, part: str, name: str) -> list[Attempt]:
    """Return the attempts on a step, or of an attack, without private words.

    Raises:
        ConfigError: the results have no such step or attack.
    """
    from leakaudit.reports.redaction import cleaned
    from leakaudit.results.schema import TextMode

    found = cleaned(judged.results, TextMode.MASKED)
    if part == "attack":
        chosen = [attempt for attempt in found.attempts if attempt.attack == name]
        if not chosen:
            raise _unknown("attack", name, sorted({attempt.attack for attempt in found.attempts}))
        return chosen
    steps = {step.id for step in found.steps if name in (step.id, str(step.step))}
    if not steps:
        raise _unknown("step", name, [str(step.step) for step in found.steps])
    return [attempt for attempt in found.attempts if attempt.step in steps]


def _show_attempts(judged: Judged, run_dir: Path, part: str, name: str, as_json: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    from leakaudit.reports.escaping import plain
    from leakaudit.results.wording import counted

    attempts, title = _attempts_of(judged, part, name), f"{part} {name}"
    if as_json:
        click.echo(json.dumps({"shown": title, "attempts": [_as_data(attempt) for attempt in attempts]}, indent=1))
        return
    console = Console(highlight=False)
    leaks = sum(attempt.leaked for attempt in attempts)
    console.print(Text(f"{plain(title)}: {counted(len(attempts), 'attempt')}, {leaks} with a leak event", style="bold"))
    order = sorted(attempts, key=lambda attempt: not attempt.leaked)
    lines = [_line(attempt, console.width) for attempt in order[:MOST_LINES]]
    for attempt, line in zip(order, lines, strict=False):
        console.print(Text(line, style="red" if attempt.leaked else ""), soft_wrap=True)
    if len(order) > MOST_LINES:
        console.print(Text(f"and {len(order) - MOST_LINES} more; --json has all", style="dim"))
    if any(_CUT in line for line in lines):
        console.print(Text(f"{_CUT} stands for a part of a long name; --json has the whole", style="dim"))
    if part == "step" and (command := _replay_of(judged.results, order, run_dir)):
        console.print(Text(plain(f"again: {command}"), style="dim"), soft_wrap=True)


def _replay_of(results: Results, attempts: Sequence[Attempt], run_dir: Path) -> str | None:
    """Return the command that makes the first attempt again.

    None if its snapshot is not kept.
    """
    from leakaudit.results.replay_command import replay_command

    folder = run_dir if run_dir.is_dir() else run_dir.parent
    return replay_command(results, attempts[0], folder, str(folder)) if attempts else None


_CUT = "\u2026"
"""Character for what is left out of a long name."""

_LEAST_CELLS = 8
"""Fewest cells of a name that is cut. Our choice: the beginning of most names can still be told apart."""


def _line(attempt: Attempt, width: int) -> str:
    """Return an attempt in one line of at most `width` cells.

    Long names are cut.

    The outcome is whole, and cut only where the terminal is too narrow for it.
    """
    from rich.cells import cell_len

    from leakaudit.reports.escaping import plain

    step, attack, defense, outcome = map(plain, (attempt.step, attempt.attack, attempt.defense, _outcome(attempt)))
    room = max(2 * _LEAST_CELLS, width - cell_len(f"{step}   under : {outcome}"))
    if cell_len(attack) + cell_len(defense) > room:
        short = min(cell_len(attack), max(room // 2, room - cell_len(defense)))
        attack, defense = _cut(attack, short), _cut(defense, room - short)
    return _cut(f"{step}  {attack} under {defense}: {outcome}", width)


def _cut(text: str, cells: int) -> str:
    """Return a text of at most `cells` cells of the terminal.

    What is left out is marked.
    """
    from rich.text import Text

    fitted = Text(text)
    fitted.truncate(cells, overflow="ellipsis")
    return fitted.plain


def _outcome(attempt: Attempt) -> str:
    """Return the first leak event and the number of others, or how the attempt ended."""
    if not attempt.events:
        return "no leak event" if attempt.finished else attempt.status.value
    first, *others = attempt.events
    return f"{first} and {len(others)} more" if others else first


def _as_data(attempt: Attempt) -> dict[str, Any]:
    """Return an attempt without its sequences, as JSON has it."""
    return attempt.model_dump(mode="json", exclude={"sequences"})


def _unknown(kind: str, name: str, known: Sequence[str]) -> ConfigError:
    some = ", ".join(known[:12]) + (f" and {len(known) - 12} more" if len(known) > 12 else "")
    return ConfigError(f"this audit has no {kind} {name!r}; it has {some or 'none'}")
