"""What stops a command, and what a person sees of it."""

from __future__ import annotations

import signal
import sys

import pytest

from leakaudit.cli.stopping import Stopped, stop_on_signals


class _Dies:
    """An object that a signal meets in its destructor."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the types of exceptions of destructors that are shown."""
    found: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: found.append(type(lost.exc_value).__name__))
    return found


def test_a_signal_in_a_destructor_stops_without_a_traceback(shown: list[str]) -> None:
    """Python drops the exception there; the next look at the request raises it again."""
    with stop_on_signals() as request:
        _Dies()
        with pytest.raises(Stopped):
            request.check()
    assert shown == []


def test_other_exceptions_of_destructors_are_shown(shown: list[str]) -> None:
    """They may be defects."""

    class Broken:
        def __del__(self) -> None:
            raise ValueError("broken")

    with stop_on_signals():
        Broken()
    assert shown == ["ValueError"]


def test_a_command_that_writes_its_results_is_not_stopped_by_an_earlier_signal() -> None:
    """Writing is what the signal asked for."""
    with stop_on_signals() as request:
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped):
            request.check()
        request.finish()
        request.check()
