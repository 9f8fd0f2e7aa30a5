"""Waits for other processes, and looks whether they live."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def until(condition: Callable[[], bool], seconds: float = 180.0) -> None:
    """Wait for something, but not forever."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Return whether any thread of a process runs.

    A process that only waits to be collected does not run.

    The first thread may be through while another still holds the files, and with them the locks.
    """
    try:
        threads = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return alive(pid)  # one went while we looked
    return any(line.rsplit(")", 1)[1].split()[0] not in "ZX" for line in threads)
