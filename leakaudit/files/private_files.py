"""Files that only their owner may read (mode 0600). No link is followed.

It needs the standard library only, so that reports can use it without torch.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from leakaudit.files.regular_files import check_regular


def create(path: Path) -> int:
    """Create a new file and return its descriptor, open for writing.

    Raises:
        FileExistsError: something exists at `path`, even a link without a target.
        OSError: the file cannot be created.
    """
    return _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)


def open_to_append(path: Path) -> int:
    """Open a file for appending, or create it, and return its descriptor.

    Raises:
        OSError: the file cannot be opened, is a link, belongs to somebody else, has a second name, or is not for its owner only.
    """
    descriptor = _open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    found = os.fstat(descriptor)
    if found.st_uid == os.getuid() and not found.st_mode & 0o077 and found.st_nlink == 1:
        return descriptor
    os.close(descriptor)
    raise PermissionError(errno.EPERM, f"others own {path.name}, or can read or write it: remove it", str(path))


def open_to_lock(path: Path) -> int:
    """Open a file unchanged, or create it, and return its descriptor for locking.

    Raises:
        OSError: the file cannot be opened, or is a link.
    """
    return _open(path, os.O_RDWR | os.O_CREAT)


def append_line(path: Path, line: str, *, sync: bool = True) -> None:
    """Append `line` and a line feed, or nothing if the disk is full.

    If the process is killed, at most the last line is incomplete.

    Args:
        path: the file; it is created if it does not exist.
        line: text without a line feed.
        sync: whether to wait until the line is on the disk.

    Raises:
        OSError: the line cannot be written. The file is then unchanged.
    """
    descriptor = open_to_append(path)
    try:
        before = os.fstat(descriptor).st_size
        try:
            write_all(descriptor, (line + "\n").encode())
            if sync:
                os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data`.

    `os.write` alone may write a part of it when the disk is nearly full.

    Raises:
        OSError: the disk is full, or fails.
    """
    left = memoryview(data)
    while len(left):
        left = left[os.write(descriptor, left) :]


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace the file at `path` by a file that holds `content`; text in UTF-8.

    A reader sees either the old file or the complete new one.

    Raises:
        OSError: the file cannot be written; the old one is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = _open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _open(path: Path, flags: int) -> int:
    """Open the regular file `path` without following a link; a new one gets mode 0600."""
    careful = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags | careful, 0o600)
    check_regular(descriptor, path)
    if flags & (os.O_EXCL | os.O_TRUNC):
        os.fchmod(descriptor, 0o600)  # the umask may have removed permissions of the owner
    return descriptor
