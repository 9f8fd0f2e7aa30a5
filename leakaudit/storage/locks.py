"""Locks on files and folders that end with their process, even if it is killed.

They are flock(2) locks, not locks of the library filelock; docs/decisions/locks.md has the reasons. On a file system without
locks, a lock on a folder has no effect, and a lock on a file fails.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from leakaudit.errors import SpoolError
from leakaudit.files.private_files import create, open_to_lock

WAIT_SECONDS = 10.0
"""Seconds that a process waits for another one that begins in the same folder. Our choice: creating a spool takes less than a second."""

RETRY_SECONDS = 0.05
"""Seconds between two attempts. Our choice."""


def try_lock(descriptor: int) -> bool:
    """Lock an open file or folder until its descriptor is closed.

    Return False if another process holds the lock.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def create_locked(path: Path) -> int | None:
    """Create a file, lock it and return its descriptor.

    If the file system has no locks, return None and leave no file.

    Raises:
        FileExistsError: the file exists.
        OSError: it cannot be created.
    """
    descriptor = create(path)
    try:
        locked = try_lock(descriptor)
    except OSError:
        locked = False
    if not locked:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        return None
    return descriptor


@contextmanager
def file_lock(path: Path) -> Iterator[bool]:
    """Lock a file for the duration of the block.

    The file is created if it does not exist.

    Yields:
        True if the lock is held; False if another process holds it or the file system has no locks.

    Raises:
        OSError: the file cannot be opened, or is a link or a folder.
    """
    descriptor = open_to_lock(path)
    try:
        try:
            locked = try_lock(descriptor)
        except OSError:
            locked = False
        yield locked
    finally:
        os.close(descriptor)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lock a folder for the duration of the block.

    The folder is created if it does not exist, and no lock file is needed.

    If the file system has no locks, or after `WAIT_SECONDS`, the block runs without the lock.

    Raises:
        SpoolError: the folder cannot be created or opened.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise SpoolError(
            f"{folder}: cannot be written ({error.strerror}); set `out_dir` to a folder that can"
        ) from None
    try:
        _wait_for_lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _wait_for_lock(descriptor: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        try:
            if try_lock(descriptor):
                return
        except OSError:
            return
        time.sleep(RETRY_SECONDS)


def lock_folder(folder: Path) -> int:
    """Lock a folder if its file system has locks, and return its descriptor.

    The caller must close the descriptor.

    Raises:
        OSError: the folder cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    with suppress(OSError):
        try_lock(descriptor)
    return descriptor


def is_locked(path: Path) -> bool | None:
    """Return whether another process holds a file's lock.

    None if the file does not exist or this cannot be found out.
    """
    # O_NONBLOCK, because the path may be a pipe.
    return _probe(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))


def is_folder_locked(folder: Path) -> bool:
    """Return whether another process holds a folder's lock.

    False if this cannot be found out.
    """
    return _probe(folder, os.O_RDONLY) is True


def _probe(path: Path, flags: int) -> bool | None:
    """Return whether another process holds a path's lock; None if unknown.

    It tries a shared lock, so that two processes that ask at the same time do not find each other's lock.
    """
    try:
        descriptor = os.open(path, flags)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False
