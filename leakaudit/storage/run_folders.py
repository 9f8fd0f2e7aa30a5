"""The folder of a new audit; two runs never share a folder."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leakaudit.config.audit import AuditConfig
from leakaudit.results.not_audited import NOT_AUDITED
from leakaudit.storage.locks import folder_lock, is_folder_locked
from leakaudit.storage.spool import Spool, check_no_link
from leakaudit.storage.spool_files import LEFT_BY_AUDIT


@dataclass(frozen=True)
class RunFolder:
    """The folder of a new audit, with a note about an earlier audit."""

    folder: Path
    note: str = ""
    """A clause for the user that says what happened to an earlier audit there; empty if there was no earlier audit."""


def allocate_run_folder(
    wanted: Path, config: AuditConfig, tokenizer: Any, command: str = ""
) -> tuple[Spool, RunFolder]:
    """Move an earlier audit out of `wanted` and create a new spool.

    Trainers that begin at the same time do this one after another.

    Returns:
        The spool, whose configuration names the chosen folder, and the folder with the note about an earlier audit.

    Raises:
        SpoolError: `wanted` is a link, or cannot be written.
        ConfigError: a key for the encryption of snapshots cannot be used.
    """
    with folder_lock(wanted.parent):
        found = archive_previous(wanted)
        allocated = config.model_copy(update={"out_dir": found.folder})
        return Spool.create(found.folder / "spool", allocated, tokenizer, command), found


def archive_previous(wanted: Path) -> RunFolder:
    """Move an earlier audit's files out of `wanted`.

    `wanted` thus holds only files of the latest run.

    The files are moved to the first of `wanted.1`, `wanted.2`... that does not exist; files that no audit made are not moved. An audit in
    progress, or one that cannot be moved, keeps its folder. The new audit then gets `wanted-2`, `wanted-3`..., and the note says so.

    Raises:
        SpoolError: `wanted` is a link.
    """
    check_no_link(wanted)
    if not _holds_audit(wanted):
        with contextlib.suppress(OSError):  # `Spool.create` reports a folder that cannot be written
            (wanted / NOT_AUDITED).unlink(missing_ok=True)
        return RunFolder(wanted)
    if Spool(wanted / "spool").under_way() or is_folder_locked(wanted):
        return _beside(wanted, "the audit there is still under way")
    archive = _next_archive(wanted)
    try:
        archive.mkdir(mode=0o700)
        for name in LEFT_BY_AUDIT:
            with contextlib.suppress(FileNotFoundError):
                (wanted / name).rename(archive / name)
    except OSError as error:
        return _beside(wanted, f"the audit there cannot be moved ({error.strerror})")
    Spool(archive / "spool").purge_unfinished()
    return RunFolder(wanted, f"the earlier audit there is now in {archive.name}")


def _next_archive(wanted: Path) -> Path:
    """Return the first of `wanted.1`, `wanted.2`... that does not exist."""
    archive, number = wanted, 0
    while archive.exists() or archive.is_symlink():
        number += 1
        archive = wanted.with_name(f"{wanted.name}.{number}")
    return archive


def _holds_audit(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("spool", "journal.jsonl", "results.json"))


def _beside(wanted: Path, why: str) -> RunFolder:
    """Return the first of `wanted-2`, `wanted-3`... that holds no audit."""
    candidate, number = wanted, 1
    while _holds_audit(candidate) or candidate.is_symlink():
        number += 1
        candidate = wanted.with_name(f"{wanted.name}-{number}")
    return RunFolder(candidate, f"{why}: gate {candidate.name}, not {wanted.name}")
