"""Small tasks that run one after another in a thread beside training."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from leakaudit.errors import LeakAuditError, type_and_place

logger = logging.getLogger(__name__)


class BackgroundTasks:
    """A queue of tasks, and the thread that runs them in order.

    A task that raises is logged; the next ones run. The thread is a daemon: a stuck disk must not keep a finished program alive.
    """

    def __init__(self) -> None:
        """Prepare; the first task starts the thread."""
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, task: Callable[[], None]) -> None:
        """Run a task when those before it are done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="leakaudit-rounds", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def wait(self, patience_s: float) -> bool:
        """Wait at most so many seconds for the tasks so far; return whether they are done."""
        if self._thread is None:
            return True
        done = threading.Event()
        self._tasks.put(done.set)
        return done.wait(patience_s)

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            try:
                task()
            except LeakAuditError as error:
                logger.warning("leakaudit: %s", error)
            except Exception as error:
                logger.warning("leakaudit: a task beside training ended with a %s", type_and_place(error))
