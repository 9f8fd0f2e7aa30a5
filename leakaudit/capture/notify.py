"""Messages that tell the user of a training about its audit.

They go to stderr; in a notebook, to one output below the cell.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from leakaudit.capture.boundary import suppress
from leakaudit.capture.cell_output import in_kernel, shown_in_cell

LOG_LINE_SECONDS = 30.0
"""Seconds between two lines of progress where stderr is not a terminal. Our choice: often enough to show in a log that the attacks still
run."""


def notify(line: str) -> None:
    """Print one line for the user.

    A logger at its default level would not show it. If stderr is closed, or is a pipe that nobody reads, this does nothing.
    """
    with suppress(Exception):  # whatever a notebook's display raises, the line goes to stderr
        if shown_in_cell(f"leakaudit: {line}"):
            return
    with suppress(OSError, ValueError, AttributeError):
        print(f"leakaudit: {line}", file=sys.stderr, flush=True)


@contextmanager
def countdown() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a line of progress.

    On a terminal and in a notebook the line changes in place; elsewhere at most one line is printed every `LOG_LINE_SECONDS`.
    """
    if in_kernel():
        with _in_cell() as show_there:
            yield show_there
        return
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


@contextmanager
def _in_cell() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a line of progress in the output of a cell."""
    last = ""

    def show(line: str) -> None:
        nonlocal last
        if line != last:
            last = line
            with suppress(Exception):
                shown_in_cell(progress=f"leakaudit: {line}")

    try:
        yield show
    finally:
        with suppress(Exception):
            shown_in_cell()
