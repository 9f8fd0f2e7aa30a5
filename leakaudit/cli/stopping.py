"""What stops a command: Ctrl-C, SIGTERM, SIGHUP, and a limit of its time.

Before it stops, the command writes the results of finished attempts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType

from leakaudit.exit_codes import ExitCode, stopped_by

SAME_REQUEST_SECONDS = 1.0
"""A signal within this time after the first is the same request, because `timeout` and a closed terminal send two at once. Our choice: a
person who presses Ctrl-C again takes longer."""

WRITING_SHARE, SHORTEST_WRITING, LONGEST_WRITING = 0.05, 5.0, 60.0
"""Share of a time limit, and seconds at least and at most, that are left for results and report. Our choice: both take a few seconds for a hundred
steps."""

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stopped(KeyboardInterrupt):
    """The exception for a signal that asks this process to stop.

    It is a KeyboardInterrupt, so code that handles Ctrl-C also handles it.
    """

    def __init__(self, number: int) -> None:
        """Store the signal's number."""
        super().__init__(number)
        self.number = number


def exit_code(stop: KeyboardInterrupt) -> int:
    """Return the exit code of a process that a signal stopped.

    It is 130 for Ctrl-C and 143 for SIGTERM, as in shells, and 124 for the end of a time limit, as for timeout(1).

    >>> exit_code(KeyboardInterrupt()), exit_code(Stopped(15))
    (130, 143)
    """
    if time_is_up(stop):
        return ExitCode.TIME_LIMIT
    return stopped_by(stop.number if isinstance(stop, Stopped) else signal.SIGINT)


def time_is_up(stop: KeyboardInterrupt | None) -> bool:
    """Return whether the limit of time stopped a command."""
    return isinstance(stop, Stopped) and stop.number == signal.SIGALRM


def seconds_to_work(limit_s: float) -> float:
    """Return the seconds of a time limit after which a command writes its results.

    >>> seconds_to_work(7200.0), seconds_to_work(60.0)
    (7140.0, 55.0)
    """
    writing = min(LONGEST_WRITING, max(SHORTEST_WRITING, WRITING_SHARE * limit_s))
    return max(limit_s - writing, limit_s / 2)


class Request:
    """The request to stop this process, if a signal made one."""

    def __init__(self, limit_s: float | None = None) -> None:
        """Start without a request.

        Args:
            limit_s: seconds after which the command ends; None for no limit.
        """
        self.limit_s = limit_s
        self._first: int | None = None
        self._at = 0.0
        self._finishing = False

    def check(self) -> None:
        """Raise the exception of an earlier signal again, in case it was lost.

        Python drops exceptions that a destructor raises.

        Raises:
            Stopped: a signal asked to stop, and the command does not write its results yet.
        """
        if self._first is not None and not self._finishing:
            raise Stopped(self._first)

    def finish(self) -> None:
        """Ignore a first signal from now on; a second one still ends the process.

        The command now writes results, which is what a first signal asks for.
        """
        self._finishing = True

    def work_again(self) -> None:
        """Stop at a first signal again: the results are written, and further work begins.

        Raises:
            Stopped: a signal came while the results were written.
        """
        self._finishing = False
        self.check()

    def receive(self, number: int, _frame: FrameType | None) -> None:
        """Stop the command at the first signal, and the process at a later one.

        Raises:
            Stopped: at the first one.
        """
        if self._first is None:
            self._first, self._at = number, time.monotonic()
            if number == getattr(signal, "SIGHUP", None):
                _leave_terminal()
            if not self._finishing:
                raise Stopped(number)
        elif time.monotonic() - self._at >= SAME_REQUEST_SECONDS:
            _show_cursor()
            os._exit(stopped_by(number))  # finished attempts are in the journal


@contextlib.contextmanager
def stop_on_signals(limit_s: float | None = None) -> Iterator[Request]:
    """Turn signals into `Stopped` while a command runs.

    A signal that the caller ignores, as `nohup` does, stays ignored.

    Args:
        limit_s: seconds after which the command ends; it stops a little earlier, to write its results. None for no limit.
    """
    request = Request(limit_s)
    before = {}
    timer = () if limit_s is None else (signal.SIGALRM,)
    for number in (*SIGNALS, *timer):
        with contextlib.suppress(ValueError):  # outside the main thread Python does not allow signal handlers
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, request.receive)
    if limit_s is not None:
        signal.setitimer(signal.ITIMER_REAL, seconds_to_work(limit_s))
    shown = sys.unraisablehook

    def show(lost: sys.UnraisableHookArgs) -> None:
        if not isinstance(lost.exc_value, Stopped):  # a destructor lost it, and `check` raises it again
            shown(lost)

    sys.unraisablehook = show
    try:
        yield request
    finally:
        sys.unraisablehook = shown
        if limit_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_terminal() -> None:
    """Discard further output: the terminal was closed, and writing would fail."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        if os.isatty(stream):
            os.dup2(nowhere, stream)
    os.close(nowhere)


def _show_cursor() -> None:
    """Show the cursor again, which a progress bar hides."""
    if sys.stderr.isatty():
        with contextlib.suppress(OSError):
            os.write(2, b"\033[?25h\n")
