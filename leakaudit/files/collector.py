"""A pause of Python's garbage collector, for work that only adds objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the search for reference cycles in this process.

    Python looks for cycles among all objects whenever many were made. While a large document is read, each search visits everything that was
    read so far and frees nothing, which took half of the time of reading 16,000 attempts.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
