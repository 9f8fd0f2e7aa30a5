"""The folder in which an audit from the command line writes.

An unfinished audit in it is resumed if it is the same audit. Any other audit in it is moved aside.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from leakaudit.audit.state import Unfinished, unfinished
from leakaudit.errors import ConfigError, SpoolError
from leakaudit.storage.locks import folder_lock, is_folder_locked, lock_folder
from leakaudit.storage.run_folders import archive_previous


@contextmanager
def run_folder(out: Path, wanted: Unfinished, resume: bool | None) -> Iterator[str]:
    """Prepare a folder for one audit and lock it.

    Args:
        out: the folder; created if it does not exist.
        wanted: the audit that is to run.
        resume: True requires an unfinished audit to resume, False begins a new audit, and None resumes only if the unfinished audit
            has the same battery, model and data.

    Yields:
        A clause for the user that says what happened to an earlier audit in the folder; empty if there was no earlier audit.

    Raises:
        ConfigError: the folder cannot be used, another audit runs in it, or there is no audit to resume.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: needs a folder, found a file; give a folder")
    if (out / "spool").exists():
        raise ConfigError(f"--out {out}: holds the audit of a training run; give another folder")
    try:
        with folder_lock(out.absolute().parent):
            if is_folder_locked(out):
                raise ConfigError(f"--out {out}: another audit is at work there; wait for it, or give another folder")
            note = _settle(out, wanted, resume)
            out.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = lock_folder(out)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror})") from None
    except SpoolError as error:
        raise ConfigError(f"--out {out}: {error}") from None
    try:
        yield note
    finally:
        os.close(descriptor)


def _settle(out: Path, wanted: Unfinished, resume: bool | None) -> str:
    """Move an earlier audit aside unless it is resumed.

    Returns a clause for the user that says which of the two happened.
    """
    left = unfinished(out)
    same = left is not None and left.same_as(wanted)
    if resume and not same:
        why = (
            "holds no unfinished audit"
            if left is None
            else "holds an unfinished audit of another command, data, model or version"
        )
        raise ConfigError(f"--resume: {out} {why}; leave --resume out to begin anew")
    if left is not None and same and resume is not False:
        return f"resuming: {left.attempts} of {wanted.attempts} attempts are done"
    place = archive_previous(out)
    if place.folder != out:
        raise ConfigError(f"--out {out}: {place.note}")
    if left is None or not place.note:
        return place.note
    why = "" if resume is False else ", because its command, data, model or version differs"
    return f"{place.note}; that audit was not finished, and this command does not continue it{why}"
