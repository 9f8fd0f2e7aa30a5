"""The writer of kept steps, in a thread of its own, and its counters."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from leakaudit.capture.boundary import entry
from leakaudit.capture.recording.kept_step import KeptStep
from leakaudit.errors import LeakAuditError, NonFiniteUpdateError

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0
"""How long the end of training waits for the writer. Our choice: a disk that takes longer for one snapshot is stuck."""


@dataclass
class Counters:
    """The counters of the recorder, for the last line of the log and the report."""

    kept: int = 0
    not_finite: int = 0
    failed: int = 0
    """Steps that were due and could not be kept: a full disk, an empty batch, an optimizer without gradients."""
    reason: str = ""
    """Why the first of them was not kept."""
    blocked_s: float = 0.0
    """Seconds of the training thread spent in the recorder."""
    writer_s: float = 0.0
    """Seconds of the writer's thread."""
    written: int = 0
    """Bytes on the disk, of all kept steps."""


class BackgroundWriter:
    """A writer that passes one step at a time to a function, in a thread."""

    def __init__(self, write: Callable[[KeptStep], None], failed: Callable[[Exception], None]) -> None:
        """Prepare.

        Args:
            write: called with each kept step, mostly in the writer's thread.
            failed: called with an exception of `write` that is not an error of ours.
        """
        self.write = write
        self._fail = failed
        self.counters = Counters()
        self.thread: threading.Thread | None = None
        """Thread of the last step; None before the first one."""

    def begin(self, kept: KeptStep) -> None:
        """Write a step in the background."""
        # A daemon: a stuck disk must not keep the finished training process alive. `Recorder.remove` waits for the thread.
        self.thread = threading.Thread(target=self.write_now, args=(kept,), name="leakaudit-writer", daemon=True)
        self.thread.start()

    @entry
    def write_now(self, kept: KeptStep) -> None:
        """Write a step in this thread; count it, or say why it was not kept."""
        start = time.perf_counter()
        try:
            kept.ready()
            kept.check_content()
            self.write(kept)
            self.counters.kept += 1
            self.counters.written += kept.bytes + (kept.frozen.bytes if kept.frozen and self.counters.kept == 1 else 0)
        except NonFiniteUpdateError:
            self.counters.not_finite += 1
            logger.warning("step %d was not kept: its update is not finite", kept.step)
        except LeakAuditError as error:
            self.not_kept(kept.step, error)
        finally:
            self.counters.writer_s += time.perf_counter() - start

    def not_kept(self, step: int, error: LeakAuditError) -> None:
        """Count a step that could not be kept, and warn of the first one."""
        self.counters.failed += 1
        self.counters.reason = self.counters.reason or str(error)
        # A disk that is full now is full at the next step as well, so only the first step is worth a warning.
        level = logging.WARNING if self.counters.failed == 1 else logging.DEBUG
        logger.log(level, "step %d was not kept: %s", step, error)

    def removed(self, step: int, error: LeakAuditError) -> None:
        """Count a step that was written and removed again, and say why."""
        self.counters.kept -= 1
        self.counters.failed += 1
        logger.warning(
            "step %d was written and removed again, because it is not what the client sends; no more steps are kept: %s",
            step,
            error,
        )

    def blocked_since(self, start: float) -> None:
        """Count the seconds of the training thread since it entered the recorder."""
        self.counters.blocked_s += time.perf_counter() - start

    def writing(self) -> bool:
        """Return whether a kept step is still being written."""
        return self.thread is not None and self.thread.is_alive()

    def wait(self, patience_s: float = PATIENCE_SECONDS) -> bool:
        """Wait at most so many seconds for the writer; return whether it is done."""
        if self.thread is not None:
            self.thread.join(patience_s)
        return not self.writing()
