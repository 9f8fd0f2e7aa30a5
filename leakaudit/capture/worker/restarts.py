"""The decision whether a side process that ended is started again."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from leakaudit.exit_codes import ExitCode
from leakaudit.storage.snapshot_queue import MAX_CRASHES

logger = logging.getLogger(__name__)

RESTARTS = 2
"""How often a dead worker is started again. Our choice: two deaths may be chance, three are a bug."""

THROUGH_CODES = (ExitCode.PASS, ExitCode.INTERRUPTED)
"""Exit codes of a worker that is done, or was asked to stop; it is not started again."""
RETRY_SECONDS = 60.0
"""Seconds before a worker that could not write is started again. Our choice: checkpoints that fill a disk are cleaned up in minutes."""


@dataclass
class Restarts:
    """The counts of how workers of one run ended."""

    deaths: int = 0
    """Number of workers that died. Workers that could not write (`ExitCode.ERROR`) and the first `MAX_CRASHES` deaths over each snapshot
    or attempt are not counted."""
    _deaths_over: dict[str, int] = field(default_factory=dict, init=False)
    """Snapshot, or snapshot with attempt -> workers that died over it."""
    _retry_at: float | None = field(default=None, init=False)
    """When a worker that could not write is started again, on the monotonic clock; None where that is not known yet."""

    def started(self) -> None:
        """Note that a worker was started."""
        self._retry_at = None

    def allow_retry(self) -> None:
        """Let a worker that could not write be started again at once."""
        self._retry_at = 0.0

    def through(self, code: int | None) -> bool:
        """Return whether a worker that ended by itself is not started again, or not yet.

        Args:
            code: its exit code; None where none was started.
        """
        if code == ExitCode.ERROR:  # it could not write; later there may be room
            if self._retry_at is None:
                self._retry_at = time.monotonic() + RETRY_SECONDS
            return time.monotonic() < self._retry_at
        return code in (*THROUGH_CODES, ExitCode.USAGE)

    def allowed(self, code: int, at_work_on: str) -> bool:
        """Count the death of a worker; return whether another one may be started.

        If workers died `MAX_CRASHES` times over a snapshot or an attempt, the next worker leaves that out. So a few deadly snapshots or
        attempts do not end the audit of the others.

        Args:
            code: its exit code.
            at_work_on: the snapshot that it was attacking, with the attempt, as `Spool.abandoned` returns it; empty if none.
        """
        over = self._deaths_over[at_work_on] = self._deaths_over.get(at_work_on, 0) + 1 if at_work_on else 0
        if 0 < over <= MAX_CRASHES:
            logger.warning("the audit's side process died while it attacked %s; starting it again", at_work_on)
            return True
        if code == ExitCode.ERROR:
            return True
        self.deaths += 1
        if self.deaths > RESTARTS:
            return False
        logger.warning("the audit's side process died; starting it again (%d of %d)", self.deaths, RESTARTS)
        return True
