"""A watch on the trainer that started this side process: the process ends with its trainer.

It uses the standard library only, so that it works before anything else is loaded.

Two signs tell that the trainer has ended: our input, a pipe, ends at once, unless forked children of the trainer hold its other end;
and this process has a new parent, which the next look finds. A trainer that wrote `detach` before lets us continue alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from pathlib import Path

from leakaudit.exit_codes import ExitCode

PARENT_VARIABLE = "LEAKAUDIT_PARENT_PID"
"""Environment variable of a worker that a trainer started: the trainer's process id."""
KEY_VARIABLE = "LEAKAUDIT_KEY_ON_INPUT"
"""Environment variable; not empty where the first line of the worker's input is the private key of the run."""

ORPHANED = "orphaned"
"""File in the spool: the worker exited with its trainer, so the snapshot's crash count is not raised."""

POLL_SECONDS = 0.5
"""Between two looks at the parent. Our choice: the worker of a killed trainer ends within a few of these."""

LAST_WORDS_SECONDS = 0.5
"""How long to wait for the trainer's last line after it ended. Our choice: the line is in the pipe already."""

KEY_SECONDS = 60.0
"""How long to wait for the key of the run. Our choice: the trainer sends it at once."""

PR_SET_DUMPABLE = 4
"""Linux, prctl(2): whether a crash may write this process's memory to a file, and the same user's processes may read it."""


def yield_processor(process: int, trainer: int, nice: int) -> None:
    """Give a process a lower priority than the trainer's.

    The system sets the limits; a second call changes nothing.

    Linux may group processes by session and share the processor between the groups, whatever the priorities inside them
    (sched(7), "the autogroup feature"). The side process is a session of its own, so its group gets the priority, too.

    Args:
        process: id of the side process; 0 for this one.
        trainer: id of the process that trains.
        nice: steps of priority below the trainer's, 0 to 19.
    """
    with contextlib.suppress(OSError, AttributeError):  # not allowed, or a system without
        os.setpriority(os.PRIO_PROCESS, process, min(19, os.getpriority(os.PRIO_PROCESS, trainer) + nice))
    with contextlib.suppress(OSError):  # not Linux, or without groups
        Path(f"/proc/{process or 'self'}/autogroup").write_text(str(nice), encoding="ascii")


_watch: ParentWatch | None = None


def keep_memory_private() -> None:
    """Prevent that a crash of this process writes its memory to a file.

    The memory holds the private batch and the run's key.

    There is no core file (`RLIMIT_CORE` 0); on Linux the process is not dumpable either, so that a program that collects core dumps
    gets none. Other systems offer less. Only for processes of our own: the training process is the user's.
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


def watch_parent() -> ParentWatch:
    """Return the watch on this process's trainer, made at the first call.

    It does nothing where no trainer started this process.
    """
    global _watch
    if _watch is None or _watch.parent != os.environ.get(PARENT_VARIABLE):
        _watch = ParentWatch()
    return _watch


class ParentWatch:
    """Reads what the trainer writes to our input, and ends this process with it."""

    def __init__(self) -> None:
        """Start to read and to watch, if a trainer started us."""
        self.parent = os.environ.get(PARENT_VARIABLE)
        self.spool: Path | None = None
        """Spool in which to note that we ended with the trainer; None before anything was claimed there."""
        self._lines: list[str] = []
        self._heard = threading.Condition()
        self._detached = False
        if self.parent:
            offer_memory()  # before the next line: afterwards this process may not write there
            keep_memory_private()  # before the key of the run is read
            threading.Thread(target=self._watch_parent, daemon=True).start()
            threading.Thread(target=self._listen, daemon=True).start()

    def key(self) -> tuple[str, ...]:
        """Return the private key of the run, if there is one; it is the first line."""
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
                    self._detached = "detach" in self._lines
                    self._heard.notify_all()
        except OSError:
            return  # no input: the other sign has to do
        self._leave()

    def _leave(self) -> None:
        if self._detached:
            return
        if self.spool is not None:
            with contextlib.suppress(OSError):
                (self.spool / ORPHANED).touch(mode=0o600)
        # at once: finished attempts are in the journal, and the snapshot stays for another worker
        os._exit(ExitCode.ORPHANED)
