"""The printed form of a verdict: its rules, and what to do next.

It needs no results, so the gate prints it without what makes a report.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from leakaudit.gate.explained import is_built_in
from leakaudit.gate.verdict import Status, Verdict
from leakaudit.reports.escaping import plain
from leakaudit.reports.wording import meaning, next_step, rule_seen, run_in_words

_COLOURS = {
    "PASS": "green",
    "FAIL": "red",
    "INCONCLUSIVE": "yellow",
    "WARN": "yellow",
    "WAIVED": "yellow",
    "ERROR": "magenta",
}
_MOST_RULES = 8
_MOST_RUNS = 20


def print_verdict(verdict: Verdict, *, quiet: bool = False, console: Console | None = None) -> None:
    """Print a verdict and its first rules; only the verdict if `quiet`."""
    console = new_console(console)
    head = Text()
    head.append(f" {verdict.verdict} ", style=f"bold reverse {_COLOURS[verdict.verdict]}")
    if quiet:
        head.append(f" {plain(verdict.sentence)}")
        console.print(head, soft_wrap=True)
        return
    head.append(f" {meaning(verdict)}", style="bold")
    console.print()
    console.print(head)
    console.print(Text(plain(verdict.sentence)))
    console.print()
    for rule in verdict.rules[:_MOST_RULES]:
        line = Text()
        line.append(f"{rule.word:<13}", style=_COLOURS[rule.word])
        line.append(rule.id)
        line.append(f"  {plain(rule_seen(rule))}", style="dim")
        console.print(line)
    if len(verdict.rules) > _MOST_RULES:
        console.print(Text(f"and {len(verdict.rules) - _MOST_RULES} more rules in the report", style="dim"))
    for run in verdict.runs[:_MOST_RUNS]:
        console.print(Text(plain(run_in_words(run)), style="dim"))
    if len(verdict.runs) > _MOST_RUNS:
        console.print(Text(f"and {len(verdict.runs) - _MOST_RUNS} more runs", style="dim"))
    if step := next_step(verdict):
        console.print(Text(f"next: {plain(step)}"))
    for waiver in verdict.waivers:
        console.print(Text(plain(waiver.sentence), style="dim" if waiver.state == "applies" else "yellow"))
    if hint := _hint(verdict):
        console.print(Text(plain(hint), style="dim"))


def _hint(verdict: Verdict) -> str:
    """Return which command says more on a verdict that is not PASS."""
    if verdict.verdict is Status.PASS:
        return ""
    if verdict.deciding_rule is None:
        return f"`leakaudit explain exit-code {verdict.exit_code}` says what this means and what to do."
    own = "" if is_built_in(verdict) else " --policy FILE"
    return f"`leakaudit explain {verdict.deciding_rule}{own}` says what this rule asks."


def new_console(console: Console | None) -> Console:
    """Return the console that is given, else one on standard output."""
    return console or Console(highlight=False)
