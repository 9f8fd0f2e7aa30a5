"""The folder of snapshots between trainer and battery: bounded, private, safe to kill at any moment on either side.

    000120.tmp/      being written by the trainer
    000120.ready/    complete, waiting
    000120.run/      claimed by the worker
    000120.kept/     audited, kept because the configuration says so
    000120.bad/      refused: damaged, newer schema, not finite
    base/            weights that training does not move, while it lasts; each snapshot has a hard link to the file
    audit.json       the audit's configuration; tokenizer/ beside it
    battery.json     the attempts that the worker makes on each snapshot
    finished.json    the trainer is through: its totals
    hold.json        nothing here may be removed; inside a snapshot: not this one
    trainer.lock     held by the trainer for as long as it lives
    worker.lock      held by the worker for as long as it lives

A snapshot changes hands by one rename. Snapshots wait for their attacks in a queue; `max_spool_gb` bounds what they take.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leakaudit.config.audit import AuditConfig
from leakaudit.errors import SnapshotError, SpoolError
from leakaudit.files.private_files import write_atomic
from leakaudit.files.strict_json import parse_json, read_bounded
from leakaudit.results.not_audited import NOT_AUDITED
from leakaudit.results.schema import Battery, Overhead
from leakaudit.storage.encryption import Seal
from leakaudit.storage.parent_watch import ORPHANED

if TYPE_CHECKING:
    from torch import Tensor

    from leakaudit.storage.frozen_weights import FrozenWeights
    from leakaudit.storage.snapshot_files import Base

SCHEMA = "leakaudit.audit/1.0"
HOLD = "hold.json"
"""Says that a snapshot, or a whole spool, must not be removed."""

BASES = "base"
"""Folder of the weights that training does not move."""

REASON = "reason.json"
"""Inside a snapshot that was set aside: why."""

BATTERY = "battery.json"
"""What the worker makes of the configuration's attacks and defences: the attempts on each snapshot."""

MAX_JSON_BYTES = 1024 * 1024
"""Of a file of the spool such as `audit.json`. Our choice: the longest configuration takes a tenth of it."""

TURN_SECONDS = 10.0
"""How long a trainer waits for another one that begins in the same folder: making a spool takes well under a second."""

TRAINER_LOCK = "trainer.lock"

STATES = {
    ".tmp": "being written",
    ".ready": "waiting",
    ".run": "under attack",
    ".kept": "kept",
    ".bad": "refused",
}
"""Suffix of a snapshot's folder -> its state."""

DEVICE_VARIABLE = "LEAKAUDIT_TRAINER_DEVICE"
"""Where that trainer computes, such as `cuda:0`."""
DEATHS = "deaths"
"""File in a claimed snapshot that counts the workers that died over it."""
MOST_DEATHS = 2
"""Workers that may die over one snapshot before it is set aside, so that the others get their turn. Our choice: the trainer
starts a worker three times, so the last one still finishes the rest."""


class AuditFile(BaseModel):
    """`audit.json`: what a worker needs to know, so that it can be started by hand."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_: str = Field(default=SCHEMA, alias="schema")
    config: AuditConfig
    trainer_pid: int
    trainer_host: str = ""
    command: str = ""
    salt: str = ""
    """Random, in hex. Where the key of the hashes is made from a private one, this makes it the run's own; without it nobody can
    make that key again, so it is destroyed with the last snapshot."""

    def trainer_is_gone(self) -> bool:
        """Return whether no process has the trainer's id any more. False where that cannot be told: on another host."""
        if self.trainer_host != socket.gethostname():
            return False
        try:
            os.kill(self.trainer_pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False


class Totals(BaseModel):
    """`finished.json`: what the trainer counted."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    total_steps: int | None = None
    kept: int = 0
    skipped: int = 0
    """Steps that were due while the one before was still on its way to the disk."""
    too_full: int = 0
    """Steps that were due and for which the spool or the disk had no room."""
    not_finite: int = 0
    """Steps that were due and whose update held NaN or infinity."""
    failed: int = 0
    """Steps that were due and could not be kept for another reason, which the training's log names."""
    overhead: Overhead = Overhead()
    interrupted: bool = False

    def not_kept(self, config: AuditConfig) -> list[tuple[int, str]]:
        """Return how many due steps were not kept, with the reasons.

        Reasons of no step are left out; each is a clause.
        """
        reasons = (
            (self.skipped, "the step before was still on its way to the disk"),
            (self.too_full, f"the spool or the disk was full (`max_spool_gb: {config.max_spool_gb:g}`)"),
            (self.not_finite, "the update was not finite"),
            (self.failed, "the step could not be recorded; the log of the training says why"),
        )
        return [(number, why) for number, why in reasons if number]


class Spool:
    """One spool folder, seen from either side."""

    def __init__(self, root: Path) -> None:
        """Name the folder; nothing is touched."""
        self.root = root
        self.config = AuditConfig()
        """Of the audit, once the spool was made or opened."""
        self._base: Base | None = None
        """Frozen weights that were written, once for all snapshots."""
        self._table: Tensor | None = None
        """The table of token vectors as it was at the first kept step, where later ones hold the rows that differ."""
        self.seal: Seal | None = None
        """Keys that the trainer encrypts to; None where snapshots lie in clear, and on the worker's side."""

    # ------------------------------------------------------------------ the trainer's side

    @classmethod
    def create(cls, root: Path, config: AuditConfig, tokenizer: Any, command: str = "") -> Spool:
        """Make a fresh spool.

        Raises:
            SpoolError: the folder cannot be written, is a link, belongs to somebody else, or is not empty.
            ConfigError: snapshots are to be encrypted, and a key is none or the extra is not installed.
        """
        spool = cls(root)
        spool.config = config
        if config.encrypt_to:
            left_to_others = config.schedule == "deferred" and config.at_end == "leave"
            spool.seal = Seal.of(config.encrypt_to, run_key=not left_to_others)
        _check_no_link(root.parent)
        try:
            root.parent.parent.mkdir(parents=True, exist_ok=True)
            root.parent.mkdir(
                mode=0o700, exist_ok=True
            )  # `parents=True` would leave the audit's folder readable by all
            root.mkdir(mode=0o700, exist_ok=True)
            spool._check_ours()
            if any(root.iterdir()):
                raise SpoolError(f"{root}: is not empty; give another `out_dir`, or remove what an earlier run left")
            root.chmod(0o700)
            spool._hold_trainer_lock()
            write_atomic(root / ".gitignore", "*\n")
            tokenizer.save_pretrained(root / "tokenizer")
            keep_private(root / "tokenizer")
            audit = AuditFile(
                config=config,
                trainer_pid=os.getpid(),
                trainer_host=socket.gethostname(),
                command=command,
                salt=secrets.token_hex(32) if config.encrypt_to else "",
            )
            write_atomic(root / "audit.json", audit.model_dump_json(by_alias=True, indent=1))
        except OSError as error:
            raise SpoolError(
                f"{root}: cannot be written ({error.strerror}); set `out_dir` to a folder that can"
            ) from None
        except ValueError:
            raise SpoolError(f"{str(root)!a}: a name or text in the configuration is not UTF-8; rename it") from None
        return spool

    def _hold_trainer_lock(self) -> None:
        """Hold a lock until this object or this process ends; process ids are used again, locks are not.

        Raises:
            SpoolError: another trainer was faster.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        try:
            descriptor = os.open(self.root / TRAINER_LOCK, flags, 0o600)
        except FileExistsError:
            raise SpoolError(f"{self.root}: another trainer took it; give another `out_dir`") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a file system without locks: then the process id has to do
            os.close(descriptor)
            (self.root / TRAINER_LOCK).unlink(missing_ok=True)
        else:
            weakref.finalize(self, os.close, descriptor)

    def slot(self, step: int) -> Path:
        """Return the folder that a snapshot of `step` is to be written to."""
        return self.root / f"{step:06d}.ready"

    def withdraw(self, step: int) -> None:
        """Remove the snapshot of a step that turned out wrong after it was written; a worker that reads it finds it gone."""
        for suffix in (".ready", ".run"):
            shutil.rmtree(self.slot(step).with_suffix(suffix), ignore_errors=True)

    def lacks(self, needed: int) -> str:
        """Return what is in the way of another snapshot of `needed` bytes, in a clause; empty if it fits."""
        if self.free_bytes() < needed:
            return f"its snapshot needs {needed / 1e6:.0f} MB of free disk"
        limit = int(self.config.max_spool_gb * 1e9)
        if (used := self.used_bytes()) + needed > limit:
            return f"its snapshot needs {needed / 1e6:.0f} MB, and {used / 1e6:.0f} of {limit / 1e6:.0f} MB are taken (`max_spool_gb`)"
        return ""

    def used_bytes(self) -> int:
        """Return the size of all snapshots here.

        A file that several of them have in common counts once.
        """
        found = {}
        for folder in (*self.entries(), self.root / BASES):
            with contextlib.suppress(OSError):
                for path in folder.iterdir():
                    with contextlib.suppress(OSError):
                        stat = path.stat()
                        found[stat.st_dev, stat.st_ino] = stat.st_size
        return sum(found.values())

    def write(self, step: int, *, frozen: FrozenWeights | None = None, table: str | None = None, **parts: Any) -> None:
        """Write a snapshot, encrypted if the audit's configuration says so.

        Args:
            step: its number.
            frozen: weights that training does not move, which are written once; `weights` leaves them out.
            table: one of `weights` of which a step moves a few rows; it is written once, and then the rows that differ.
            parts: what `leakaudit.storage.snapshots.write_snapshot` takes: update, weights, truth, manifest.

        Raises:
            SnapshotError: it cannot be written; nothing is left behind.
        """
        from leakaudit.storage.snapshots import write_snapshot

        recipients = self.seal.recipients if self.seal else ()
        if table is not None:
            frozen = self._with_table(table, parts["weights"][table], frozen)
        if frozen is not None and frozen.tensors:
            base = self._base_of(frozen, recipients)
            more = {n: tensor for n, tensor in frozen.tensors.items() if n not in base.names and n != table}
            parts |= {"base": base, "weights": {**parts["weights"], **more}}
            if table is not None and table in base.names:
                parts |= self._rows_of(table, parts["weights"])
        write_snapshot(self.slot(step), recipients=recipients, **parts)

    def _with_table(self, name: str, tensor: Tensor, frozen: FrozenWeights | None) -> FrozenWeights:
        """Return the frozen weights and a copy of a table.

        The table is as it was at the first kept step.
        """
        from leakaudit.storage.frozen_weights import FrozenWeights

        if self._table is None or self._table.shape != tensor.shape:
            self._table = tensor.to("cpu", copy=True)
        return (frozen or FrozenWeights({}, {})).and_copy(name, self._table)

    def _rows_of(self, name: str, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the weights without a table, and its changed rows.

        The rows differ from the first state; they are given only if they are few.
        """
        from leakaudit.storage.frozen_weights import changed_rows

        now = weights[name].cpu()
        rows = changed_rows(now, self._table)  # type: ignore[arg-type]
        if 2 * len(rows) > len(now):
            return {}
        return {"weights": {n: w for n, w in weights.items() if n != name}, "weight_rows": (rows, now[rows])}

    def _base_of(self, frozen: FrozenWeights, recipients: Sequence[str]) -> Base:
        """Return the file of frozen weights, written if it is not there.

        Raises:
            SnapshotError: it cannot be written, or the weights changed meanwhile; nothing is left behind.
        """
        from leakaudit.client.snapshot import BASE
        from leakaudit.storage.snapshot_files import Base, write_tensors

        if self._base is not None and self._base.path.is_file():
            return self._base
        folder = self.root / BASES
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700)
            folder.chmod(0o700)
            tensors = {f"weights/{name}": tensor for name, tensor in frozen.tensors.items()}
            name, digest = write_tensors(folder / BASE, tensors, recipients)
            frozen.check()
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise SnapshotError(
                    f"cannot write the frozen weights in {folder}: {error.strerror or type(error).__name__}; free some space or set "
                    "`out_dir` to a folder that can be written"
                ) from None
            raise
        self._base = Base(folder / name, digest, frozenset(frozen.tensors))
        return self._base

    def forget_base(self) -> None:
        """Remove the frozen weights that no new snapshot will get.

        Those that have them keep them.
        """
        shutil.rmtree(self.root / BASES, ignore_errors=True)

    def tidy(self) -> None:
        """Remove the frozen weights of a trainer that is through or dead."""
        with contextlib.suppress(SpoolError, OSError):
            _, audit = Spool.open(self.root)
            if self.totals() is not None or self.trainer_gone(audit):
                self.forget_base()

    def entries(self) -> list[Path]:
        """Return the snapshots, whatever their state; none where the spool is gone."""
        try:
            return [path for path in self.root.iterdir() if path.suffix in STATES]
        except OSError:
            return []

    def waiting(self) -> int:
        """Return how many snapshots are complete but not audited to the end."""
        return sum(path.suffix in (".ready", ".run") for path in self.entries())

    def free_bytes(self) -> int:
        """Return the free space of the file system; none where the spool is gone."""
        try:
            return shutil.disk_usage(self.root).free
        except OSError:
            return 0

    def attended(self) -> bool:
        """Return whether a worker holds the spool, whoever started it."""
        return _is_locked(self.root / "worker.lock") is True

    def trainer_gone(self, audit: AuditFile) -> bool:
        """Return whether the trainer is known to have died: its id is free, or another process has it by now.

        False where that cannot be told: on another host.
        """
        if audit.trainer_host != socket.gethostname():
            return False
        return audit.trainer_is_gone() or _is_locked(self.root / TRAINER_LOCK) is False

    def under_way(self) -> bool:
        """Return whether somebody is at work on it: a worker, or a trainer that is not through or left snapshots to a worker."""
        if self.attended():
            return True
        try:
            _, audit = Spool.open(self.root)
        except (SpoolError, OSError):
            return False  # nothing that anybody could go on with
        return not self.trainer_gone(audit) and (self.totals() is None or self.waiting() > 0)

    def abandoned(self) -> str:
        """Return the name of a snapshot that a worker had claimed when it died; empty where there is none.

        A worker that ends by itself, whatever its exit code, leaves nothing claimed.
        """
        claimed = sorted(path.name for path in self.entries() if path.suffix == ".run")
        return claimed[0] if claimed and not self.attended() else ""

    def why(self, snapshot: Path) -> str:
        """Return why a snapshot is not audited, in a clause; empty where it is, or where somebody is at work on it."""
        if snapshot.suffix == ".bad":
            return _reason_in(snapshot / REASON) or "it could not be audited"
        if snapshot.suffix == ".kept" or self.under_way():
            return ""
        if snapshot.suffix == ".tmp":
            return "the trainer ended while it was being written"
        return "no worker is at work on it; `leakaudit worker` goes on"

    def purge_unfinished(self) -> None:
        """Remove what a dead trainer was writing when it was killed.

        Nobody will ever audit it.
        """
        self.forget_base()
        for path in self.root.glob("*.tmp"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)

    def discard(self) -> None:
        """Remove a spool that nothing was put into, and the audit's folder if nothing else is in it."""
        shutil.rmtree(self.root, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.root.parent.rmdir()

    def finish(self, totals: Totals) -> None:
        """Tell the worker that no more snapshots will come."""
        self.forget_base()
        write_atomic(self.root / "finished.json", totals.model_dump_json(indent=1))

    # ------------------------------------------------------------------ the worker's side

    @classmethod
    def open(cls, root: Path) -> tuple[Spool, AuditFile]:
        """Open a spool that a trainer made.

        Raises:
            SpoolError: there is none, it belongs to somebody else, or its audit.json cannot be read.
        """
        spool = cls(root)
        path = root / "audit.json"
        if not path.is_file():
            raise SpoolError(f"{root}: is no spool (no audit.json); give the `spool` folder inside the audit's out_dir")
        spool._check_ours()
        try:
            raw = parse_json(read_bounded(path, MAX_JSON_BYTES))
            found = ascii(str(raw.get("schema"))[:60])[1:-1]
            if not found.startswith("leakaudit.audit/1."):
                raise SpoolError(f"{path}: schema {found}; this version reads leakaudit.audit/1.x. Upgrade leakaudit.")
            audit = AuditFile.model_validate(raw)
            spool.config = audit.config
            return spool, audit
        except ValidationError as error:
            raise SpoolError(f"{path}: cannot be read: {_first_problem(error)}") from None
        except (OSError, ValueError, AttributeError) as error:
            why = str(error) if type(error) is ValueError else type(error).__name__
            raise SpoolError(f"{path}: cannot be read ({why})") from None

    @contextmanager
    def worker_lock(self) -> Iterator[None]:
        """Be the only worker of this spool; the lock dies with the process, however it dies.

        Raises:
            SpoolError: another worker holds it, or it is a link or a folder.
        """
        lock = self.root / "worker.lock"
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        except OSError as error:
            raise SpoolError(
                f"{lock}: cannot be opened ({error.strerror}); it should be a plain file of yours: remove it"
            ) from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise SpoolError(f"{self.root}: another worker is at work on it") from None
            self._requeue()
            self._forget_half_written()
            yield
        finally:
            os.close(descriptor)

    def _requeue(self) -> None:
        """Put back what a killed worker had claimed; finished attempts are in the journal and are not repeated."""
        orphaned = (self.root / ORPHANED).exists()
        for path in sorted(path for path in self.root.glob("*.run") if path.is_dir() and not path.is_symlink()):
            deaths = 0 if orphaned else _count_death(path / DEATHS)
            path.rename(path.with_suffix(".bad" if deaths >= MOST_DEATHS else ".ready"))
        (self.root / ORPHANED).unlink(missing_ok=True)

    def _forget_half_written(self) -> None:
        """Remove what a killed worker was writing beside the spool; whoever has the lock is the only one who writes there."""
        for name in LEFT_BY_AUDIT:
            for path in self.root.parent.glob(f".{name}.*.tmp"):
                with contextlib.suppress(OSError):
                    path.unlink()

    def deadly(self) -> list[Path]:
        """Return the snapshots that are to be set aside because workers died over them."""
        found = (path for path in self.root.glob("*.bad") if (path / DEATHS).exists())
        return sorted(path for path in found if not (path / REASON).exists())

    def in_order(self) -> list[Path]:
        """Return the snapshots that are still to be audited, in order.

        The one under attack comes first.
        """
        found = [path for path in self.entries() if path.suffix in (".run", ".ready") and path.stem.isdecimal()]
        return sorted(found, key=lambda path: (path.suffix == ".ready", int(path.stem)))

    def note_battery(self, battery: Battery) -> None:
        """Write down which attempts are made on each snapshot.

        The trainer then can say how many are to come.
        """
        write_atomic(self.root / BATTERY, battery.model_dump_json(indent=1))

    def battery(self) -> Battery | None:
        """Return which attempts are made on each snapshot.

        None means that no worker has said so yet.
        """
        try:
            return Battery.model_validate_json(read_bounded(self.root / BATTERY, MAX_JSON_BYTES))
        except (OSError, ValueError):
            return None

    def claim(self) -> Path | None:
        """Take the oldest waiting snapshot, or return None."""
        for path in sorted(self.root.glob("*.ready"), key=lambda path: (len(path.name), path.name)):
            if path.is_symlink() or not path.is_dir():
                continue  # nothing of ours: a snapshot is a folder
            claimed = path.with_suffix(".run")
            try:
                path.rename(claimed)
            except OSError:
                continue  # the spool was purged in between
            return claimed
        return None

    def forget_salt(self) -> bool:
        """Destroy what the key of the run's hashes was made from, beside a private key.

        Returns:
            Whether it was still there.

        Raises:
            SpoolError: the spool cannot be read.
        """
        _, audit = Spool.open(self.root)
        if not audit.salt:
            return False
        emptied = audit.model_copy(update={"salt": ""})
        write_atomic(self.root / "audit.json", emptied.model_dump_json(by_alias=True, indent=1))
        return True

    def held(self, snapshot: Path) -> bool:
        """Return whether a snapshot, or the whole spool, is on hold: then nothing may remove it."""
        return (self.root / HOLD).exists() or (snapshot / HOLD).exists()

    def release(self, claimed: Path, *, keep: bool) -> None:
        """Remove an audited snapshot, or keep it where the configuration or a hold says so."""
        if keep or self.held(claimed):
            _replace(claimed, claimed.with_suffix(".kept"))
        else:
            shutil.rmtree(claimed, ignore_errors=True)

    def give_back(self, claimed: Path) -> None:
        """Put a claimed snapshot back, because the worker stops before it is through."""
        if claimed.is_dir():
            _replace(claimed, claimed.with_suffix(".ready"))

    def set_aside(self, claimed: Path, *, keep: bool, reason: str = "") -> None:
        """Get a snapshot that cannot be audited out of the way; it is only kept where snapshots are kept, with the reason."""
        if keep or self.held(claimed):
            with contextlib.suppress(OSError):
                write_atomic(claimed / REASON, json.dumps({"reason": reason or "it could not be audited"}))
            _replace(claimed, claimed.with_suffix(".bad"))
        else:
            shutil.rmtree(claimed, ignore_errors=True)

    def totals(self) -> Totals | None:
        """Return the trainer's totals once it is through, else None."""
        path = self.root / "finished.json"
        if not path.is_file():
            return None
        try:
            return Totals.model_validate_json(read_bounded(path, MAX_JSON_BYTES))
        except (OSError, ValueError):
            return Totals()

    def gone(self) -> bool:
        """Return whether somebody removed the spool under the worker."""
        return not (self.root / "audit.json").is_file()

    def _check_ours(self) -> None:
        _check_no_link(self.root)
        owner = self.root.stat().st_uid
        if hasattr(os, "getuid") and owner != os.getuid():
            raise SpoolError(f"{self.root}: belongs to user {owner}, not to you; give a folder of your own")


def keep_private(folder: Path) -> None:
    """Take from everybody else what a library wrote with the user's umask: folders 0700, files 0600."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o700 if path.is_dir() else 0o600)


def _reason_in(path: Path) -> str:
    """Return the reason in a file; empty where there is none that can be read."""
    try:
        return str(parse_json(read_bounded(path, MAX_JSON_BYTES))["reason"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def _first_problem(error: ValidationError) -> str:
    """Return where a file does not fit, without what stands there."""
    first = error.errors()[0]
    where = ascii(".".join(str(part) for part in first["loc"])[:200])[1:-1]
    return f"{where}: {first['msg'][:200]} ({error.error_count()} problems)"


def size_of(snapshot: Path) -> int:
    """Return the bytes that removing a snapshot frees.

    They are those of its files that no other snapshot has.
    """
    total = 0
    with contextlib.suppress(OSError):
        for path in snapshot.iterdir():
            with contextlib.suppress(OSError):
                stat = path.stat()
                total += stat.st_size if stat.st_nlink == 1 else 0
    return total


def _is_locked(path: Path) -> bool | None:
    """Return whether somebody holds the lock of a file; None where there is none, or no telling."""
    try:
        descriptor = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
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


def is_held(folder: Path) -> bool:
    """Return whether an audit from the command line is at work in a folder: it holds the folder's own lock."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def _replace(source: Path, target: Path) -> None:
    """Rename a folder over what may be there; nothing happens if somebody removed it meanwhile."""
    if target != source:
        shutil.rmtree(target, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        source.rename(target)


def _count_death(counter: Path) -> int:
    """Add one to the count in a file and return it; a file that cannot be read counts as none before."""
    try:
        deaths = int(counter.read_text(encoding="ascii")) + 1
    except (OSError, ValueError):
        deaths = 1
    with contextlib.suppress(OSError):
        write_atomic(counter, str(deaths))
    return deaths


LEFT_BY_AUDIT = (
    NOT_AUDITED, "verdict.json", "report.html", "results.json", "worker.log", "state.json", "journal.jsonl", "spool",
)  # fmt: skip
"""What an audit leaves in its folder, in the order in which it is moved aside: first what a gate could take for the new run's."""


@dataclass(frozen=True)
class Place:
    """Where a new audit goes."""

    folder: Path
    note: str = ""
    """What became of an earlier audit there, in a clause for the user; empty where there was none."""


def settle(wanted: Path, config: AuditConfig, tokenizer: Any, command: str = "") -> tuple[Spool, Place]:
    """Make room for an audit in `wanted` and a fresh spool in it; trainers that begin at the same moment take turns.

    Returns:
        The spool, whose configuration names the folder that was found, and what became of an earlier audit.

    Raises:
        SpoolError: `wanted` is a link, or cannot be written.
        ConfigError: the keys that snapshots are to be encrypted to cannot be used.
    """
    with turn(wanted.parent):
        place = make_room(wanted)
        settled = config.model_copy(update={"out_dir": place.folder})
        return Spool.create(place.folder / "spool", settled, tokenizer, command), place


@contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Be the only one who looks for a place in `folder`, as far as its file system has locks; needs no file of its own."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise SpoolError(
            f"{folder}: cannot be written ({error.strerror}); set `out_dir` to a folder that can"
        ) from None
    try:
        deadline = time.monotonic() + TURN_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)
                continue
            except OSError:
                pass  # no locks here
            break
        yield
    finally:
        os.close(descriptor)


def make_room(wanted: Path) -> Place:
    """Move an earlier audit's files out of `wanted`, so that it always holds the latest run, and two runs never mix.

    They go to `wanted.1`, `wanted.2`..., the latest to the highest number; other files stay where they are. An audit that is
    still under way is left alone: then the new one goes to `wanted-2`, `wanted-3`..., and the note says so.

    Raises:
        SpoolError: `wanted` is a link.
    """
    _check_no_link(wanted)
    if not _holds_audit(wanted):
        with contextlib.suppress(OSError):  # what cannot be written says so below
            (wanted / NOT_AUDITED).unlink(missing_ok=True)
        return Place(wanted)
    spool = Spool(wanted / "spool")
    if spool.under_way() or is_held(wanted):
        return _beside(wanted, "the audit there is still under way")
    aside, number = wanted, 0
    while aside.exists() or aside.is_symlink():
        number += 1
        aside = wanted.with_name(f"{wanted.name}.{number}")
    try:
        aside.mkdir(mode=0o700)
        for name in LEFT_BY_AUDIT:
            with contextlib.suppress(FileNotFoundError):
                (wanted / name).rename(aside / name)
    except OSError as error:
        return _beside(wanted, f"the audit there cannot be moved ({error.strerror})")
    Spool(aside / "spool").purge_unfinished()
    return Place(wanted, f"the earlier audit there is now in {aside.name}")


def _holds_audit(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("spool", "journal.jsonl", "results.json"))


def _beside(wanted: Path, why: str) -> Place:
    candidate, number = wanted, 1
    while _holds_audit(candidate) or candidate.is_symlink():
        number += 1
        candidate = wanted.with_name(f"{wanted.name}-{number}")
    return Place(candidate, f"{why}: gate {candidate.name}, not {wanted.name}")


def _check_no_link(folder: Path) -> None:
    if folder.is_symlink():
        raise SpoolError(f"{folder}: is a link; snapshots hold private text and are not written through links")
