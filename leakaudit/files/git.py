"""What git knows of a folder, by its command line.

Nothing here changes a repository, and no message of git is passed on: it may hold a path or a name.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

PATIENCE_S = 5.0
"""Seconds that one call may take. Our choice: the state of a large tree takes about one."""


class GitError(Exception):
    """Git could not answer; it is not there, took too long, or refused."""


@dataclass(frozen=True)
class Head:
    """The commit of a folder's code."""

    commit: str
    """Its id in hex."""
    dirty: bool
    """Whether a file that git knows differs from the commit, or one that it does not ignore is new."""


def head_of(folder: Path, out: Path) -> Head | None:
    """Return the commit of a folder's code; None if git cannot say it.

    Args:
        folder: the working folder.
        out: a folder of outputs. What it and those beside it hold (`out.1`, `out-2`) is no change of the code.
    """
    try:
        commit = git(folder, "rev-parse", "--verify", "HEAD").decode("ascii").strip()
        top = Path(os.fsdecode(git(folder, "rev-parse", "--show-toplevel")).rstrip("\n"))
        return Head(commit, bool(git(folder, "status", "--porcelain", "--", ":/", *_without(top, out)).strip()))
    except (GitError, OSError, UnicodeDecodeError):
        return None


def _without(top: Path, out: Path) -> list[str]:
    """Return the patterns that leave a folder of outputs out."""
    inside = out.absolute().resolve()
    if not inside.is_relative_to(top.resolve()) or inside == top.resolve():
        return []
    name = inside.relative_to(top.resolve()).as_posix()
    return [f":(top,exclude){name}{end}" for end in ("", ".*", "-*")]


def git(folder: Path, *words: str) -> bytes:
    """Return what a command of git prints.

    Args:
        folder: where it runs.
        words: the command and its arguments.

    Raises:
        GitError: it failed.
    """
    quiet = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    # a repository can name a program that git starts to find changed files; it is not ours to start
    command = ["git", "-c", "core.fsmonitor=false", *words]
    try:
        done = subprocess.run(  # a fixed program without a shell
            command,
            cwd=folder,
            env=os.environ | quiet,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE_S,
            check=True,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        raise GitError from None
    return done.stdout
