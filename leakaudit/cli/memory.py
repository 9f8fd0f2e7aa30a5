"""Memory that a command frees and soon needs again."""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3): free memory that is kept at the top of the heap, and size from which memory is mapped instead, in bytes."""

KEPT = 2**31 - 1
"""Bytes for both: the largest value that mallopt takes. So memory of up to 2 GiB is kept."""


def keep_freed_memory() -> None:
    """Keep freed memory in this process instead of returning it to the system.

    Attacks make and free tensors of the size of the word embedding all the time, and the system clears each page again (more than a quarter
    of an audit's time, docs/measurements/nights.md). The process then keeps its peak of memory until it ends, so this is for commands and not
    for what runs inside or beside a training. It does nothing where the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(MMAP_THRESHOLD, KEPT)
    mallopt(TRIM_THRESHOLD, KEPT)
