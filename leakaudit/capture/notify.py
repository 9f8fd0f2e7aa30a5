"""Messages on stderr that tell the user of a training about its audit."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from leakaudit.capture.boundary import suppress

LOG_LINE_SECONDS = 30.0
"""Seconds between two lines of progress where stderr is not a terminal. Our choice: often enough to show in a log that the attacks still
run."""


def notify(line: str) -> None:
    """Print one line for the user.

    A logger at its default level would not show it. If stderr is closed, or is a pipe that nobody reads, this does nothing.
    """
    with suppress(OSError, ValueError, AttributeError):
        print(f"leakaudit: {line}", file=sys.stderr, flush=True)


@contextmanager
def countdown() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a line of progress.

    On a terminal the line changes in place; elsewhere at most one line is printed every `LOG_LINE_SECONDS`.
    """
    last: float | None = None
    tty = sys.stderr.isatty()

    def show(line: str) -> None:
        nonlocal last
        if tty:
            most = shutil.get_terminal_size().columns - 1  # a line that wraps cannot be replaced
            print(f"\r\033[K{f'leakaudit: {line}'[:most]}", end="", file=sys.stderr, flush=True)
        elif last is None or time.monotonic() - last >= LOG_LINE_SECONDS:
            last = time.monotonic()
            notify(line)

    try:
        yield show
    finally:
        if tty:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
