"""A watch on this side process's trainer; the process ends with its trainer.

It uses only the standard library, so that it works before any other library is loaded.

Two signs show that the trainer has ended. First, our input, which is a pipe, ends, unless forked children of the trainer hold its other
end. Second, this process has a new parent; the watch checks this every `POLL_SECONDS`. If the trainer wrote `detach` before, this process
continues.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from leakaudit.exit_codes import ExitCode

PARENT_VARIABLE = "LEAKAUDIT_PARENT_PID"
"""Environment variable of a worker that a trainer started: the trainer's process id."""
KEY_VARIABLE = "LEAKAUDIT_KEY_ON_INPUT"
"""Environment variable; not empty if the first line of the worker's input is the private key of the run."""

MODULES_VARIABLE = "LEAKAUDIT_SYS_PATH"
"""Environment variable of a worker that a trainer started: the trainer's `sys.path` as JSON."""

FACTORIES_VARIABLE = "LEAKAUDIT_MODEL_FACTORIES"
"""Environment variable of a worker that a trainer started: the makers of models that the training vouched for, as JSON."""

DETACH = "detach"
"""Line after which this process continues when its trainer has ended."""

ORPHANED = "orphaned"
"""File in the spool that says that the worker ended with its trainer, so the snapshot's crash count is not increased."""

POLL_SECONDS = 0.5
"""Seconds between two checks of the parent. Our choice: the worker of a killed trainer ends after a few such checks."""

LAST_RESULTS_SECONDS = 20.0
"""Most seconds that this process may write results after the trainer ended. Our choice: an idle machine takes one or two, a busy one
several times as long, and clusters wait 30 s until they kill the processes of a job."""

LAST_WORDS_SECONDS = 0.5
"""Seconds to wait for the trainer's last line after it ended. Our choice: the line is already in the pipe."""

KEY_SECONDS = 60.0
"""Seconds to wait for the key of the run. Our choice: the trainer sends it immediately."""

PR_SET_DUMPABLE = 4
"""Option of prctl(2) on Linux: whether a crash may write this process's memory to a file, and whether the same user's processes may read
it."""


def yield_processor(process: int, trainer: int, nice: int) -> None:
    """Give a process a lower priority than the trainer's.

    The system limits the priority. A second call has no further effect.

    Linux may group processes by session and share the processor between the groups, without regard to the priorities inside them
    (sched(7), "the autogroup feature"). The side process has its own session, so its group gets the lower priority, too. A session that it
    shares with other processes keeps its priority.

    Args:
        process: id of the side process; 0 for this one.
        trainer: id of the process that trains.
        nice: steps of priority below the trainer's, 0 to 19.
    """
    with contextlib.suppress(OSError, AttributeError):  # not allowed, or a system without priorities
        os.setpriority(os.PRIO_PROCESS, process, min(19, os.getpriority(os.PRIO_PROCESS, trainer) + nice))
    with contextlib.suppress(OSError, AttributeError):  # not Linux, or Linux without groups
        if os.getsid(process) == (process or os.getpid()):
            Path(f"/proc/{process or 'self'}/autogroup").write_text(str(nice), encoding="ascii")


_watch: ParentWatch | None = None


def find_trainers_modules() -> None:
    """Let this side process find modules where its trainer does.

    A model may be built by the user's own code. The trainer's folders come after the standard library, because one of them may hold a file
    with the name of a standard module; `PYTHONPATH` comes before it, as in the trainer. Without a trainer nothing changes.
    """
    theirs = json.loads(os.environ.get(MODULES_VARIABLE, "[]"))
    standard = {Path(os.__file__).parent, *(Path(entry) for entry in sys.path if entry.endswith("lib-dynload"))}
    first = max((index for index, entry in enumerate(sys.path, start=1) if Path(entry) in standard), default=0)
    sys.path[:] = dict.fromkeys([*sys.path[:first], *theirs, *sys.path[first:]])


def keep_memory_private() -> None:
    """Prevent that a crash of this process writes its memory to a file.

    The memory holds the private batch and the run's key.

    It forbids a core file (`RLIMIT_CORE` 0). On Linux it also makes the process not dumpable, so that a program that collects core dumps
    gets none. Other systems protect less. Only our own processes may call it: the training process belongs to the user.
    """
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def offer_memory() -> None:
    """Ask the system to end this process first when memory runs out."""
    with contextlib.suppress(OSError):  # not Linux
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def charge_nobody(spool: Path) -> None:
    """Note in a spool that neither a snapshot nor an attempt ended its worker."""
    with contextlib.suppress(OSError):
        (spool / ORPHANED).touch(mode=0o600)


def watch_parent() -> ParentWatch:
    """Return the watch on this process's trainer; the first call creates it.

    If no trainer started this process, the watch does nothing.
    """
    global _watch
    if _watch is None or _watch.parent != os.environ.get(PARENT_VARIABLE):
        _watch = ParentWatch()
    return _watch


class ParentWatch:
    """Reader of the trainer's lines that ends this process with the trainer."""

    def __init__(self) -> None:
        """Start to read and to watch, if a trainer started this process."""
        self.parent = os.environ.get(PARENT_VARIABLE)
        self.spool: Path | None = None
        """Spool that gets the file `ORPHANED` when this process ends with the trainer; None before a spool is used."""
        self.write_results: Callable[[], None] | None = None
        """Writes the results of what is finished when this process ends with the trainer, while other threads still work; None where there
        is nothing to write."""
        self._leaving = threading.Lock()
        self._lines: list[str] = []
        self._heard = threading.Condition()
        self._detached = False
        if self.parent:
            offer_memory()  # must come first: after the next line this process may not write there
            keep_memory_private()  # before the key of the run is read
            threading.Thread(target=self._watch_parent, daemon=True).start()
            threading.Thread(target=self._listen, daemon=True).start()

    def key(self) -> tuple[str, ...]:
        """Return the private key of the run, the first line, or an empty tuple."""
        if not self.parent or not os.environ.get(KEY_VARIABLE):
            return ()
        with self._heard:
            self._heard.wait_for(lambda: bool(self._lines), timeout=KEY_SECONDS)
            return tuple(self._lines[:1])

    def _watch_parent(self) -> None:
        while os.getppid() == int(self.parent or 0):
            time.sleep(POLL_SECONDS)
        with self._heard:
            self._heard.wait_for(lambda: self._detached, timeout=LAST_WORDS_SECONDS)
        self._leave()

    def _listen(self) -> None:
        text = b""
        try:
            while piece := os.read(0, 4096):  # unbuffered: a buffered read would hold a lock that ending needs
                text += piece
                *complete, text = text.split(b"\n")
                with self._heard:
                    self._lines += [line.decode("ascii", "replace") for line in complete]
                    self._detached = DETACH in self._lines
                    self._heard.notify_all()
        except OSError:
            return  # no input: only the other sign can be used
        self._leave()

    def _leave(self) -> None:
        if self._detached or not self._leaving.acquire(blocking=False):
            return
        if self.spool is not None:
            charge_nobody(self.spool)
        if self.write_results is not None:
            yield_processor(0, os.getppid(), 0)  # no trainer needs the processor, and the time is short
            # the first thread may be in a long computation, so it cannot be asked to stop
            writer = threading.Thread(target=self.write_results, daemon=True)
            writer.start()
            writer.join(LAST_RESULTS_SECONDS)
        # no cleanup is needed: finished attempts are in the journal, and the snapshot stays for another worker
        os._exit(ExitCode.ORPHANED)
