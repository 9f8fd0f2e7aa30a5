"""The side process: audits the snapshots of a spool while its trainer runs.

It writes the results when the trainer has finished. It disturbs the trainer as little as possible: it has a low priority, the system
kills it before the trainer if memory runs out, and it stops when its trainer has stopped.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from leakaudit.audit.rounds import Trainers
from leakaudit.audit.spool_audit import (
    WorkerOptions,
    audit_one,
    claim,
    note_red_line,
    open_audit,
    print_line,
    record_loss,
    write_results,
)
from leakaudit.audit.worker_signals import TimeIsUp, code_of, ignore_requests, sigterm_interrupts, time_limit_interrupts
from leakaudit.errors import ConfigError, LeakAuditError, ModelNotVouchedError, SnapshotSealedError, type_and_place
from leakaudit.exit_codes import ExitCode
from leakaudit.storage.encryption import IDENTITY_VARIABLE
from leakaudit.storage.parent_watch import FACTORIES_VARIABLE, PARENT_VARIABLE, watch_parent, yield_processor
from leakaudit.storage.retention import purge_old_runs
from leakaudit.storage.spool import TOKENIZER, Spool
from leakaudit.storage.spool_files import AuditFile

DIED_OVER = "workers died over its snapshot"
"""Reason of a lost step over which several workers died, outside of attempts.

They were killed, ran out of memory or crashed while they read or verified it, or applied a defence.
"""

SHORTEST_POLL, LONGEST_POLL = 0.02, 0.5
"""Shortest and longest pause, in seconds, between two searches for a snapshot.

Our choice: the pauses grow after the last snapshot, so that waiting needs almost no processor time.
"""

POLL_GROWTH = 1.5
"""Ratio of one such pause to the pause before it."""

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
"""Libraries that can log configurations, paths or addresses."""


def run_worker(
    root: Path,
    *,
    once: bool = False,
    device: str | None = None,
    identities: Sequence[str] = (),
    idle_limit_s: float | None = None,
    retry: bool = False,
    work_s: float | None = None,
    audit_factory: Callable[..., Any] | None = None,
) -> ExitCode:
    """Audit the snapshots of a spool until its trainer has finished or was killed.

    Args:
        root: the spool folder.
        once: audit the waiting snapshots and write the results, without waiting for the trainer.
        device: overrides the configuration's device.
        identities: private keys that open encrypted snapshots.
        idle_limit_s: stop after this number of seconds without a new snapshot, because a trainer on another host may have been killed.
        retry: try the snapshots again that were set aside.
        work_s: seconds after which the worker writes the results of finished attempts and ends; None for no limit.
        audit_factory: function that makes the `Audit`; tests replace it.

    Returns:
        PASS if all is done, CRASH for an error of the worker itself, USAGE if no key fits or a snapshot names a maker of its model that the
        user did not name, ERROR if results or journal cannot be written,
        INTERRUPTED if the worker was asked to stop, TIME_LIMIT if its time was over.

    Raises:
        SpoolError: the folder is no spool, or another worker runs on it.
        ConfigError: the audit's configuration cannot be used, or snapshots are encrypted and no key was given.
    """
    quiet_libraries()
    parent = watch_parent()
    parent.spool = root
    try:
        _vouch_as_the_trainer()
        with sigterm_interrupts(), time_limit_interrupts(work_s):
            spool, audit_file = Spool.open(root)
            _yield_processor(spool, audit_file)
            options = WorkerOptions(device, (*identities, *parent.key()), idle_limit_s)
            check_key(spool, options)
            with spool.worker_lock():
                return _audit_spool(spool, audit_file, options, once=once, retry=retry, audit_factory=audit_factory)
    except KeyboardInterrupt as stop:
        return code_of(stop)  # during the start, no snapshot was claimed yet
    except LeakAuditError:
        raise
    except Exception as error:  # its message may hold private values, so there is no traceback
        print_line(f"error: the worker cannot continue: {type_and_place(error)}")
        return ExitCode.CRASH


def quiet_libraries() -> None:
    """Silence all messages of libraries below warnings.

    Other people may read a worker's log, so this overrides the environment's settings.
    """
    os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"})
    for name in LOUD:
        logging.getLogger(name).setLevel(logging.WARNING)


def _vouch_as_the_trainer() -> None:
    """Vouch for the makers of models that the training process vouched for."""
    if names := json.loads(os.environ.get(FACTORIES_VARIABLE, "[]")):
        from leakaudit.models.factories import vouch_for

        vouch_for(*names)


def _audit_spool(
    spool: Spool,
    audit_file: AuditFile,
    options: WorkerOptions,
    *,
    once: bool,
    retry: bool,
    audit_factory: Callable[..., Any] | None,
) -> ExitCode:
    """Clean a locked spool, audit it and return the exit code."""
    if spool.trainer_gone(audit_file):
        spool.purge_unfinished()
    for line in purge_old_runs(spool, now=datetime.now(UTC)):
        options.notify(line)
    if audit_factory is None:
        _import_torch_and_attacks()
    if not once and not retry and not _wait_for_the_first(spool, audit_file, options):
        options.notify("no step was kept: nothing to attack and nothing to report")
        return ExitCode.PASS
    if not (spool.root / TOKENIZER).exists() and not spool.entries():
        options.notify("every kept step is audited and removed: nothing is left to attack")
        return ExitCode.PASS
    audit = (audit_factory or open_audit)(spool, audit_file, options)
    work = _Work(spool, audit_file, audit, options, once)
    if retry:
        work.retry()
    return work.run()


@dataclass
class _Work:
    """The task of one worker: audit every snapshot of a spool, write the results."""

    spool: Spool
    audit_file: AuditFile
    audit: Any
    options: WorkerOptions
    once: bool
    refused: int = field(default=0, init=False)
    """Number of snapshots that could not be audited and whose step is unknown."""
    claimed: Path | None = field(default=None, init=False)
    """The snapshot that is being audited."""
    _writing: threading.Lock = field(default_factory=threading.Lock, init=False)
    """Held by the thread that writes results; whoever writes the last ones never releases it."""

    def run(self) -> ExitCode:
        """Audit every snapshot, write the results and return the exit code."""
        watch_parent().write_results = self._write_orphaned
        self._set_deadly_snapshots_aside()
        try:
            complete = self._audit_until_the_end()
            ignore_requests()
        except KeyboardInterrupt as stop:
            ignore_requests()
            self._give_back()
            self._notify_interrupted("the time limit" if isinstance(stop, TimeIsUp) else "interrupted")
            return self._write(interrupted=True, code=code_of(stop))
        except (SnapshotSealedError, ModelNotVouchedError) as error:
            self._give_back()  # a worker with the key, or with the user's word, can continue with it
            self.options.notify(f"error: {error}")
            return ExitCode.USAGE
        except OSError as error:
            ignore_requests()
            self._give_back()
            if self.spool.gone():
                return self._write(interrupted=False)
            what = error.strerror or type(error).__name__
            self.options.notify(f"error: cannot continue ({what}); free some space, then start again")
            return ExitCode.ERROR
        return self._write(interrupted=not complete)

    def retry(self) -> None:
        """Return the snapshots that were set aside to the queue."""
        for path in self.spool.queue.set_aside_before():
            if path.stem.isdecimal():
                step = int(path.stem)
                self.options.notify(f"snapshot {path.stem} is tried again")
                self.spool.queue.retry(path, partial(self.audit.unlose, step))

    def _set_deadly_snapshots_aside(self) -> None:
        """Set aside the snapshots over which several earlier workers died.

        They stay until they are too old: the cause may have been another process that needed the memory.
        """
        for path in self.spool.queue.poisonous():
            self.options.notify(
                f"snapshot {path.stem} set aside: workers died over it; see whether it fits into memory, then try it again with "
                "`leakaudit worker FOLDER --retry`"
            )
            self.refused += not record_loss(self.audit, path, DIED_OVER)
            self.spool.queue.set_aside(path, keep=True, reason=DIED_OVER)

    def _audit_until_the_end(self) -> bool:
        """Audit snapshots as they arrive; return whether the run is complete."""
        last_news = time.monotonic()  # a wall clock may go backwards
        pauses = _pauses()
        trainers = Trainers(self.spool, self.audit_file)
        while not self.spool.gone():
            # This comes before the claim, because a last snapshot may arrive in between.
            finished = self.once or self.spool.totals() is not None
            trainer_gone = trainers.gone() or _is_overdue(last_news, self.options)
            trainers.release_held()
            self.claimed = None if trainers.out_of_patience and not finished else claim(self.spool, self.audit)
            if self.claimed is not None:
                self.refused += audit_one(self.spool, self.audit, self.claimed, self.options, keep=self._keep)
                self.claimed, last_news, pauses = None, time.monotonic(), _pauses()
                note_red_line(self.spool, self.audit, self.options)
                self._report_so_far()
            elif finished or trainer_gone:
                return finished or self.spool.totals() is not None  # a trainer that was killed wrote no totals
            else:
                time.sleep(next(pauses))
        return True

    def _report_so_far(self) -> None:
        """Write the results of the rounds so far: nobody knows when the next one comes."""
        if self.audit_file.config.unit != "round" or self.spool.totals() is not None:
            return
        with self._writing:
            code = write_results(self.spool, self.audit, self.refused, True, self.options)
        if code is ExitCode.INTERRUPTED:
            raise KeyboardInterrupt

    def _give_back(self) -> None:
        """Put the claimed snapshot back into the spool, if there is one."""
        if self.claimed is not None:
            self.spool.queue.give_back(self.claimed)

    def _write_orphaned(self) -> None:
        """Write the results of finished attempts, because the trainer has ended.

        Another thread may be in the middle of an attempt, so this reads the files.
        """
        from leakaudit.audit.audit import reloaded

        self._writing.acquire()
        try:
            audit = reloaded(self.audit)
        except Exception as error:
            self.options.notify(f"error: the results cannot be written: {type_and_place(error)}")
            return
        self._notify_interrupted()
        write_results(self.spool, audit, self.refused, True, self.options)

    def _notify_interrupted(self, why: str = "interrupted") -> None:
        folder = shlex.quote(str(self.spool.root.absolute().parent))
        self.options.notify(f"{why}: finished attempts are kept; `leakaudit worker {folder}` goes on")

    def _write(self, *, interrupted: bool, code: ExitCode = ExitCode.PASS) -> ExitCode:
        self._writing.acquire()
        return write_results(self.spool, self.audit, self.refused, interrupted, self.options, code=code)

    @property
    def _keep(self) -> bool:
        return self.audit_file.config.keep_snapshots


def _wait_for_the_first(spool: Spool, audit_file: AuditFile, options: WorkerOptions) -> bool:
    """Wait for the first snapshot; return whether there is anything to do.

    The trainer starts the worker before it records a step, so it may end without a snapshot.
    """
    since, pauses, trainers = time.monotonic(), _pauses(), Trainers(spool, audit_file)
    while not spool.gone():
        over = spool.totals() is not None or trainers.gone() or _is_overdue(since, options)
        if spool.waiting() or spool.queue.poisonous() or _has_journal(spool):
            return True
        if over:
            return False
        time.sleep(next(pauses))
    return False


def _pauses() -> Iterator[float]:
    """Yield the length of each pause between two searches, in seconds."""
    pause = SHORTEST_POLL
    while True:
        yield pause
        pause = min(POLL_GROWTH * pause, LONGEST_POLL)


def _has_journal(spool: Spool) -> bool:
    """Return whether an earlier worker finished an attempt.

    If so, the worker has results to write.
    """
    return (spool.root.parent / "journal.jsonl").exists()


def _is_overdue(last_news: float, options: WorkerOptions) -> bool:
    """Return whether the idle limit has passed since the last snapshot."""
    return options.idle_limit_s is not None and time.monotonic() - last_news > options.idle_limit_s


def check_key(spool: Spool, options: WorkerOptions) -> None:
    """Refuse to begin without a private key if snapshots are encrypted.

    Raises:
        ConfigError: the key is missing. The message names the public keys to which the snapshots are encrypted.
    """
    owners = spool.config.encrypt_to
    if owners and not options.identities:
        raise ConfigError(
            f"{spool.root}: its snapshots are encrypted to {' and '.join(owners)}; give a private key with --identity FILE "
            f"or {IDENTITY_VARIABLE}"
        )


def _import_torch_and_attacks() -> None:
    """Import torch and the attacks before the first snapshot arrives.

    The import takes seconds.
    """
    import leakaudit.audit.audit
    import leakaudit.client.snapshot  # noqa: F401


def _yield_processor(spool: Spool, audit_file: AuditFile) -> None:
    """Lower this process's priority below the trainer's while it trains.

    The worker does this before it loads anything large. A worker keeps its priority if a user started it, or if training is over.
    """
    if os.environ.get(PARENT_VARIABLE) and spool.totals() is None:
        yield_processor(0, os.getppid(), audit_file.config.nice)
