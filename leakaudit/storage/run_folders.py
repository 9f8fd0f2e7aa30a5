"""The folder of a new audit; two runs never share a folder."""

from __future__ import annotations

import contextlib
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leakaudit.config.audit import AuditConfig
from leakaudit.config.canaries import keys_file
from leakaudit.config.saved_book import SavedBook
from leakaudit.errors import RoundError, SpoolError
from leakaudit.results.not_audited import NOT_AUDITED
from leakaudit.results.origin import Origin
from leakaudit.storage.folder_owners import check_out_dir
from leakaudit.storage.locks import folder_lock, is_folder_locked
from leakaudit.storage.participants import anybody_left, lock_of, take_part
from leakaudit.storage.rounds_file import read_rounds
from leakaudit.storage.shared_weights import BASES
from leakaudit.storage.spool import Spool
from leakaudit.storage.spool_files import LEFT_BY_AUDIT, AuditFile, read_totals, write_audit_file


@dataclass(frozen=True)
class RunFolder:
    """The folder of a new audit, with a note about an earlier audit."""

    folder: Path
    note: str = ""
    """A clause for the user that says what happened to an earlier audit there; empty if there was no earlier audit."""


def allocate_run_folder(
    wanted: Path, config: AuditConfig, tokenizer: Any, command: str = "", origin: Origin | None = None
) -> tuple[Spool, RunFolder]:
    """Move an earlier audit out of `wanted` and create a new spool.

    Trainers that begin at the same time do this one after another.

    Returns:
        The spool, whose configuration names the chosen folder, and the folder with the note about an earlier audit.

    Raises:
        SpoolError: `wanted` is a link, others own it or can write to it, or it cannot be written.
        ConfigError: a key for the encryption of snapshots cannot be used.
    """
    with folder_lock(wanted.parent):
        found = archive_previous(wanted)
        allocated = config.model_copy(update={"out_dir": found.folder})
        return _created(config, allocated, tokenizer, command, origin), found


def _created(config: AuditConfig, allocated: AuditConfig, tokenizer: Any, command: str, origin: Origin | None) -> Spool:
    """Create a spool that knows the invented records in the training data.

    Args:
        config: names the folder beside which the file of the records lies.
        allocated: the same with the folder that the audit got.
        tokenizer: of the training.
        command: how the training was started.
        origin: what is known when it begins.

    Raises:
        SpoolError, ConfigError: as by `Spool.create`; or the configuration asks for records, and their file is missing or damaged.
    """
    records = None if config.canaries is None else SavedBook.read(keys_file(config.out_dir))
    spool = Spool.create(allocated.out_dir / "spool", allocated, tokenizer, command, origin)
    if records is not None:
        write_audit_file(spool.root, Spool.open(spool.root)[1].model_copy(update={"secrets": records}))
    return spool


def join_or_allocate(
    wanted: Path, config: AuditConfig, tokenizer: Any, command: str = "", origin: Origin | None = None
) -> tuple[Spool, RunFolder]:
    """Take part in the audit of rounds in `wanted`, or create a new one there.

    If two processes cannot share the spool, the second one gets `<wanted>.client-<process id>`, and the note says why.

    Processes that begin at the same time do this one after another.

    Returns:
        The spool, whose configuration names the folder, and the folder with a note for the user.

    Raises:
        RoundError: there is an audit of rounds, and this process cannot take part: its configuration differs, or it is complete.
        SpoolError: `wanted` is a link, others own it or can write to it, or it cannot be written.
        ConfigError: a key for the encryption of snapshots cannot be used.
    """
    with folder_lock(wanted.parent):
        check_out_dir(wanted)
        apart = ""
        if (audit := _open_rounds(wanted / "spool")) is not None:
            check_same_configuration(wanted, audit.config, config)
            apart = _why_apart(wanted / "spool", config)
            if not apart:
                spool = _joined(wanted / "spool")
                return spool, RunFolder(wanted, f"continues the audit there at round {read_rounds(spool.root).begun}")
            wanted = wanted.with_name(f"{wanted.name}.client-{os.getpid()}")
        found = archive_previous(wanted)
        if apart:
            found = RunFolder(found.folder, f"{apart}, so this process audits its rounds in {found.folder.name}")
        allocated = config.model_copy(update={"out_dir": found.folder})
        return _created(config, allocated, tokenizer, command, origin), found


def join_rounds(folder: Path) -> Spool:
    """Take part in the audit of rounds that another process began in a folder.

    Raises:
        RoundError: no audit there is open to this process: it has ended, is none of rounds, says itself what is sent, or is on another host.
    """
    try:
        _, audit = Spool.open(folder / "spool")
    except (SpoolError, OSError):
        raise RoundError(f"no training is audited in {folder}") from None
    if not audit.config.sent_elsewhere or audit.config.encrypt_to:
        raise RoundError(
            f"the training audited in {folder} lets no other process say what is sent: set `unit: round` and `sent_elsewhere: true` there"
        )
    if not audit.trainer_is_here():
        raise RoundError(f"the training audited in {folder} runs on another machine")
    if read_totals(folder / "spool") is not None:
        raise RoundError(f"the audit in {folder} has ended")
    return _joined(folder / "spool")


def _joined(root: Path) -> Spool:
    """Return the spool that another process began, for this one to write into it.

    Raises:
        RoundError: the file system has no locks, or the spool cannot be written.
    """
    spool, _ = Spool.open(root, f"{BASES}-{os.getpid()}")
    try:
        descriptor = take_part(root)
    except OSError as error:
        raise RoundError(f"{root}: cannot be written ({error.strerror})") from None
    if descriptor is None:
        raise RoundError(f"{root}: its file system has no locks, so two processes cannot share it")
    weakref.finalize(spool, os.close, descriptor)
    spool.lock = lock_of(root)
    return spool


def _open_rounds(root: Path) -> AuditFile | None:
    """Return the audit of rounds in a spool if a further round belongs to it.

    It does while some process takes part, and with `rounds` until all of them began.

    Raises:
        RoundError: it is complete, and processes that took part are still alive.
    """
    try:
        _, audit = Spool.open(root)
    except (SpoolError, OSError):
        return None
    planned = audit.config.rounds
    if audit.config.unit != "round" or not audit.trainer_is_here():
        return None
    alive = anybody_left(root) is True
    if read_totals(root) is not None or (planned is not None and read_rounds(root).begun >= planned):
        if alive and planned is not None:
            raise RoundError(f"all {planned} rounds of the audit in {root.parent} began already (`rounds`)")
        return None
    return audit if alive or planned is not None else None


def _why_apart(root: Path, config: AuditConfig) -> str:
    """Return why two processes cannot share a spool, as a clause; empty if they can."""
    if config.encrypt_to:
        return "the audit there is encrypted with a key that only its first process has"
    if anybody_left(root) is None:
        return "the file system of the audit there has no locks, and two processes share an audit by locks"
    return ""


def check_same_configuration(folder: Path, there: AuditConfig, mine: AuditConfig) -> None:
    """Refuse to add a round to an audit of another configuration.

    Raises:
        RoundError: names the keys that differ.
    """
    keys = (key for key in AuditConfig.model_fields if key != "out_dir")
    if differ := [key for key in keys if getattr(there, key) != getattr(mine, key)]:
        raise RoundError(
            f"the audit of rounds in {folder} has another configuration ({', '.join(f'`{key}`' for key in differ)}): give this training "
            "the same configuration, or another `out_dir`"
        )


def archive_previous(wanted: Path) -> RunFolder:
    """Move an earlier audit's files out of `wanted`.

    `wanted` thus holds only files of the latest run.

    The files are moved to the first of `wanted.1`, `wanted.2`... that does not exist; files that no audit made are not moved. An audit in
    progress, or one that cannot be moved, keeps its folder. The new audit then gets `wanted-2`, `wanted-3`..., and the note says so.

    Raises:
        SpoolError: `wanted` is a link, or others own it or can write to it.
    """
    check_out_dir(wanted)
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
