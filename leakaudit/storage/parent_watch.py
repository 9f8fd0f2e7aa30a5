"""Ties a side process to the trainer that started it.

It uses nothing but the standard library, so that it holds before anything is loaded.

Two things tell that the trainer is gone: the end of the pipe that is our input, at once, unless its forked children hold the other
end, too; and a new parent, at the next look. It may have said `detach` before: then we go on.
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
"""Environment of a worker that a trainer started: the process whose death ends it."""
KEY_VARIABLE = "LEAKAUDIT_KEY_ON_INPUT"
"""Not empty: the first line of the worker's input is the private key of the run."""

ORPHANED = "orphaned"
"""File that a worker leaves in the spool when it goes because its trainer is gone: no death to be held against a snapshot."""

POLL_SECONDS = 0.5
"""Between two looks at the parent: a killed trainer's worker is gone within a few of these."""

LAST_WORDS_SECONDS = 0.5
"""How long after the trainer's death its last line is waited for; what it wrote is in the pipe already."""

KEY_SECONDS = 60.0
"""How long the key of the run is waited for; the trainer sends it at once."""

PR_SET_DUMPABLE = 4
"""Linux, prctl(2): whether a crash of this process may write its memory to a file, and others of the same user may look into it."""


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
    """See to it that a crash of this process leaves no copy of its memory: it holds the private batch and the run's key.

    No core file (`RLIMIT_CORE` 0) and, on Linux, not dumpable at all, which holds against a program that collects core dumps, too.
    Elsewhere, and where it is not allowed, as far as it goes. Only for processes of our own: the training process is the user's.
    """
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def offer_memory() -> None:
    """Let this process be the first to be ended when memory runs out, where the system lets us."""
    with contextlib.suppress(OSError):  # not Linux
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def watch_parent() -> ParentWatch:
    """Return what ties this process to its trainer, made at the first call; it holds nothing where nobody started us."""
    global _watch
    if _watch is None or _watch.parent != os.environ.get(PARENT_VARIABLE):
        _watch = ParentWatch()
    return _watch


class ParentWatch:
    """What the trainer says through the pipe, and whether it lives."""

    def __init__(self) -> None:
        """Begin to listen and to look, if a trainer started us."""
        self.parent = os.environ.get(PARENT_VARIABLE)
        self.spool: Path | None = None
        """Where to note that we went with the trainer; None before anything was claimed there."""
        self._lines: list[str] = []
        self._heard = threading.Condition()
        self._detached = False
        if self.parent:
            offer_memory()  # before the next line: a process that is not dumpable may not write there any more
            keep_memory_private()  # before the key of the run is read
            threading.Thread(target=self._watch_parent, daemon=True).start()
            threading.Thread(target=self._listen, daemon=True).start()

    def key(self) -> tuple[str, ...]:
        """Return the private key of the run, if there is one; it comes first of all."""
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
            return  # no input at all: watching the parent has to do
        self._leave()

    def _leave(self) -> None:
        if self._detached:
            return
        if self.spool is not None:
            with contextlib.suppress(OSError):
                (self.spool / ORPHANED).touch(mode=0o600)
        # at once: finished attempts are in the journal, and the snapshot stays for another worker
        os._exit(ExitCode.ORPHANED)
