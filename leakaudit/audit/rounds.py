"""What the worker asks about the trainers of an audit."""

from __future__ import annotations

import time

from leakaudit.storage.held_rounds import held_rounds, release
from leakaudit.storage.spool import Spool
from leakaudit.storage.spool_files import AuditFile


class Trainers:
    """The processes that give snapshots to a worker.

    An audit of steps has one, and the worker ends with it. An audit of rounds may have several, one after another. With `rounds` the
    worker waits `wait_at_end_s` for the next one; after that time it writes the results of what is finished.
    """

    def __init__(self, spool: Spool, audit: AuditFile) -> None:
        """Prepare; nothing is read."""
        self._spool = spool
        self._audit = audit
        self._rounds = audit.config.unit == "round"
        self._alone_since: float | None = None
        """When the last of them was found to have ended, on the monotonic clock; None while one is there."""

    def gone(self) -> bool:
        """Return whether no snapshot will come any more, because all of them ended."""
        if not self._spool.trainer_gone(self._audit):
            self._alone_since = None
            return False
        self._alone_since = self._alone_since or time.monotonic()
        waits = self._audit.config.rounds is not None
        return self.out_of_patience or not waits

    @property
    def out_of_patience(self) -> bool:
        """Whether the worker of an audit of rounds has been alone for `wait_at_end_s`."""
        if not self._rounds or self._alone_since is None:
            return False
        return time.monotonic() - self._alone_since > self._audit.config.wait_at_end_s

    def release_held(self) -> None:
        """Take the rounds about which nobody can say any more what was sent of them."""
        if not self._rounds or self._alone_since is None:
            return
        for folder in held_rounds(self._spool.root):
            release(folder)
