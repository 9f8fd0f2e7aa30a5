"""Who owns a folder, and who can write to it."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from pathlib import Path

from leakaudit.errors import SpoolError


def check_out_dir(folder: Path) -> None:
    """Refuse a folder that others can change; one that does not exist is accepted.

    They could put files there that we write private text to, or replace our results. Others may read it: our files in it are private.

    Raises:
        SpoolError: the folder is a symbolic link, belongs to somebody else, or others can write to it.
    """
    check_no_link(folder)
    if not folder.is_dir():
        return
    check_ours(folder)
    found = folder.stat()
    if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid)):
        raise SpoolError(
            f"{folder}: others can write to it (mode {stat.S_IMODE(found.st_mode):o}), so they could change the results; run "
            f"`chmod go-w {shlex.quote(str(folder))}`, or set `out_dir` to a folder of your own"
        )


def _is_own_group(group: int) -> bool:
    """Return whether a group has this user only, and the user's name.

    Many systems give each user such a group, and let it write to what the user makes.
    """
    with contextlib.suppress(ImportError, KeyError):
        import grp
        import pwd

        user, found = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
        return found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}
    return False


def check_ours(root: Path) -> None:
    """Refuse a folder that is a symbolic link or belongs to somebody else.

    Raises:
        SpoolError: it is, or does.
    """
    check_no_link(root)
    owner = root.stat().st_uid
    if hasattr(os, "getuid") and owner != os.getuid():
        raise SpoolError(f"{root}: belongs to user {owner}, not to you; give a folder of your own")


def check_no_link(folder: Path) -> None:
    """Refuse a symbolic link.

    Raises:
        SpoolError: the folder is one.
    """
    if folder.is_symlink():
        raise SpoolError(f"{folder}: is a link; snapshots hold private text and are not written through links")
