"""The processes that take part in one audit of rounds.

Each of them holds a lock on a file of its own in the spool until it ends. The first one holds `trainer.lock`, as in any audit; the others
hold `trainer-<process id>.lock`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from leakaudit.storage.locks import create_locked, is_locked

PATTERN = "trainer*.lock"
"""Names of the locks, in the folder of the spool."""


def take_part(root: Path) -> int | None:
    """Hold a lock that shows that this process takes part; return its descriptor.

    None if the file system has no locks. A process of the same id, which has ended, may have left the file.

    Raises:
        OSError: the file cannot be created.
    """
    path = lock_of(root)
    with contextlib.suppress(OSError):
        path.unlink()
    return create_locked(path)


def lock_of(root: Path) -> Path:
    """Return the lock file of this process, if it is not the first one."""
    return root / f"trainer-{os.getpid()}.lock"


def anybody_left(root: Path) -> bool | None:
    """Return whether any process takes part, this one included.

    None if this cannot be found out: the file system has no locks, or the spool was removed.
    """
    states = [is_locked(path) for path in root.glob(PATTERN)]
    known = [state for state in states if state is not None]
    return any(known) if known else None


def others_left(root: Path, own: Path) -> bool:
    """Return whether a process other than the holder of `own` takes part.

    Args:
        root: folder of the spool.
        own: lock file of this process.
    """
    return any(is_locked(path) is True for path in root.glob(PATTERN) if path != own)
