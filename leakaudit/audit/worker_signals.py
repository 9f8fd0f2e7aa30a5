"""What stops a side process: SIGTERM, and the end of its time limit."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from leakaudit.exit_codes import ExitCode

ASK_AGAIN_S = 2.0
"""Seconds after which the end of a time limit is raised again. Our choice: giving a snapshot back takes less."""


_was_asked = False
"""Whether SIGTERM came while it interrupts."""


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, and restore its handler afterwards."""
    global _was_asked
    previous, _was_asked = signal.signal(signal.SIGTERM, _interrupt), False
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
        _was_asked = False


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    global _was_asked
    _was_asked = True
    raise KeyboardInterrupt


def raise_lost_interrupt() -> None:
    """Raise the interrupt of an earlier SIGTERM again, in case it was lost.

    Foreign code may turn it into an error of its own, as a reader in Rust does with what Python raises inside of it.

    Raises:
        KeyboardInterrupt: SIGTERM came while it interrupts.
    """
    if _was_asked:
        raise KeyboardInterrupt


class TimeIsUp(KeyboardInterrupt):
    """The exception for the end of a worker's time limit."""


@contextmanager
def time_limit_interrupts(work_s: float | None) -> Iterator[None]:
    """Raise `TimeIsUp` after a number of seconds; None for no limit."""
    if work_s is None:
        yield
        return
    previous = signal.signal(signal.SIGALRM, _time_is_up)
    signal.setitimer(signal.ITIMER_REAL, work_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _time_is_up(_number: int, _frame: FrameType | None) -> None:
    # Python drops an exception that a destructor raises, so the next second asks again.
    signal.setitimer(signal.ITIMER_REAL, ASK_AGAIN_S)
    raise TimeIsUp


def code_of(stop: KeyboardInterrupt) -> ExitCode:
    """Return the exit code of a worker that was stopped."""
    return ExitCode.TIME_LIMIT if isinstance(stop, TimeIsUp) else ExitCode.INTERRUPTED


def ignore_requests() -> None:
    """Ignore SIGTERM and the time limit for the rest of the process.

    Both ask for the results, and the worker is about to write them.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0)
