"""The printed form of a verdict: its rules, and what to do next.

It needs no results, so the gate prints it without what makes a report. Where no terminal is, as in a pipeline, it has neither colours nor a width
of its own, and is printed without rich, which takes a tenth of the gate's start. Both forms have the same characters.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from leakaudit.gate.explained import is_built_in
from leakaudit.gate.verdict import Status, Verdict
from leakaudit.reports.escaping import plain
from leakaudit.reports.wording import meaning, next_step, rule_seen, run_in_words

if TYPE_CHECKING:
    from rich.console import Console

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

_WIDTH = 80
"""Characters of a line where no terminal is. Source: rich."""

_ASKED_BY_RICH = ("COLUMNS", "FORCE_COLOR", "JUPYTER_COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
"""Environment variables that change what rich prints where no terminal is."""

_Line = Sequence[tuple[str, str]]
"""Pieces of a line, each with its style."""


def print_verdict(verdict: Verdict, *, quiet: bool = False, console: Console | None = None) -> None:
    """Print a verdict and its first rules; only the verdict if `quiet`."""
    lines: list[_Line] = [_in_a_line(verdict)] if quiet else [*_screen(verdict)]
    if console is None and no_terminal() and (bare := bare_text(lines, _WIDTH if not quiet else None)) is not None:
        sys.stdout.write(bare)
        sys.stdout.flush()
        return
    from rich.text import Text

    console = new_console(console)
    for line in lines:
        console.print(Text.assemble(*line), soft_wrap=quiet)


def _in_a_line(verdict: Verdict) -> _Line:
    return [_word(verdict), (f" {plain(verdict.sentence)}", "")]


def _word(verdict: Verdict) -> tuple[str, str]:
    return f" {verdict.verdict} ", f"bold reverse {_COLOURS[verdict.verdict]}"


def _screen(verdict: Verdict) -> Iterator[_Line]:
    yield []
    yield [_word(verdict), (f" {meaning(verdict)}", "bold")]
    yield [(plain(verdict.sentence), "")]
    yield []
    for rule in verdict.rules[:_MOST_RULES]:
        yield [(f"{rule.word:<13}", _COLOURS[rule.word]), (rule.id, ""), (f"  {plain(rule_seen(rule))}", "dim")]
    if len(verdict.rules) > _MOST_RULES:
        yield [(f"and {len(verdict.rules) - _MOST_RULES} more rules in the report", "dim")]
    for run in verdict.runs[:_MOST_RUNS]:
        yield [(plain(run_in_words(run)), "dim")]
    if len(verdict.runs) > _MOST_RUNS:
        yield [(f"and {len(verdict.runs) - _MOST_RUNS} more runs", "dim")]
    if step := next_step(verdict):
        yield [(f"next: {plain(step)}", "")]
    for waiver in verdict.waivers:
        yield [(plain(waiver.sentence), "dim" if waiver.state == "applies" else "yellow")]
    if hint := _hint(verdict):
        yield [(plain(hint), "dim")]


def no_terminal() -> bool:
    """Return whether output goes to no terminal, and nothing asks for another form."""
    asked = any(name in os.environ for name in _ASKED_BY_RICH) or "IPython" in sys.modules
    return not asked and not any(map(os.isatty, _open_streams()))


def _open_streams() -> Iterator[int]:
    """Yield the standard streams that are open."""
    for stream in range(3):
        try:
            os.fstat(stream)
        except OSError:
            continue
        yield stream


def bare_text(lines: Sequence[_Line], width: int | None) -> str | None:
    r"""Return lines as rich prints them where no terminal is.

    Args:
        lines: pieces with their styles, which are left out.
        width: most characters of a line; None for no limit.

    Returns:
        The text; None if a word is longer than a line, or a character may be wider than others.

    >>> bare_text([[("one two", "bold")], []], 5)
    'one \ntwo\n\n'
    """
    texts = ["".join(text for text, _ in line) for line in lines]
    if not all(text.isascii() and text.isprintable() for text in texts):
        return None
    wrapped = [[text] if width is None else _wrapped(text, width) for text in texts]
    if any(found is None for found in wrapped):
        return None
    return "".join(f"{line}\n" for found in wrapped for line in found or ())


def _wrapped(text: str, width: int) -> list[str] | None:
    """Return the lines of a text; None if a word is longer than a line.

    A blank at the end of a line stays where it fits.
    """
    lines = [""]
    for word in re.findall(r"\s*\S+\s*", text):
        needed = len(word.rstrip())
        if needed > width:
            return None
        if lines[-1] and len(lines[-1]) + needed > width:
            lines.append("")
        lines[-1] += word
    return [line[:width] + line[width:].rstrip() for line in lines]


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
    from rich.console import Console

    return console or Console(highlight=False)
