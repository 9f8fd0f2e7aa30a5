"""The audit of one spool, snapshot by snapshot.

The side process (`worker`) and the audit in the training process (`inline`) both use it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leakaudit.audit.worker_signals import raise_lost_interrupt
from leakaudit.config.secret_book import SecretBook, check_tokenizer
from leakaudit.errors import ConfigError, LeakAuditError, ModelNotVouchedError, SnapshotSealedError, type_and_place
from leakaudit.exit_codes import ExitCode
from leakaudit.results.journal import JournalEntry
from leakaudit.results.wording import counted, duration
from leakaudit.storage.rounds_file import totals_so_far
from leakaudit.storage.spool import DEVICE_VARIABLE, TOKENIZER, Spool, forget_tokenizer
from leakaudit.storage.spool_files import RED_LINE, AuditFile, forget_salt, write_battery, write_red_line

if TYPE_CHECKING:
    from leakaudit.audit.state import Journal


def print_line(line: str) -> None:
    """Print a line and flush the output."""
    print(line, flush=True)


@dataclass(frozen=True)
class WorkerOptions:
    """Options with which a worker was started."""

    device: str | None = None
    """Device that overrides the configuration's; None keeps that one."""
    identities: tuple[str, ...] = ()
    """Private keys that open encrypted snapshots."""
    idle_limit_s: float | None = None
    """Seconds without a new snapshot after which the worker stops; None for no limit."""
    notify: Callable[[str], None] = print_line
    """Function that gets each line of the log; no line holds text of the batch."""
    build: Callable[[Any, Any], Any] | None = None
    """Function that builds a model from a recipe and weights; None builds it from the recipe only."""


def open_audit(spool: Spool, audit_file: AuditFile, options: WorkerOptions) -> Any:
    """Open the `Audit` of a spool on a suitable device.

    Raises:
        ConfigError: the device or a plugin does not exist.
        ResultsError: the folder around the spool holds another audit.
    """

    def report(entry: JournalEntry) -> None:
        options.notify(_finished_line(spool, audit, entry))

    key = _hash_key(options, audit_file.salt) if audit_file.config.encrypt_to else None
    # not `config.out_dir`: a later run may have moved this audit aside
    audit = audit_in(spool.root.absolute().parent, spool, audit_file, options, report=report, key=key)
    write_battery(spool.root, audit.battery)
    return audit


def _finished_line(spool: Spool, audit: Any, entry: JournalEntry) -> str:
    """Return a line on a finished attempt.

    Its outcome, how many leaked so far, and the time left for the snapshots in the spool.
    """
    from leakaudit.audit.audit import seconds_left

    done = entry.attempt
    leaks = sum(one.attempt.leaked for one in audit.entries)
    waiting = [int(path.stem) for path in spool.queue.pending()]
    left = seconds_left(audit, waiting)
    more = "" if left is None else f"; about {duration(left)} left for {counted(len(waiting), 'snapshot')}"
    what = f"{done.step} {done.attack} / {done.defense}: {done.status.value} in {done.wall_s:.1f} s"
    return f"{what}; {leaks} of {counted(len(audit.entries), 'attempt')} with a leak event{more}"


def audit_in(
    folder: Path,
    spool: Spool,
    audit_file: AuditFile,
    options: WorkerOptions,
    *,
    report: Callable[[JournalEntry], None],
    key: bytes | None,
    journal: Journal | None = None,
) -> Any:
    """Open an `Audit` of a spool in any folder, on a suitable device.

    Args:
        folder: folder of journal, state and results.
        spool: holds the tokenizer.
        audit_file: configuration, and how the training was started.
        options: options of the worker.
        report: called after every finished attempt.
        key: key of the hashes of private text; None creates one.
        journal: a journal in memory; None for the file in the folder. Only with a file the spool counts processes that die during an attempt.

    Raises:
        ConfigError: the device or a plugin does not exist.
        ResultsError: the folder holds another audit.
    """
    import torch

    from leakaudit.audit.audit import Audit
    from leakaudit.audit.devices import choose_device
    from leakaudit.models.array_classifier import reader_in

    config = audit_file.config
    torch.set_num_threads(config.threads)
    reader = reader_in(spool.root / TOKENIZER)
    device = choose_device(
        options.device or config.device, beside=os.environ.get(DEVICE_VARIABLE), snapshot=_largest_snapshot(spool)
    )
    options.notify(f"computes on {device}, CPU threads: {config.threads}")
    return Audit(
        folder,
        config,
        reader,
        device=device,
        report=report,
        command=audit_file.command,
        key=key,
        deaths=spool.queue.attempts if journal is None else None,
        origin=audit_file.origin,
        journal=journal,
        secrets=_secrets_of(audit_file, reader, options),
    )


def _secrets_of(audit_file: AuditFile, reader: Any, options: WorkerOptions) -> SecretBook | None:
    """Return the invented records of a training.

    None if there are none, or if the tokenizer cannot tell their secrets apart.
    """
    if audit_file.secrets is None:
        return None
    book = audit_file.secrets.book()
    try:
        check_tokenizer(
            book.template, lambda text: str(reader.decode(reader(text)["input_ids"], skip_special_tokens=True))
        )
    except ConfigError as error:
        options.notify(f"canaries: {error}")
        return None
    return book


def claim(spool: Spool, audit: Any) -> Path | None:
    """Claim and return the next snapshot; None if none waits.

    Snapshots that wait for slow attacks only come after all others.
    """
    return spool.queue.claim(last=_slow_left(audit))


def _slow_left(audit: Any) -> Callable[[Path], bool]:
    return lambda path: path.stem.isdecimal() and bool(audit.only_slow_left(int(path.stem)))


def audit_one(spool: Spool, audit: Any, claimed: Path, options: WorkerOptions, *, keep: bool) -> int:
    """Audit one snapshot, or run its quick attacks if others wait for theirs.

    A snapshot that waits for slow attacks returns to the queue. One that cannot be audited is reported in the log and set aside.

    Args:
        spool: holds the snapshot.
        audit: audit of the spool.
        claimed: the snapshot, which this process has claimed.
        options: options of the worker.
        keep: whether the snapshot stays on disk afterwards.

    Returns:
        1 if the snapshot could not be audited and its step is unknown, else 0.

    Raises:
        SnapshotSealedError: the snapshot is encrypted and no key fits.
        ModelNotVouchedError: the snapshot names code that makes its model, and the user did not name that code.
        OSError: the disk is full or the spool was removed. The snapshot itself may still be valid.
        KeyboardInterrupt: the worker was asked to stop.
    """
    from leakaudit.storage.snapshots import read_snapshot

    try:
        done = audit.step(
            read_snapshot(claimed, options.identities, options.build),
            others_wait=lambda: not all(map(_slow_left(audit), spool.queue.ready())),
        )
    except (SnapshotSealedError, ModelNotVouchedError, OSError):
        raise_lost_interrupt()
        raise
    except LeakAuditError as error:
        raise_lost_interrupt()
        options.notify(f"snapshot {claimed.stem} refused: {type(error).__name__}: {error}")
        reason = type(error).__name__
    except Exception as error:
        raise_lost_interrupt()
        reason = type_and_place(error)
        options.notify(f"snapshot {claimed.stem} refused: {reason}")
    else:
        if done:
            spool.queue.discard_or_keep(claimed, keep=keep)
        else:
            spool.queue.give_back(claimed)
        return 0
    reason = f"its snapshot could not be audited ({reason})"
    unnamed = not record_loss(audit, claimed, reason)
    spool.queue.set_aside(claimed, keep=keep, reason=reason)
    return int(unnamed)


def note_red_line(spool: Spool, audit: Any, options: WorkerOptions) -> None:
    """Note in the spool that a leak ends the training, if the user asked for that.

    A problem with the policy is logged; it never ends a training.
    """
    from leakaudit.audit.publish import red_line_of

    config = spool.config
    if config.stop_on is None or (spool.root / RED_LINE).exists():
        return
    try:
        line = red_line_of(audit.results_so_far(), config, datetime.now(UTC))
        if line is not None:
            write_red_line(spool.root, line)
            options.notify(f"a red line was crossed, training is asked to stop: {line.sentence}")
    except (LeakAuditError, OSError) as error:
        options.notify(f"error: `stop_on` cannot be judged: {type_and_place(error)}")


def record_loss(audit: Any, snapshot: Path, reason: str) -> bool:
    """Record in the results that a kept step could not be audited.

    Returns:
        Whether the step's number is known; if not, nothing is recorded and the caller counts the snapshot.
    """
    if not snapshot.stem.isdecimal():
        return False
    audit.lose(int(snapshot.stem), reason)
    return True


def write_results(
    spool: Spool, audit: Any, refused: int, interrupted: bool, options: WorkerOptions, *, code: ExitCode = ExitCode.PASS
) -> ExitCode:
    """Write results, verdict and report; if that fails, log one line with the reason.

    Args:
        spool: spool of the audit.
        audit: audit of the spool.
        refused: number of snapshots that could not be audited and whose step is unknown.
        interrupted: whether training or the audit was stopped before its end.
        options: options of the worker.
        code: exit code if everything was written.

    Returns:
        `code`; ERROR if `code` is PASS and something could not be written; INTERRUPTED if the process was interrupted while writing.
    """
    totals = spool.totals() or totals_so_far(spool.root)
    spool.tidy()
    try:
        audit.finish(
            refused=refused,
            not_kept=totals.not_kept(spool.config),
            total_steps=totals.total_steps,
            overhead=totals.overhead,
            privacy=totals.privacy,
            interrupted=interrupted or totals.interrupted,
        )
    except LeakAuditError as error:
        options.notify(f"error: {error}")
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as error:
        options.notify(f"error: the results cannot be written: {type_and_place(error)}")
    else:
        options.notify(f"results.json and report.html are in {spool.root.absolute().parent}")
        if not (interrupted or totals.interrupted or spool.entries() or spool.gone()):
            forget_salt(spool.root)  # no later step can then use the same key
        forget_tokenizer(spool)
        return code
    return code or ExitCode.ERROR


def _largest_snapshot(spool: Spool) -> int:
    """Return the size of the largest waiting snapshot in bytes.

    Weights and update count. It is 0 if no snapshot waits.
    """
    from leakaudit.client.snapshot import BASE, OBSERVED

    parts = [[*path.glob(f"{OBSERVED}*"), *path.glob(f"{BASE}*")] for path in spool.entries()]
    return max((sum(file.stat().st_size for file in files) for files in parts), default=0)


def _hash_key(options: WorkerOptions, salt: str) -> bytes:
    """Return the key for hashes of private text, derived from the private key.

    It is never written to disk.
    """
    return hmac.new(options.identities[0].encode(), f"leakaudit keyed hashes {salt}".encode(), hashlib.sha256).digest()
