"""The folder of snapshots between trainer and worker.

It is bounded and private. It stays consistent if trainer or worker are killed at any moment.

    000120.tmp/      the trainer is writing it
    000120.held/     a complete round, until somebody says what was sent of it
    000120.ready/    complete and waiting
    000120.run/      claimed by the worker
    000120.kept/     audited, kept because the configuration says so
    000120.bad/      set aside: damaged, newer schema, not finite, or workers crashed on it
    base/            weights that training does not change; each snapshot has a hard link to the file
    audit.json       the audit's configuration
    tokenizer/       the client's tokenizer, until the audit is over and no snapshot is left
    battery.json     the attempts that the worker makes on each snapshot
    started.json     the attempt that the worker is making
    attempt_deaths.json  attempts during which workers died, and how often
    finished.json    totals of the trainer, written when it has finished
    hold.json        no snapshot of the spool may be removed; inside a snapshot: this snapshot may not be removed
    rounds.json      counts of an audit of rounds
    trainer.lock     the trainer holds this lock until it ends; further processes of an audit of rounds hold trainer-<process id>.lock
    worker.lock      the worker holds this lock until it ends

One rename passes a snapshot from one process to the other. Snapshots wait for their attacks in a queue; `max_spool_gb` bounds their total
size.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leakaudit.config.audit import AuditConfig
from leakaudit.errors import SpoolBusyError, SpoolError
from leakaudit.files.private_files import write_atomic
from leakaudit.results.origin import Origin
from leakaudit.storage.attempt_deaths import DEATHS, STARTED
from leakaudit.storage.disk_use import bytes_in
from leakaudit.storage.encryption import EncryptionKeys
from leakaudit.storage.folder_owners import check_ours, check_out_dir
from leakaudit.storage.locks import create_locked, file_lock, is_locked
from leakaudit.storage.participants import anybody_left
from leakaudit.storage.rounds_file import totals_of_planned
from leakaudit.storage.shared_weights import BASES, SharedWeights
from leakaudit.storage.snapshot_queue import SnapshotQueue
from leakaudit.storage.spool_files import (
    AUDIT_FILE,
    FINISHED,
    HELD,
    LEFT_BY_AUDIT,
    REASON,
    AuditFile,
    Totals,
    read_audit_file,
    read_totals,
    reason_in,
    write_audit_file,
)

if TYPE_CHECKING:
    from leakaudit.storage.frozen_weights import FrozenWeights

TRAINER_LOCK = "trainer.lock"
WORKER_LOCK = "worker.lock"
TOKENIZER = "tokenizer"

STATES = {
    ".tmp": "being written",
    ".held": "waiting for what was sent",
    ".ready": "waiting",
    ".run": "under attack",
    ".kept": "kept",
    ".bad": "refused",
}
"""Suffix of a snapshot's folder -> its state."""

DEVICE_VARIABLE = "LEAKAUDIT_TRAINER_DEVICE"
"""Environment variable of a worker that a trainer started: the trainer's device, such as `cuda:0`."""


class Spool:
    """One spool folder, as the trainer or the worker uses it."""

    def __init__(self, root: Path, bases: str = BASES) -> None:
        """Remember the folder; no file is read or written."""
        self.root = root
        self.config = AuditConfig()
        """Configuration of the audit, once the spool was created or opened."""
        self.queue = SnapshotQueue(root)
        self.keys: EncryptionKeys | None = None
        """Keys to which the trainer encrypts; None if snapshots are not encrypted, and always None in the worker."""
        self.holds = False
        """Whether this process writes snapshots that are held until somebody says what was sent of them."""
        self.lock = root / TRAINER_LOCK
        """The lock of this process, if it is a trainer."""
        self._shared = SharedWeights(root, bases)

    @classmethod
    def create(
        cls, root: Path, config: AuditConfig, tokenizer: Any, command: str = "", origin: Origin | None = None
    ) -> Spool:
        """Create a new spool for a trainer.

        Raises:
            SpoolError: the folder cannot be written or is not empty, it or the one around it is a link or belongs to others.
            ConfigError: snapshots should be encrypted, but a key is invalid or the extra is not installed.
        """
        spool = cls(root)
        spool.config = config
        spool.keys = _keys_of(config)
        check_out_dir(root.parent)
        try:
            _make_folder(root)
            spool._hold_trainer_lock()
            write_atomic(root / ".gitignore", "*\n")
            tokenizer.save_pretrained(root / TOKENIZER)
            keep_private(root / TOKENIZER)
            write_audit_file(root, _audit_file(config, command, origin))
        except OSError as error:
            raise SpoolError(
                f"{root}: cannot be written ({error.strerror}); set `out_dir` to a folder that can"
            ) from None
        except ValueError:
            raise SpoolError(f"{str(root)!a}: a name or text in the configuration is not UTF-8; rename it") from None
        return spool

    def _hold_trainer_lock(self) -> None:
        """Hold a lock until this object or this process ends.

        The system may give a process id to another process later, but not a lock.

        Raises:
            SpoolError: another trainer already holds the spool.
        """
        try:
            descriptor = create_locked(self.root / TRAINER_LOCK)
        except FileExistsError:
            raise SpoolError(f"{self.root}: another trainer took it; give another `out_dir`") from None
        if descriptor is not None:  # else the file system has no locks, and only the process id is known
            weakref.finalize(self, os.close, descriptor)

    @classmethod
    def open(cls, root: Path, bases: str = BASES) -> tuple[Spool, AuditFile]:
        """Open a spool that a trainer made.

        Args:
            root: its folder.
            bases: name of the folder of shared weights, if this process writes snapshots.

        Raises:
            SpoolError: there is no spool, it belongs to somebody else, or its audit.json cannot be read.
        """
        spool = cls(root, bases)
        if not (root / AUDIT_FILE).is_file():
            raise SpoolError(f"{root}: is no spool (no audit.json); give the `spool` folder inside the audit's out_dir")
        check_ours(root)
        audit = read_audit_file(root)
        spool.config = audit.config
        return spool, audit

    def snapshot_folder(self, step: int) -> Path:
        """Return the folder to which a snapshot of `step` is written."""
        return self.root / f"{step:06d}{HELD if self.holds else '.ready'}"

    def write(self, step: int, *, frozen: FrozenWeights | None = None, table: str | None = None, **parts: Any) -> None:
        """Write a snapshot, encrypted if the audit's configuration says so.

        Args:
            step: number of the step.
            frozen: weights that training does not change. They are written once; `weights` leaves them out.
            table: name of one of `weights`, of which a step changes only a few rows. It is written once; later snapshots have its changed
                rows.
            parts: arguments of `leakaudit.storage.snapshots.write_snapshot`: update, weights, truth, manifest.

        Raises:
            SnapshotError: the snapshot cannot be written. No file is left.
        """
        from leakaudit.storage.snapshots import write_snapshot

        recipients = self.keys.recipients if self.keys else ()
        parts |= self._shared.take_out(parts["weights"], frozen, table, recipients)
        write_snapshot(self.snapshot_folder(step), recipients=recipients, **parts)

    def withdraw(self, step: int) -> None:
        """Remove the snapshot of a step that was found to be wrong after writing.

        A worker that has claimed it finds that it is missing.
        """
        for suffix in (HELD, ".ready", ".run"):
            shutil.rmtree(self.snapshot_folder(step).with_suffix(suffix), ignore_errors=True)

    def lacks(self, needed: int) -> str:
        """Return a clause that says why a snapshot of `needed` bytes does not fit.

        Empty if it fits.
        """
        if self.free_bytes() < needed:
            return f"its snapshot needs {needed / 1e6:.0f} MB of free disk"
        limit = int(self.config.max_spool_gb * 1e9)
        if (used := self.used_bytes()) + needed > limit:
            return f"its snapshot needs {needed / 1e6:.0f} MB, and {used / 1e6:.0f} of {limit / 1e6:.0f} MB are taken (`max_spool_gb`)"
        return ""

    def used_bytes(self) -> int:
        """Return the size of all snapshots; a file that several of them share counts once."""
        return bytes_in((*self.entries(), *self.root.glob(f"{BASES}*")))

    def free_bytes(self) -> int:
        """Return the free bytes of the file system; 0 if the spool was removed."""
        try:
            return shutil.disk_usage(self.root).free
        except OSError:
            return 0

    def finish(self, totals: Totals) -> None:
        """Tell the worker that there will be no more snapshots."""
        self._shared.remove()
        write_atomic(self.root / FINISHED, totals.model_dump_json(indent=1))

    def totals(self) -> Totals | None:
        """Return the trainer's totals once it has finished, else None."""
        return read_totals(self.root) or totals_of_planned(self.root, self.config.rounds)

    def discard(self) -> None:
        """Remove a spool without snapshots, and the audit's folder if it is empty."""
        shutil.rmtree(self.root, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.root.parent.rmdir()

    def gone(self) -> bool:
        """Return whether somebody removed the spool."""
        return not (self.root / AUDIT_FILE).is_file()

    def entries(self) -> list[Path]:
        """Return the snapshots in any state; an empty list if the spool was removed."""
        try:  # a hidden name is a file that `write_atomic` writes
            return [path for path in self.root.iterdir() if path.suffix in STATES and path.name[0] != "."]
        except OSError:
            return []

    def waiting(self) -> int:
        """Return how many snapshots are complete and not yet audited."""
        return sum(path.suffix in (HELD, ".ready", ".run") for path in self.entries())

    def attended(self) -> bool:
        """Return whether any worker holds the spool."""
        return is_locked(self.root / WORKER_LOCK) is True

    def trainer_gone(self, audit: AuditFile) -> bool:
        """Return whether the trainer has ended: its process id or its lock is free.

        All trainers of an audit of rounds must have ended. False on another host, where this cannot be found out.
        """
        if not audit.trainer_is_here():
            return False
        if audit.config.unit == "round" and (anybody := anybody_left(self.root)) is not None:
            return not anybody
        return audit.trainer_is_gone() or is_locked(self.root / TRAINER_LOCK) is False

    def under_way(self) -> bool:
        """Return whether the audit is still in progress.

        It is if a worker holds the spool, or if the trainer's process runs and has not finished or some snapshots are not audited.
        """
        if self.attended():
            return True
        try:
            _, audit = Spool.open(self.root)
        except (SpoolError, OSError):
            return False  # no process can continue the audit
        return not self.trainer_gone(audit) and (self.totals() is None or self.waiting() > 0)

    def abandoned(self) -> str:
        """Return the snapshot that a crashed worker had claimed, and its attempt, or "".

        A worker that was not killed returns its claimed snapshot before it ends.
        """
        return "" if self.attended() else self.queue.at_work_on()

    def why(self, snapshot: Path) -> str:
        """Return why a snapshot is not audited, as a clause.

        Empty if it was audited, or if a worker or a trainer uses the spool.
        """
        if snapshot.suffix == ".bad":
            return reason_in(snapshot / REASON) or "it could not be audited"
        if snapshot.suffix == ".kept" or self.under_way():
            return ""
        if snapshot.suffix == ".tmp":
            return "the trainer ended while it was being written"
        return "no worker is at work on it; `leakaudit worker` goes on"

    def tidy(self) -> None:
        """Remove the shared weights if the trainer has finished or ended.

        No new snapshot will link to them.
        """
        with contextlib.suppress(SpoolError, OSError):
            _, audit = Spool.open(self.root)
            if self.totals() is not None or self.trainer_gone(audit):
                self._shared.remove()

    def purge_unfinished(self) -> None:
        """Remove snapshots that a killed trainer had not written completely."""
        self._shared.remove()
        for path in self.root.glob("*.tmp"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def worker_lock(self) -> Iterator[None]:
        """Lock this spool for one worker until the block or the process ends.

        Raises:
            SpoolError: another worker holds the lock (`SpoolBusyError`), or the lock file is a link or a folder.
        """
        path = self.root / WORKER_LOCK
        with contextlib.ExitStack() as stack:
            try:
                alone = stack.enter_context(file_lock(path))
            except OSError as error:
                raise SpoolError(
                    f"{path}: cannot be opened ({error.strerror}); it should be a plain file of yours: remove it"
                ) from None
            if not alone:
                raise SpoolBusyError(f"{self.root}: another worker is at work on it")
            self.queue.requeue()
            _remove_half_written(self.root.parent, LEFT_BY_AUDIT)
            _remove_half_written(self.root, (STARTED, DEATHS))
            yield


def _keys_of(config: AuditConfig) -> EncryptionKeys | None:
    """Return the keys to which snapshots are encrypted; None if they are not.

    Raises:
        ConfigError: a key is invalid or the extra is not installed.
    """
    left_to_others = config.schedule == "deferred" and config.at_end == "leave"
    return EncryptionKeys.of(config.encrypt_to, run_key=not left_to_others) if config.encrypt_to else None


def _make_folder(root: Path) -> None:
    root.parent.parent.mkdir(parents=True, exist_ok=True)
    root.parent.mkdir(mode=0o700, exist_ok=True)  # with `parents=True`, others could read the audit's folder
    check_out_dir(root.parent)  # again: somebody else may have made it in between
    root.mkdir(mode=0o700, exist_ok=True)
    check_ours(root)
    if any(root.iterdir()):
        raise SpoolError(f"{root}: is not empty; give another `out_dir`, or remove what an earlier run left")
    root.chmod(0o700)


def _remove_half_written(folder: Path, names: Iterable[str]) -> None:
    """Remove incomplete files that a killed worker left.

    Only the holder of the lock writes files of these names.
    """
    for name in names:
        for path in folder.glob(f".{name}.*.tmp"):
            with contextlib.suppress(OSError):
                path.unlink()


def forget_tokenizer(spool: Spool) -> None:
    """Remove the tokenizer once the audit is over and no snapshot is left.

    Tokens that the user added may be private words.
    """
    with contextlib.suppress(SpoolError, OSError):
        _, audit = Spool.open(spool.root)
        killed = audit.config.unit == "step" and spool.trainer_gone(audit)
        if (killed or spool.totals() is not None) and not spool.entries():
            shutil.rmtree(spool.root / TOKENIZER, ignore_errors=True)


def _audit_file(config: AuditConfig, command: str, origin: Origin | None) -> AuditFile:
    return AuditFile(
        config=config,
        trainer_pid=os.getpid(),
        trainer_host=socket.gethostname(),
        command=command,
        origin=origin,
        salt=secrets.token_hex(32) if config.encrypt_to else "",
    )


def keep_private(folder: Path) -> None:
    """Make the files of a library private: folders 0700, files 0600."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o700 if path.is_dir() else 0o600)
