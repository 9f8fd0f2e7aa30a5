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
    from leakaudit.results.schema import Attempt

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
        _show_attempts(_attempts_of(judged, part, name), f"{part} {name}", as_json)


_EXAMPLES = {"rule": "rule sentence-rate", "step": "step 120", "attack": "attack span"}


def _show_all(judged: Judged, verdict: Verdict, as_json: bool) -> None:
    from rich.console import Console

    from leakaudit.reports.redaction import redact
    from leakaudit.reports.terminal import print_audit
    from leakaudit.results.schema import TextMode

    if as_json:
        click.echo(verdict.model_dump_json(by_alias=True, indent=1))
        return
    print_audit(redact(judged.results, [], verdict, TextMode.HASH), Console(highlight=False))


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
    """Return the attempts on a step, or of an attack.

    Raises:
        ConfigError: the results have no such step or attack.
    """
    found = judged.results
    if part == "attack":
        chosen = [attempt for attempt in found.attempts if attempt.attack == name]
        if not chosen:
            raise _unknown("attack", name, sorted({attempt.attack for attempt in found.attempts}))
        return chosen
    steps = {step.id for step in found.steps if name in (step.id, str(step.step))}
    if not steps:
        raise _unknown("step", name, [str(step.step) for step in found.steps])
    return [attempt for attempt in found.attempts if attempt.step in steps]


def _show_attempts(attempts: Sequence[Attempt], title: str, as_json: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    from leakaudit.reports.escaping import plain
    from leakaudit.results.wording import counted

    if as_json:
        click.echo(json.dumps({"shown": title, "attempts": [_as_data(attempt) for attempt in attempts]}, indent=1))
        return
    console = Console(highlight=False)
    leaks = sum(attempt.leaked for attempt in attempts)
    console.print(Text(f"{plain(title)}: {counted(len(attempts), 'attempt')}, {leaks} with a leak event", style="bold"))
    order = sorted(attempts, key=lambda attempt: not attempt.leaked)
    for attempt in order[:MOST_LINES]:
        words = f"{attempt.step}  {attempt.attack} under {attempt.defense}: {_outcome(attempt)}"
        console.print(Text(plain(words), style="red" if attempt.leaked else ""))
    if len(order) > MOST_LINES:
        console.print(Text(f"and {len(order) - MOST_LINES} more; --json has all", style="dim"))


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
