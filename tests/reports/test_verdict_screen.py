"""A verdict is printed with the same characters with and without rich."""

from __future__ import annotations

import io
import random
from datetime import UTC, datetime

import pytest
from rich.console import Console
from rich.text import Text

from leakaudit.gate.evaluate import evaluate
from leakaudit.gate.policy import default_policy
from leakaudit.reports import verdict_screen
from leakaudit.reports.verdict_screen import bare_text, print_verdict
from tests.support.factories import audit
from tests.support.undecided import FAILING

NOW = datetime(2026, 11, 2, 12, tzinfo=UTC)
AUDITS = {"leaky": audit(4, 26), "clean": audit(0, 60), **{name: found[0] for name, found in FAILING.items()}}


def by_rich(words: str, width: int) -> str:
    """Return a line as rich prints it to a file."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(Text(words))
    return str(console.file.getvalue())  # type: ignore[attr-defined]  # it is a StringIO


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("name", AUDITS)
def test_both_forms_have_the_same_characters(
    name: str, quiet: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Line breaks and blanks as well."""
    verdict = evaluate(AUDITS[name], default_policy(), now=NOW)
    console = Console(file=io.StringIO(), width=80, highlight=False)
    print_verdict(verdict, quiet=quiet, console=console)
    monkeypatch.setattr(verdict_screen, "no_terminal", lambda: True)
    monkeypatch.setattr(verdict_screen, "new_console", None)  # so that rich cannot be used
    print_verdict(verdict, quiet=quiet)
    assert capsys.readouterr().out == console.file.getvalue()  # type: ignore[attr-defined]  # it is a StringIO


def test_lines_break_where_rich_breaks_them() -> None:
    """Drawn words and blanks, at drawn widths."""
    rng = random.Random(7)
    compared = 0
    for _ in range(400):
        words = "".join("a" * rng.randint(1, 9) + " " * rng.choice([1, 1, 1, 2, 5]) for _ in range(rng.randint(1, 30)))
        text, width = " " * rng.choice([0, 0, 1, 3]) + words, rng.randint(10, 40)
        assert bare_text([[(text, "")]], width) == by_rich(text, width), (text, width)
        compared += 1
    assert compared == 400


@pytest.mark.parametrize("words", ["caf\u00e9", "a\tb", "a\nb", "x" * 81])
def test_other_characters_and_long_words_are_left_to_rich(words: str) -> None:
    """They may be wider, or are cut."""
    assert bare_text([[(words, "")]], 80) is None


@pytest.mark.parametrize("name", ["COLUMNS", "FORCE_COLOR"])
def test_who_asks_for_a_form_gets_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich reads these variables."""
    monkeypatch.setenv(name, "1")
    assert not verdict_screen.no_terminal()
