"""Regular files only: a pipe or a device in place of a file holds nobody up."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def check_regular(descriptor: int, path: Path) -> None:
    """Close a descriptor and raise unless it is of a regular file.

    Args:
        descriptor: open, with `O_NONBLOCK`: without it, opening a pipe waits for somebody at its other end.
        path: for the error.

    Raises:
        OSError: it is a pipe, a device, a socket or a folder.
    """
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    check_regular(descriptor, path)
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        return file.read()
