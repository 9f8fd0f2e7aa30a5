"""The side process as the trainer sees it: started when there is something to attack, watched, waited for, ended.

No framework is imported here, nor torch: what runs in the training process between its steps stays small.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import leakaudit
from leakaudit.spool import Spool

logger = logging.getLogger(__name__)

RESTARTS = 2
"""How often a dead worker is started again: twice is bad luck, three times is a bug."""

FINAL_CODES = (0, 5, 130)
"""Exit codes after which the side process is not started again: through, out of disk, or asked to stop."""

GRACE_SECONDS = 60.0
"""How long a side process that is told to stop may take to write its report."""

LEAKED_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
LEAKED_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_", "PL_")
"""Environment of a distributed launch: with it the side process would wait for peers that never come."""


class SideProcess:
    """`python -m leakaudit worker SPOOL`: started when there is something to attack, and again if it dies.

    Only the training thread calls this.
    """

    def __init__(self, spool: Spool, log: Path, threads: int) -> None:
        """Note what to start; nothing is started."""
        self._spool = spool
        self._log = log
        self._threads = threads
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._owner = os.getpid()
        self.given_up = False

    def ensure(self) -> bool:
        """Start the worker, or start it again if it died. Cheap where there is nothing to do.

        Returns:
            Whether one is at work.
        """
        if self._process is not None and self._process.poll() is None:
            return True
        if self.given_up or self._done():
            return False
        if self._process is None and self._spool.attended():
            return True  # somebody started one by hand
        if self._starts > RESTARTS:
            self.given_up = True
            say(f"the side process died {self._starts} times: see {self._log}; no more steps are kept")
            return False
        if self._starts:
            logger.warning("the audit's side process died; starting it again (%d of %d)", self._starts, RESTARTS)
        self._start()
        return True

    def wait(self, seconds: float, journal: Path) -> None:
        """Wait with a visible countdown until the worker is through; after that, let it write what it has.

        Ctrl-C ends the waiting, a second one the worker.
        """
        deadline = time.monotonic() + seconds
        try:
            with _countdown() as show:
                while time.monotonic() < deadline:
                    if not self.ensure():
                        return
                    patience = deadline - time.monotonic()
                    show(
                        f"waiting for the audit: {_lines(journal)} attempts done, {patience:.0f} s of patience left "
                        "(Ctrl-C: do not wait)"
                    )
                    time.sleep(0.2)
            reason = f"out of patience after {seconds:g} s (`wait_at_end_s`)"
        except KeyboardInterrupt:
            reason = "not waiting any longer"
        say(f"{reason}: the report covers what is finished")
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=GRACE_SECONDS)

    def stop(self) -> None:
        """Leave no worker behind, whatever ended the training; what it has finished is on the disk."""
        atexit.unregister(self.stop)
        if (
            self._process is None or os.getpid() != self._owner
        ):  # a fork of the trainer must not end the trainer's audit
            return
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _done(self) -> bool:
        return self._process is not None and self._process.returncode in FINAL_CODES

    def _start(self) -> None:
        atexit.register(self.stop)
        self._starts += 1
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0), 0o600)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "leakaudit", "worker", str(self._spool.root)],
                stdin=subprocess.PIPE,  # its end tells the worker that we are gone
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in the terminal reaches the trainer only
                env=clean_environment(self._threads),
            )
        finally:
            os.close(log)


def say(line: str) -> None:
    """Tell the user one thing on stderr; loggers at their default level would swallow it."""
    print(f"leakaudit: {line}", file=sys.stderr, flush=True)


@contextmanager
def _countdown() -> Iterator[Callable[[str], None]]:
    """Show a line that changes in place on a terminal, and a plain line every ten seconds elsewhere."""
    last = 0.0
    tty = sys.stderr.isatty()

    def show(line: str) -> None:
        nonlocal last
        if tty:
            print(f"\r\033[Kleakaudit: {line}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - last >= 10.0:
            last = time.monotonic()
            say(line)

    try:
        yield show
    finally:
        if tty:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def by_hand(spool: Spool) -> str:
    """Return the command that goes on with a spool."""
    return f"`leakaudit worker {shlex.quote(str(spool.root))}`"


def _lines(path: Path) -> int:
    """Return how many complete lines a file has; none if it is not there."""
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0


def clean_environment(threads: int) -> dict[str, str]:
    """Return the environment of the side process: nothing of a distributed launch, few threads, no hub."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in LEAKED_VARIABLES and not key.startswith(LEAKED_PREFIXES)
    }
    package_root = str(Path(leakaudit.__file__).absolute().parent.parent)
    paths = [package_root, environment.get("PYTHONPATH", "")]
    return environment | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "LEAKAUDIT_PARENT_PID": str(os.getpid()),
    }
