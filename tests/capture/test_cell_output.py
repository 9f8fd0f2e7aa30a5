"""Messages in a notebook: one output for each cell, and nothing on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from leakaudit.capture import cell_output
from leakaudit.capture.notify import countdown, notify


class Display:
    """IPython's `display`, which keeps what each output shows."""

    def __init__(self) -> None:
        self.outputs: list[list[dict[str, str]]] = []

    def __call__(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw and display_id
        states = [bundle]
        self.outputs.append(states)
        return SimpleNamespace(update=lambda bundle, *, raw: states.append(bundle))


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make this process look like the kernel of a notebook."""
    shell = SimpleNamespace(kernel=object(), execution_count=1, display=Display())
    ipython: Any = ModuleType("IPython")
    shown: Any = ModuleType("IPython.display")
    ipython.get_ipython, shown.display = lambda: shell, shell.display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    monkeypatch.setattr(cell_output, "_current", None)
    return shell


def test_the_messages_of_a_cell_are_one_output(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Each stays, and the next cell has an output of its own."""
    notify("one")
    notify("two <b>")
    shell.execution_count = 2
    notify("three")
    first, second = shell.display.outputs
    assert first[-1]["text/plain"] == "leakaudit: one\nleakaudit: two <b>" and "two &lt;b&gt;" in first[-1]["text/html"]
    assert second[-1]["text/plain"] == "leakaudit: three"
    assert capsys.readouterr().err == ""


def test_progress_is_one_line_that_changes_and_goes(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Messages stay above it."""
    notify("begin")
    with countdown() as show:
        show("1 of 2")
        show("1 of 2")
        show("2 of 2")
    [states] = shell.display.outputs
    assert [state["text/plain"] for state in states] == [
        "leakaudit: begin",
        "leakaudit: begin\nleakaudit: 1 of 2",
        "leakaudit: begin\nleakaudit: 2 of 2",
        "leakaudit: begin",
    ]
    assert capsys.readouterr().err == ""


def test_a_display_that_fails_leaves_the_line_on_stderr(
    shell: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A message is not lost, and nothing is raised into training."""

    def closed(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(sys.modules["IPython.display"], "display", closed)
    notify("one")
    with countdown() as show:
        show("1 of 2")
    assert capsys.readouterr().err == "leakaudit: one\n"


def test_a_terminal_of_ipython_is_no_notebook(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It has no kernel, and stderr is not red there."""
    del shell.kernel
    notify("one")
    assert (shell.display.outputs, capsys.readouterr().err) == ([], "leakaudit: one\n")


def test_ipython_is_not_imported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be installed and not be in use."""
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    monkeypatch.delitem(sys.modules, "IPython.display", raising=False)
    notify("one")
    assert "IPython" not in sys.modules and capsys.readouterr().err == "leakaudit: one\n"
