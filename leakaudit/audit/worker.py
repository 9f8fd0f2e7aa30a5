"""The side process: takes snapshots from the spool, attacks them, and writes the results when the trainer is through.

It is a guest on the trainer's machine: low priority, first to be killed when memory runs out, gone when the trainer is gone.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from leakaudit.errors import ConfigError, LeakAuditError, SnapshotSealedError, type_and_place
from leakaudit.exit_codes import ExitCode
from leakaudit.results.journal import JournalEntry
from leakaudit.storage.encryption import IDENTITY_VARIABLE
from leakaudit.storage.parent_watch import PARENT_VARIABLE, leash, yield_processor
from leakaudit.storage.retention import purge_old_runs
from leakaudit.storage.spool import DEVICE_VARIABLE, AuditFile, Spool, Totals

DIED_OVER = "workers died over its snapshot"
"""Why a step is lost over which the process was killed, ran out of memory or crashed as a whole."""

SHORTEST_POLL, LONGEST_POLL = 0.02, 0.5
"""Seconds between two looks for a new snapshot: short after the last one, then ever longer, so that waiting costs nothing."""


def _print(line: str) -> None:
    print(line, flush=True)


@dataclass(frozen=True)
class Means:
    """What a worker was given to work with."""

    device: str | None = None
    """Overrides the configuration's."""
    identities: tuple[str, ...] = ()
    """Private keys."""
    idle_limit_s: float | None = None
    """Seconds without anything new after which it ends."""
    say: Callable[[str], None] = _print
    """Tells what it does, a line at a time. Never text of the batch: ids, counts and times only."""
    build: Callable[[Any, Any], Any] | None = None
    """Makes a model of a recipe and weights, where the recipe alone does not tell how."""


def run_worker(
    root: Path,
    *,
    once: bool = False,
    device: str | None = None,
    identities: Sequence[str] = (),
    idle_limit_s: float | None = None,
    audit_factory: Callable[..., Any] | None = None,
) -> ExitCode:
    """Audit the snapshots of a spool until its trainer is through, or is known to be dead.

    Args:
        root: the spool folder.
        once: audit what is there, then write the results, without waiting for the trainer.
        device: overrides the configuration's device.
        identities: private keys that open encrypted snapshots.
        idle_limit_s: end when nothing new has come for so many seconds; the trainer may be dead on another host.
        audit_factory: makes the `Audit`; replaced in tests.

    Returns:
        PASS when it is done, CRASH for an error of its own, USAGE where no key fits, ERROR where results or journal cannot be written,
        INTERRUPTED where it was asked to stop.

    Raises:
        SpoolError: no spool there, or another worker is at work on it.
        ConfigError: the audit's configuration cannot be used, or snapshots are encrypted and no key was given.
    """
    spool = Spool(root)
    quiet_libraries()
    tied = leash()
    tied.spool = root
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        spool, audit_file = Spool.open(root)
        _be_a_good_guest(audit_file)
        means = Means(device, (*identities, *tied.key()), idle_limit_s)
        _check_key(spool, means)
        with spool.worker_lock():
            if spool.trainer_gone(audit_file):
                spool.purge_unfinished()
            for line in purge_old_runs(spool, now=datetime.now(UTC)):
                means.say(line)
            if audit_factory is None:
                import_what_attacks_need()
            if not once and not _wait_for_the_first(spool, audit_file, means):
                means.say("no step was kept: nothing to attack and nothing to report")
                return ExitCode.PASS
            audit = (audit_factory or make_audit)(spool, audit_file, means)
            return _loop(spool, audit_file, audit, means, once=once)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED  # while starting: nothing was claimed
    except LeakAuditError:
        raise
    except Exception as error:  # a traceback would quote its message, which may hold private values
        _print(f"error: the worker cannot go on: {type_and_place(error)}")
        return ExitCode.CRASH
    finally:
        signal.signal(signal.SIGTERM, previous)


def _check_key(spool: Spool, means: Means) -> None:
    """Refuse to begin without a key that will be needed.

    Raises:
        ConfigError: says to whom snapshots are encrypted.
    """
    owners = spool.config.encrypt_to
    if owners and not means.identities:
        raise ConfigError(
            f"{spool.root}: its snapshots are encrypted to {' and '.join(owners)}; give a private key with --identity FILE "
            f"or {IDENTITY_VARIABLE}"
        )


def import_what_attacks_need() -> None:
    """Import torch and the attacks, before there is anything to attack.

    That takes seconds.
    """
    import leakaudit.audit.audit
    import leakaudit.client.snapshot  # noqa: F401


def _wait_for_the_first(spool: Spool, audit_file: AuditFile, means: Means) -> bool:
    """Wait for the first snapshot, and say whether there is one.

    A trainer starts its worker before it keeps a step.
    """
    since, pause = time.monotonic(), SHORTEST_POLL
    while not spool.gone():
        over = spool.totals() is not None or spool.trainer_gone(audit_file) or _is_overdue(since, means)
        if spool.waiting() or spool.deadly() or _has_journal(spool):
            return True
        if over:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_POLL)
    return False


def _has_journal(spool: Spool) -> bool:
    """Return whether an earlier worker finished an attempt.

    Then there is a report to write.
    """
    return (spool.root.parent / "journal.jsonl").exists()


def _loop(spool: Spool, audit_file: AuditFile, audit: Any, means: Means, *, once: bool) -> ExitCode:
    keep = audit_file.config.keep_snapshots
    interrupted, interrupted_trainer, refused = False, False, 0
    for path in spool.deadly():
        means.say(f"snapshot {path.stem} set aside: workers died over it; see whether it fits into memory")
        refused += not lose(audit, path, DIED_OVER)
        spool.set_aside(path, keep=keep, reason=DIED_OVER)
    claimed: Path | None = None
    last_news, pause = time.monotonic(), SHORTEST_POLL  # a wall clock may go backwards
    try:
        while not spool.gone():
            # Asked before claiming: a last snapshot that arrives in between must not be left behind.
            through = once or spool.totals() is not None
            trainer_gone = spool.trainer_gone(audit_file) or _is_overdue(last_news, means)
            claimed = spool.claim()
            if claimed is not None:
                refused += audit_one(spool, audit, claimed, means, keep=keep)
                claimed, last_news, pause = None, time.monotonic(), SHORTEST_POLL
            elif through or trainer_gone:
                interrupted_trainer = not through and spool.totals() is None  # killed before it could say so
                break
            else:
                time.sleep(pause)
                pause = min(1.5 * pause, LONGEST_POLL)
        _no_more_asking()
    except KeyboardInterrupt:
        _no_more_asking()
        interrupted = True
        if claimed is not None:
            spool.give_back(claimed)
        means.say("interrupted: finished attempts are kept; go on with `leakaudit worker` on the same spool")
    except SnapshotSealedError as error:
        if claimed is not None:
            spool.give_back(claimed)  # whoever has the key can go on with it
        means.say(f"error: {error}")
        return ExitCode.USAGE
    except OSError as error:
        _no_more_asking()
        if claimed is not None:
            spool.give_back(claimed)
        if not spool.gone():
            means.say(
                f"error: cannot go on ({error.strerror or type(error).__name__}); free some space, then start again"
            )
            return ExitCode.ERROR
    done = ExitCode.INTERRUPTED if interrupted else ExitCode.PASS
    return write_results(spool, audit, refused, interrupted or interrupted_trainer, means, code=done)


def write_results(
    spool: Spool, audit: Any, refused: int, interrupted: bool, means: Means, *, code: ExitCode = ExitCode.PASS
) -> ExitCode:
    """Write results, verdict and report; say in one line why, if that does not work.

    Args:
        spool: the audit's.
        audit: it.
        refused: snapshots that could not be audited, of which nobody knows what step they were.
        interrupted: training or audit did not come to its end.
        means: of the worker.
        code: exit code where everything could be written.

    Returns:
        `code`, ERROR if something could not be written, INTERRUPTED if it was interrupted meanwhile.
    """
    totals = spool.totals() or Totals()
    spool.tidy()
    try:
        audit.finish(
            refused=refused,
            not_kept=totals.not_kept(spool.config),
            total_steps=totals.total_steps,
            overhead=totals.overhead,
            interrupted=interrupted or totals.interrupted,
        )
    except LeakAuditError as error:
        means.say(f"error: {error}")
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as error:
        means.say(f"error: the results cannot be written: {type_and_place(error)}")
    else:
        means.say(f"results.json and report.html are in {spool.root.absolute().parent}")
        if not (interrupted or totals.interrupted or spool.entries() or spool.gone()):
            spool.forget_salt()  # nothing is left that could be added under the same key
        return code
    return code or ExitCode.ERROR


def _is_overdue(last_news: float, means: Means) -> bool:
    return means.idle_limit_s is not None and time.monotonic() - last_news > means.idle_limit_s


def lose(audit: Any, snapshot: Path, reason: str) -> bool:
    """Note in the results that a step was kept and could not be audited.

    Returns:
        Whether its number is known; if not, it can only be counted.
    """
    if not snapshot.stem.isdecimal():
        return False
    audit.lose(int(snapshot.stem), reason)
    return True


def audit_one(spool: Spool, audit: Any, claimed: Path, means: Means, *, keep: bool) -> int:
    """Audit one snapshot; one that cannot be audited is reported and set aside, and the next one gets its turn.

    Returns:
        1 if it was lost and the results cannot say which step it was, else 0.

    Raises:
        SnapshotSealedError: it is encrypted, and no key fits.
        OSError: the disk is full, or somebody removed the spool: no fault of the snapshot's.
    """
    from leakaudit.storage.snapshots import read_snapshot

    try:
        audit.step(read_snapshot(claimed, means.identities, means.build))
    except SnapshotSealedError:
        raise
    except LeakAuditError as error:
        means.say(f"snapshot {claimed.stem} refused: {type(error).__name__}: {error}")
        reason = type(error).__name__
    except OSError:
        raise
    except Exception as error:
        reason = type_and_place(error)
        means.say(f"snapshot {claimed.stem} refused: {reason}")
    else:
        spool.release(claimed, keep=keep)
        return 0
    reason = f"its snapshot could not be audited ({reason})"
    unnamed = not lose(audit, claimed, reason)
    spool.set_aside(claimed, keep=keep, reason=reason)
    return int(unnamed)


def make_audit(spool: Spool, audit_file: AuditFile, means: Means) -> Any:
    """Open the audit of a spool on the device that fits."""
    import torch

    from leakaudit.audit.audit import Audit
    from leakaudit.audit.devices import choose_device
    from leakaudit.client.snapshot import BASE, OBSERVED
    from leakaudit.models.array_classifier import reader_in

    def report(entry: JournalEntry) -> None:
        done = entry.attempt
        means.say(f"{done.step} {done.attack} / {done.defense}: {done.status.value} in {done.wall_s:.1f} s")

    config = audit_file.config
    torch.set_num_threads(config.threads)
    parts = [[*path.glob(f"{OBSERVED}*"), *path.glob(f"{BASE}*")] for path in spool.entries()]
    sizes = [sum(file.stat().st_size for file in files) for files in parts]
    device = choose_device(
        means.device or config.device, beside=os.environ.get(DEVICE_VARIABLE), snapshot=max(sizes, default=0)
    )
    means.say(f"computes on {device}, CPU threads: {config.threads}")
    audit = Audit(
        spool.root.absolute().parent,  # not `config.out_dir`: a later run may have moved this audit aside
        config,
        reader_in(spool.root / "tokenizer"),
        device=device,
        report=report,
        command=audit_file.command,
        key=_hash_key(means, audit_file.salt) if config.encrypt_to else None,
    )
    spool.note_battery(audit.battery)
    return audit


def _hash_key(means: Means, salt: str) -> bytes:
    """Return the key of the hashes of private text: made from the private key, so that it never lies on the disk."""
    return hmac.new(means.identities[0].encode(), f"leakaudit keyed hashes {salt}".encode(), hashlib.sha256).digest()


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _no_more_asking() -> None:
    """From here on the worker writes its results, which is what SIGTERM asks for: it must not end that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


LOUD = (
    "transformers",
    "huggingface_hub",
    "datasets",
    "urllib3",
    "filelock",
    "tokenizers",
    "torch",
    "safetensors",
    "peft",
)
"""Libraries that write configurations, paths or addresses into a log when they are told to."""


def quiet_libraries() -> None:
    """Let libraries say no more than warnings, whatever the environment asks for: the log of a worker is no private file."""
    os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"})
    for name in LOUD:
        logging.getLogger(name).setLevel(logging.WARNING)


def _be_a_good_guest(audit_file: AuditFile) -> None:
    """Yield the processor to the trainer as far as the system lets us, before anything heavy is loaded."""
    if not os.environ.get(PARENT_VARIABLE):
        return  # started by hand: a process of its own right
    yield_processor(0, os.getppid(), audit_file.config.nice)
