"""The side process of an audit of rounds, which several trainers share."""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import time

import psutil

from leakaudit.capture.notify import notify
from leakaudit.capture.worker.process import SideProcess, close_input, tell
from leakaudit.capture.worker.wait import wait_for_attacks
from leakaudit.storage.parent_watch import DETACH
from leakaudit.storage.rounds_file import ROUNDS, changing_rounds
from leakaudit.storage.spool import Spool
from leakaudit.storage.spool_files import FINISHED

STARTING_SECONDS = 60.0
"""Seconds that a worker may take from its start until it holds its lock. Our choice: it imports torch before, which takes 3 to 20 s."""

_started: list[subprocess.Popen[bytes]] = []
"""Workers that may live longer than the objects that started them. This reference keeps Python from warning about them."""


class SharedSideProcess(SideProcess):
    """A worker that outlives the process that started it.

    It serves all rounds of an audit. Between two rounds it waits, and looks for the next one twice a second. It ends when the audit is
    finished, or when no process takes part any more.
    """

    def __init__(self, spool: Spool, trainer_device: str) -> None:
        """Note what to start; nothing is started.

        Args:
            spool: of the audit, as one of its processes uses it.
            trainer_device: where training computes, such as `cuda:0`.
        """
        super().__init__(spool, trainer_device=trainer_device)

    def wait_then_leave(self, seconds: float) -> None:
        """Wait for the attacks with a countdown; after that the worker continues alone."""
        self.end_training()
        if reason := wait_for_attacks(self._spool, self._works, seconds):
            self.leave_alone(f"{reason}: ")

    def leave_alone(self, why: str = "") -> None:
        """Let the worker continue without us, and say so."""
        self.detached = True
        notify(f"{why}the side process continues alone; its log is {self._spool.root.parent / 'worker.log'}")

    def _works(self) -> bool:
        """Return whether a worker is at work; start one if there is work without a worker."""
        alive = self._process is not None and self._process.poll() is None
        return alive or ((self._spool.attended() or not self._reported()) and self.ensure())

    def _reported(self) -> bool:
        """Return whether the results were written after the last round was counted."""
        last = max(
            (path.stat().st_mtime_ns for name in (FINISHED, ROUNDS) if (path := self._spool.root / name).is_file()),
            default=0,
        )
        results = self._spool.root.parent / "results.json"
        return results.is_file() and results.stat().st_mtime_ns >= last

    def _start(self) -> bool:
        """Start a worker that does not end with this process.

        If another process has just started one, nothing is started.
        """
        if not self._is_my_turn():
            return True
        started = super()._start()
        atexit.unregister(self.end_with_program)
        if self._process is not None:
            with contextlib.suppress(OSError):  # it died at once: the next call of `ensure` starts it again
                tell(self._process, DETACH)
            close_input(self._process)  # it looks for trainers in the spool, not for the end of this pipe
            _started.append(self._process)
        return started

    def _is_my_turn(self) -> bool:
        """Return whether no other process has started a worker that is still on its way."""
        with changing_rounds(self._spool.root) as rounds:
            other = rounds.worker_pid not in (0, os.getpid()) and psutil.pid_exists(rounds.worker_pid)
            if other and time.time() - rounds.worker_started < STARTING_SECONDS:
                return False
            rounds.worker_pid, rounds.worker_started = os.getpid(), time.time()
        return True
