"""Tells the user of a training about its audit, on stderr."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOG_LINE_SECONDS = 30.0
"""Seconds between two lines of progress where stderr is not a terminal. Our choice: often enough to see the attacks live in a log."""


def notify(line: str) -> None:
    """Tell the user one thing; loggers at their default level would swallow it.

    Nothing is told, and nothing is raised, where stderr is closed or a pipe that nobody reads.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"leakaudit: {line}", file=sys.stderr, flush=True)


@contextmanager
def countdown() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a line of progress.

    On a terminal the line changes in place; elsewhere one line is printed in `LOG_LINE_SECONDS`.
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
