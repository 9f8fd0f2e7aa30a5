"""Number of CPU threads for the attacks: the number of idle cores.

Threads that wait for a busy core slow each other down.
"""

from __future__ import annotations

import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""File with the CPU time that a container may use: microseconds per period (or `max`), and the period."""

EXPLICIT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that set the number of threads. If one is set, we do not change the number."""


def wait_passively() -> None:
    """Make idle threads sleep instead of spin.

    Call it before torch is imported; later it has no effect.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def threads_to_take() -> int | None:
    """Return the number of idle cores; None if the environment sets threads."""
    return None if any(os.environ.get(name) for name in EXPLICIT) else idle_cores()


def idle_cores() -> int:
    """Return how many cores are idle and allowed to this process, at least one."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return idle_of(os.cpu_count() or 1, _allowed(), load)


def idle_of(cores: int, allowed: int, load: float) -> int:
    """Return the threads for a process on a loaded machine.

    It may use `allowed` of the machine's `cores`, and `load` processes want to run.

    >>> idle_of(8, 8, 0.3), idle_of(8, 4, 3.1), idle_of(2, 2, 1.2), idle_of(2, 2, 9.0)
    (8, 4, 1, 1)
    """
    return max(1, min(allowed, round(cores - load)))


def _allowed() -> int:
    """Return the cores that the system lets this process use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = QUOTA.read_text(encoding="ascii").split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        return cores
