"""The side process: takes snapshots from the spool, attacks them, and writes the results when the trainer is through.

It is a guest on the trainer's machine: low priority, first to be killed when memory runs out, gone when the trainer is gone.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from leakaudit.errors import LeakAuditError
from leakaudit.scores import JournalEntry
from leakaudit.spool import AuditFile, Spool, Totals

POLL_SECONDS = 0.2
"""Between two looks for a new snapshot: far below the seconds an attack takes."""

ORPHAN_POLL_SECONDS = 1.0
"""Between two looks at the trainer: a killed trainer's worker is gone within three of these."""

PARENT_VARIABLE = "LEAKAUDIT_PARENT_PID"
"""Set by the callback: the process whose death ends this one."""


def run_worker(
    root: Path, *, once: bool = False, device: str | None = None, audit_factory: Callable[..., Any] | None = None
) -> int:
    """Audit the snapshots of a spool until its trainer is through, or is known to be dead.

    Args:
        root: the spool folder.
        once: audit what is there, then write the results, without waiting for the trainer.
        device: overrides the configuration's device.
        audit_factory: makes the `Audit`; replaced in tests.

    Returns:
        Exit code: 0 done, 5 the results or the journal could not be written, 130 interrupted.

    Raises:
        SpoolError: no spool there, or another worker is at work on it.
        ConfigError: the audit's configuration cannot be used.
    """
    spool = Spool(root)
    _watch_trainer(spool)  # before anything slow: a trainer that is gone by then shall not leave us behind
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        spool, audit_file = Spool.open(root)
        _be_a_good_guest(audit_file)
        with spool.worker_lock():
            if audit_file.trainer_is_gone():
                spool.purge_unfinished()
            audit = (audit_factory or _make_audit)(spool, audit_file, device)
            return _loop(spool, audit_file, audit, once=once)
    except KeyboardInterrupt:
        return 130  # while starting: nothing was claimed
    finally:
        signal.signal(signal.SIGTERM, previous)


def _loop(spool: Spool, audit_file: AuditFile, audit: Any, *, once: bool) -> int:
    keep = audit_file.config.keep_snapshots
    interrupted, interrupted_trainer, refused = False, False, 0
    for path in spool.deadly():
        _say(f"snapshot {path.stem} set aside: workers died over it; see whether it fits into memory")
        refused += 1
        spool.set_aside(path, keep=keep)
    claimed: Path | None = None
    try:
        while not spool.gone():
            # Asked before claiming: a last snapshot that arrives in between must not be left behind.
            through = once or spool.totals() is not None
            trainer_gone = audit_file.trainer_is_gone()
            claimed = spool.claim()
            if claimed is not None:
                refused += not _audit_one(spool, audit, claimed, keep=keep)
                claimed = None
            elif through or trainer_gone:
                interrupted_trainer = not through and spool.totals() is None  # killed before it could say so
                break
            else:
                time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        interrupted = True
        if claimed is not None:
            spool.give_back(claimed)
        _say("interrupted: finished attempts are kept; go on with `leakaudit worker` on the same spool")
    except OSError as error:
        if claimed is not None:
            spool.give_back(claimed)
        if not spool.gone():
            _say(f"error: cannot go on ({error.strerror or type(error).__name__}); free some space, then start again")
            return 5
    return _finish(spool, audit, refused, interrupted, interrupted_trainer=interrupted_trainer)


def _finish(spool: Spool, audit: Any, refused: int, interrupted: bool, *, interrupted_trainer: bool) -> int:
    """Write results, verdict and report; say in one line why, if that does not work."""
    totals = spool.totals() or Totals()
    try:
        audit.finish(
            skipped=totals.skipped + refused,
            total_steps=totals.total_steps,
            overhead=totals.overhead,
            interrupted=interrupted or interrupted_trainer or totals.interrupted,
        )
    except LeakAuditError as error:
        _say(f"error: {error}")
    except KeyboardInterrupt:
        interrupted = True
    except Exception as error:
        _say(f"error: the results cannot be written: {_where(error)}")
    else:
        return 130 if interrupted else 0
    return 130 if interrupted else 5


def _audit_one(spool: Spool, audit: Any, claimed: Path, *, keep: bool) -> bool:
    """Audit one snapshot; one that cannot be audited is reported and set aside, and the next one gets its turn.

    Returns:
        Whether it was audited.
    """
    from leakaudit.snapshot import read_snapshot

    try:
        audit.step(read_snapshot(claimed))
    except LeakAuditError as error:
        _say(f"snapshot {claimed.stem} refused: {type(error).__name__}: {error}")
    except OSError:
        raise  # a full disk, or a removed spool: no fault of this snapshot
    except Exception as error:
        _say(f"snapshot {claimed.stem} refused: {_where(error)}")
    else:
        spool.release(claimed, keep=keep)
        return True
    spool.set_aside(claimed, keep=keep)
    return False


def _where(error: Exception) -> str:
    """Return type and place of an exception, never its message: that may hold private values."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"


def _make_audit(spool: Spool, audit_file: AuditFile, device: str | None) -> Any:
    from leakaudit.battery import Audit
    from leakaudit.devices import choose_device
    from leakaudit.models import load_tokenizer

    config = audit_file.config
    return Audit(
        spool.root.absolute().parent,  # not `config.out_dir`: a later run may have moved this audit aside
        config,
        load_tokenizer(spool.root / "tokenizer"),
        device=choose_device(device or config.device),
        report=_report,
        command=audit_file.command,
    )


def _report(entry: JournalEntry) -> None:
    attempt = entry.attempt
    _say(f"{attempt.step} {attempt.attack} / {attempt.defense}: {attempt.status.value} in {attempt.wall_s:.1f} s")


def _say(line: str) -> None:
    """Write one line to the worker's log. Never text of the batch: ids, counts and times only."""
    print(line, flush=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _be_a_good_guest(audit_file: AuditFile) -> None:
    """Yield processor and memory to the trainer as far as the system lets us."""
    import torch

    torch.set_num_threads(audit_file.config.threads)
    if not os.environ.get(PARENT_VARIABLE):
        return  # started by hand: a process of its own right
    try:
        os.nice(audit_file.config.nice)
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    except OSError:
        pass  # not Linux, or not allowed: then we are an ordinary process


def _watch_trainer(spool: Spool) -> None:
    """End this process when the trainer that started it is gone: by end of input, or by a new parent."""
    parent = os.environ.get(PARENT_VARIABLE)
    if not parent:
        return

    def leave() -> None:
        spool.orphan()
        os._exit(4)  # at once: finished attempts are in the journal, the claimed snapshot stays for another worker

    def watch_parent() -> None:
        while os.getppid() == int(parent):
            time.sleep(ORPHAN_POLL_SECONDS)
        leave()

    def watch_input() -> None:
        try:
            while os.read(0, 1):  # unbuffered: a buffered read would hold a lock that ending needs
                pass
        except OSError:
            return  # no input at all: watching the parent has to do
        leave()

    threading.Thread(target=watch_parent, daemon=True).start()
    threading.Thread(target=watch_input, daemon=True).start()
