"""The disk space that snapshots take."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path


def bytes_in(folders: Iterable[Path]) -> int:
    """Return the size of all files in folders; a file that several share counts once."""
    found = {}
    for folder in folders:
        for stat in _stats_in(folder):
            found[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(found.values())


def size_of(snapshot: Path) -> int:
    """Return the number of bytes that are freed if a snapshot is removed.

    Files that other snapshots share do not count.
    """
    return sum(stat.st_size for stat in _stats_in(snapshot) if stat.st_nlink == 1)


def _stats_in(folder: Path) -> Iterator[os.stat_result]:
    """Yield the `stat` result of each file in a folder.

    Files that somebody removes meanwhile are left out.
    """
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                yield path.stat()
