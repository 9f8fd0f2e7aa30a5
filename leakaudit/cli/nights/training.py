"""The training of a night, as a child process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from leakaudit.cli.common import say
from leakaudit.config.audit import NIGHT_VARIABLE
from leakaudit.config.duration import length_of
from leakaudit.errors import SnapshotError
from leakaudit.files.private_files import open_to_lock

if TYPE_CHECKING:
    from leakaudit.config.nightly import TrainingSection

OUTPUT = "training.log"
"""File in the night's folder with what the training printed."""

GRACE_SECONDS = 30.0
"""Seconds between SIGTERM and SIGKILL, as clusters give."""

DONE = "done"
"""File that says that the training has ended well; a later start of the night does not run it again."""

RUNNING = "running"
"""File with the process id of the training, which the training keeps locked while it runs, even if the night is killed."""

AUDIT = "audit"
"""Folder for what the callback keeps."""


class TrainingFailedError(SnapshotError):
    """The training of a night gave no steps."""

    def __init__(self, reason: str, output: Path) -> None:
        """Store the reason, a clause that the history may show."""
        super().__init__(f"{reason}; its output is in {output}")
        self.reason = reason


def train(section: TrainingSection, folder: Path, output: Path, deadline: float) -> Path:
    """Run the training, unless an earlier start of the night has.

    The callback keeps its steps and attacks nothing itself. A training that a killed start of the night left running is ended first.

    Args:
        section: command, folder and time limit.
        folder: for the kept steps and for what a later start must know.
        output: file for what the training prints.
        deadline: `time.monotonic` at which it must have ended.

    Returns:
        The folder with the kept steps.

    Raises:
        TrainingFailedError: it cannot be started, fails, takes too long, or keeps nothing.
        SnapshotError: the training of an earlier start cannot be ended.
        OSError: a file cannot be written.
    """
    spool = folder / AUDIT
    if (folder / DONE).exists():
        return spool
    folder.mkdir(mode=0o700, exist_ok=True)
    running = open_to_lock(folder / RUNNING)
    try:
        _end_earlier(running)
        shutil.rmtree(spool, ignore_errors=True)
        say(f"training: its output is in {output}")
        limit = min(length_of(section.time_limit).total_seconds(), deadline - time.monotonic())
        child = _start(section, spool, output, running)
        os.pwrite(running, f"{child.pid:<20}".encode(), 0)
        try:
            code = child.wait(timeout=max(0.0, limit))
        except subprocess.TimeoutExpired:
            raise TrainingFailedError(f"the training took longer than its limit of {limit:.0f} s", output) from None
        finally:
            _end(child)
    finally:
        os.close(running)
    if code:
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise TrainingFailedError(f"the training failed ({ended})", output)
    if not any(spool.glob("**/snapshot.json")):
        raise TrainingFailedError("the training kept no step; it needs the callback of leakaudit, attached", output)
    (folder / DONE).touch(mode=0o600)
    return spool


def _start(section: TrainingSection, spool: Path, output: Path, running: int) -> subprocess.Popen[bytes]:
    """Start the training; it inherits the locked file.

    Raises:
        TrainingFailedError: it cannot be started.
        OSError: its output cannot be written.
    """
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    try:
        return subprocess.Popen(
            section.command,
            cwd=section.folder,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=subprocess.STDOUT,
            env={**os.environ, NIGHT_VARIABLE: str(spool.absolute())},
            start_new_session=True,
            pass_fds=(running,),
        )
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise TrainingFailedError(f"the training cannot be started ({why})", output) from None
    finally:
        os.close(descriptor)


def _end_earlier(running: int) -> None:
    """Take the lock; end the training of a killed start that still holds it.

    Raises:
        SnapshotError: the earlier training does not end.
    """
    for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, GRACE_SECONDS)):
        if _take(running):
            return
        text = os.pread(running, 20, 0).strip()
        if text.isdigit():
            say(f"the training of an earlier start still runs (process {int(text)}): it is ended first")
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(int(text), number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if _take(running):
                return
            time.sleep(0.2)
    raise SnapshotError("the training of an earlier start of the night still runs and cannot be ended; end it first")


def _take(descriptor: int) -> bool:
    from leakaudit.storage.locks import try_lock

    try:
        return try_lock(descriptor)
    except OSError:  # a file system without locks
        return True


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a training that still runs, with its own children."""
    if child.poll() is not None:
        return
    for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=seconds)
            return
