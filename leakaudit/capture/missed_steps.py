"""The count of due steps that could not be recorded when they began."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)


@dataclass
class MissedSteps:
    """Due steps that found the writer busy or the disk full.

    A step is counted when a later one begins, or at the end of the run: a step that never began is not missed.
    """

    busy: int = 0
    """Number of due steps that began while the step before was still being written."""
    too_full: int = 0
    """Number of due steps for which the spool or the disk had no room."""
    since_kept: int = 0
    """Number of due steps since the last kept one that were missed, for either reason."""
    _open: tuple[int, str] | None = field(default=None, init=False)
    """Number of a missed step that is not over yet, and why the disk had no room (empty if the writer was busy instead)."""

    @property
    def pending(self) -> bool:
        """Whether a missed step is not over yet."""
        return self._open is not None

    def miss(self, step: int, lacking: str) -> None:
        """Note that a step is not recorded.

        Args:
            step: its number, from 0.
            lacking: why the disk has no room; empty if the writer is busy.
        """
        self._open = (step, lacking)

    def count_before(self, step: int) -> None:
        """Count a missed step if it comes before this one, so that it is over."""
        if self._open is None or self._open[0] >= step:
            return
        (missed, lacking), self._open = self._open, None
        self.since_kept += 1
        if not lacking:
            self.busy += 1
            return
        if not self.too_full:
            logger.warning("step %d was not kept: %s", missed, lacking)
        self.too_full += 1
