"""Starts, watches, waits for and ends the side process.

No framework is imported here, nor torch: what runs in the training process between its steps stays small.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import leakaudit
from leakaudit.capture.outcome import outcome
from leakaudit.capture.worker_progress import Progress
from leakaudit.config.audit import AuditConfig
from leakaudit.exit_codes import ExitCode
from leakaudit.files.private_files import open_to_append
from leakaudit.results.wording import duration
from leakaudit.storage.parent_watch import KEY_VARIABLE, PARENT_VARIABLE, yield_processor
from leakaudit.storage.snapshot_queue import MAX_CRASHES
from leakaudit.storage.spool import DEVICE_VARIABLE, Spool

logger = logging.getLogger(__name__)

RESTARTS = 2
"""How often a dead worker is started again: twice is bad luck, three times is a bug."""

THROUGH_CODES = (ExitCode.PASS, ExitCode.INTERRUPTED)
"""Exit codes after which the side process is not started again: it is done, or was asked to stop."""
RETRY_SECONDS = 60.0
"""Before a side process that could not write is tried again. Our choice: checkpoints that fill a disk are cleaned up in minutes."""

LOG_LINE_SECONDS = 30.0
"""Off a terminal, how far the attacks have come is one line per this many seconds: enough to see it live in a log."""

GRACE_SECONDS = 60.0
"""How long a side process that is told to stop may take to write its report."""

DISMISSED_SECONDS = 10.0
"""How long the end of the program waits for a side process that was told to stop some time before."""

LEAKED_VARIABLES = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}
)
LEAKED_PREFIXES = (
    "TORCHELASTIC_",
    "ACCELERATE_",
    "FSDP_",
    "PL_",
    "SLURM_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "MV2_",
    "DEEPSPEED_",
)
"""Environment of a distributed launch: with it the side process would wait for peers that never come."""

INTERPRETER_VARIABLES = frozenset({"PYTHONINSPECT", "PYTHONSTARTUP", "PYTHONPROFILEIMPORTTIME", "PYTHONBREAKPOINT"})
"""With the first of these the side process would end in a prompt that reads its input, and never go."""

LOUD_VARIABLES = frozenset(
    {"TORCH_LOGS", "TORCH_LOGS_OUT", "TORCH_TRACE", "TORCH_COMPILE_DEBUG", "HF_DEBUG", "PYTHONVERBOSE"}
)
"""They let libraries write what they compute into logs and folders."""

SECRET_ENDINGS = (
    "_TOKEN",
    "_KEY",
    "_KEY_ID",
    "_SECRET",
    "_PASSWORD",
    "_PASSWD",
    "_CREDENTIALS",
    "_TOKENS",
    "_IDENTITY",
)
"""Ends of the names of variables that hold credentials. The side process needs none: it reads a folder and writes into it."""

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
    "MLFLOW_TRACKING_URI": "",
    "DISABLE_TELEMETRY": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""Threads that have nothing to do sleep, because the trainer can use the core that they would wait on. Nothing is looked up in a hub, nobody's experiment tracking gets a second run, and no library writes a model's configuration or
what it computes into the log."""

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
)

_detached: list[subprocess.Popen[bytes]] = []
"""Side processes that go on without us; kept so that nobody takes them for forgotten ones."""


class SideProcess:
    """`python -m leakaudit worker SPOOL`: started when there is something to attack, and again if it dies.

    Only the training thread calls this. What it is told goes through its standard input: first the key of the run where snapshots
    are encrypted, then `detach` where it is to outlive the trainer; the end of the input means that the trainer is gone.
    """

    def __init__(self, spool: Spool, *, trainer_device: str = "cpu", model: Any = None) -> None:
        """Note what to start; nothing is started.

        Args:
            spool: as the trainer made it.
            trainer_device: where training computes, such as `cuda:0`; the side process looks for another place.
            model: the live one, for `schedule: inline`.
        """
        self._spool = spool
        self._log = spool.root.parent / "worker.log"
        self._trainer_device = trainer_device
        self._model = model
        self._here: Any = None
        """Attacks in this process, where the configuration asks for them."""
        self._process: subprocess.Popen[bytes] | None = None
        self._deaths = 0
        """Of workers, apart from those that are charged to a snapshot."""
        self._deaths_over: dict[str, int] = {}
        """Snapshot -> workers that died while they attacked it."""
        self._retry_at: float | None = None
        """When a worker that could not write is tried again, on the monotonic clock; None where that is not known yet."""
        self._owner = os.getpid()
        self._training = True
        self._dismissed = False
        self.detached = False
        """Whether the side process goes on without us."""
        self.given_up = False
        self.why_given_up = ""
        """In a clause."""

    @property
    def pid(self) -> int | None:
        """Process id of the side process; None where none was started."""
        return None if self._process is None else self._process.pid

    def begin(self) -> None:
        """Start the worker before there is anything to attack.

        It imports torch for seconds, and a short training is over by then.
        """
        if self._spool.config.schedule == "beside":
            self.ensure()

    def ensure(self) -> bool:
        """Start the worker, or start it again if it died. Cheap where there is nothing to do.

        Returns:
            Whether one is at work.
        """
        schedule = self._spool.config.schedule
        if schedule == "inline":
            self._attack_here()
        if schedule == "inline" or (self._training and schedule == "deferred"):
            return False
        if self._process is not None and self._process.poll() is None:
            return True
        if self.given_up or self._done():
            return False
        if self._spool.attended():
            return True  # somebody started one by hand
        if not self._may_start_again():
            return self._give_up(f"the side process died {self._deaths} times")
        return self._start()

    def _may_start_again(self) -> bool:
        """Count the death of a worker against the snapshot that it was attacking, or else against the worker.

        A snapshot over which workers died `MAX_CRASHES` times is set aside by the next one, so a few deadly snapshots cost their own
        audit only.
        """
        if self._process is None:
            return True
        snapshot = self._spool.abandoned()
        over = self._deaths_over[snapshot] = self._deaths_over.get(snapshot, 0) + 1 if snapshot else 0
        if 0 < over <= MAX_CRASHES:
            logger.warning("the audit's side process died over snapshot %s; starting it again", Path(snapshot).stem)
            return True
        if self._process.returncode == ExitCode.ERROR:
            return True
        self._deaths += 1
        if self._deaths > RESTARTS:
            return False
        logger.warning("the audit's side process died; starting it again (%d of %d)", self._deaths, RESTARTS)
        return True

    def wait_or_detach(self) -> None:
        """Do what the configuration asks for at the end of training: wait with a countdown, detach, or leave the rest to others.

        Raises nothing; a Ctrl-C ends the waiting, not the program.
        """
        self._training, self._retry_at = False, 0.0  # now is the time to try again, whatever went wrong
        self._let_it_hurry()
        config = self._spool.config
        if config.schedule == "inline":
            self._attack_here()
            self._here.finish()
        elif config.at_end == "leave":
            if self._spool.waiting() and self._process is not None:
                notify(
                    f"not waiting for the attacks (`at_end: leave`): {by_hand(self._spool)} runs those that are left"
                )
            self._end_early("")
        elif config.at_end == "detach":
            self._detach()
        else:
            self._wait(config.wait_at_end_s)

    def continue_detached(self) -> str:
        """See to it that what was kept is attacked after training was broken off, without waiting for it.

        Returns:
            What becomes of the kept steps, in a clause.
        """
        self._training, self._retry_at = False, 0.0  # now is the time to try again, whatever went wrong
        config = self._spool.config
        if config.schedule == "inline":
            if self._here is not None:
                self._here.finish()
            return "what was attacked by then is in the report"
        later = f"{by_hand(self._spool)} goes on with them"
        if config.at_end == "leave":
            self._end_early("")
            return later
        if config.at_end == "detach":
            return f"the side process goes on with them alone: {self._log}" if self._detach() else later
        if not self.ensure():
            return later
        return f"the side process goes on with them for as long as this process lives; later, {later}"

    def terminate(self) -> None:
        """Ask the worker to write what it has and go, without waiting for it: training goes on, and its audit does not."""
        self.given_up = self._dismissed = True
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def outcome(self) -> list[str]:
        """Return the verdict and where the report is, a line each.

        If there is none, the lines say why. Call it after `wait_or_detach`.
        """
        report = self._log.with_name("report.html")
        if self.detached:
            return [f"report to come: {report}"]
        if report.is_file():
            verdict, *unchecked = outcome(report.parent) or ("no verdict",)
            return [f"{verdict}; report: {report}", *unchecked]
        return [f"no report: see {self._log}" if self._log.exists() else "no report yet"]

    def stop(self) -> None:
        """Leave no worker behind, whatever ended the training; what it has finished is on the disk."""
        atexit.unregister(self.stop)
        if self._process is None or os.getpid() != self._owner:
            return  # a fork of the trainer must not end the trainer's audit
        if self._dismissed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=DISMISSED_SECONDS)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._hang_up()

    def _attack_here(self) -> None:
        """Attack what waits in this process, which waits for it."""
        if self._here is None:
            from leakaudit.audit.inline import InlineAudit

            notify(
                "attacks run in the training process, which waits for them (`schedule: inline`); a model that says how it is made "
                "(`leakaudit.models.factories.rebuilt_by`) can be attacked beside training"
            )
            self._here = InlineAudit(self._spool, self._model)
        self._here.catch_up()

    # ------------------------------------------------------------------ the end of training

    def _wait(self, seconds: float) -> None:
        """Wait with a visible countdown until the worker is through; after that, let it write what it has."""
        deadline = time.monotonic() + seconds
        progress = Progress(self._spool)
        try:
            with _countdown() as show:
                while self.ensure():
                    patience = deadline - time.monotonic()
                    if patience <= 0:
                        break
                    show(_waiting_line(*progress.look(), patience))
                    time.sleep(0.2)
                else:
                    return
            reason = f"out of patience after {seconds:g} s (`wait_at_end_s`)"
        except KeyboardInterrupt:
            reason = "not waiting any longer"
        self._end_early(f"{reason}: the report covers what is finished")

    def _let_it_hurry(self) -> None:
        """Give the worker the processor that training needs no more.

        Not every system allows it.
        """
        if self._process is not None and self._process.poll() is None:
            yield_processor(self._process.pid, os.getpid(), 0)

    def _end_early(self, why: str) -> None:
        """Ask the worker to write its report and go; a Ctrl-C meanwhile ends it at once."""
        if why:
            notify(why)
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=GRACE_SECONDS)
        except KeyboardInterrupt:
            notify(f"the side process ended without a report; {by_hand(self._spool)} writes it")
            self.stop()

    def _detach(self) -> bool:
        """Let the worker go on when we are gone, whatever becomes of us.

        Returns:
            Whether there is one.
        """
        if not self.ensure():
            return False
        if self._process is None:
            return True  # started by hand: it never depended on us
        try:
            self._tell("detach")
        except OSError:
            notify(f"the side process has died; {by_hand(self._spool)} goes on with what it left")
            return False
        atexit.unregister(self.stop)
        self._hang_up()
        _detached.append(self._process)
        notify(f"the side process (process {self._process.pid}) goes on alone; its log is {self._log}")
        self._process, self.detached = None, True
        self.given_up = True  # nothing more is started from here
        return True

    # ------------------------------------------------------------------ the process

    def _done(self) -> bool:
        """Return whether the worker that ended is not to be started again, or not yet."""
        code = None if self._process is None else self._process.returncode
        if code is not None and self._spool.abandoned():
            return False  # one that ends by itself leaves nothing claimed, whatever its code
        if code == ExitCode.USAGE:
            self._give_up("the side process cannot work like this")
        if code == ExitCode.ERROR:  # it could not write; later there may be room
            if self._retry_at is None:
                self._retry_at = time.monotonic() + RETRY_SECONDS
            return time.monotonic() < self._retry_at
        return code in (*THROUGH_CODES, ExitCode.USAGE)

    def _give_up(self, why: str) -> bool:
        self.given_up = True
        self.why_given_up = f"{why}: see {self._log}"
        notify(f"{self.why_given_up}; no more steps are kept")
        return False

    def _start(self) -> bool:
        atexit.register(self.stop)
        self._retry_at = None
        self._hang_up()
        keys = self._spool.keys
        environment = clean_environment(self._spool.config.threads) | {
            PARENT_VARIABLE: str(os.getpid()),
            DEVICE_VARIABLE: self._trainer_device,
            KEY_VARIABLE: "1" if keys and keys.identity else "",
        }
        try:
            log = open_to_append(self._log)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "leakaudit", "worker", str(self._spool.root)],
                    stdin=subprocess.PIPE,  # its end tells the worker that we are gone
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a Ctrl-C in the terminal reaches the trainer only
                    env=environment,
                )
            finally:
                os.close(log)
            yield_processor(self._process.pid, os.getpid(), self._spool.config.nice)
            if keys and keys.identity:
                self._tell(keys.identity)
        except BrokenPipeError:
            pass  # it died at once: the next look starts it again
        except OSError as error:
            return self._give_up(f"no side process can be started ({error.strerror})")
        return True

    def _tell(self, line: str) -> None:
        """Write a line to the worker. Lines are far shorter than a pipe holds, so this never waits.

        Raises:
            OSError: it is gone.
        """
        if self._process is None or self._process.stdin is None:
            raise BrokenPipeError
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()

    def _hang_up(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # what could not be written any more
                self._process.stdin.close()


def notify(line: str) -> None:
    """Tell the user one thing on stderr; loggers at their default level would swallow it.

    Nothing is said where stderr is closed, or a pipe that nobody reads.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"leakaudit: {line}", file=sys.stderr, flush=True)


def _waiting_line(what: str, left: float | None, patience: float) -> str:
    """Return what the end of training waits for, how long, and how to wait no longer.

    >>> _waiting_line("attempt 3 of 7: tag on step 0, up to 60 s; about 40 s left", 40.0, 600.0)
    'attempt 3 of 7: tag on step 0, up to 60 s; about 40 s left (Ctrl-C: do not wait)'
    """
    limit = f", waiting {duration(patience)} of it at most" if left is None or left > patience else ""
    return f"{what}{limit if left else ''} (Ctrl-C: do not wait)"


@contextmanager
def _countdown() -> Iterator[Callable[[str], None]]:
    """Show a line that changes in place on a terminal.

    Elsewhere it is a plain line every half a minute.
    """
    last: float | None = None
    tty = sys.stderr.isatty()

    def show(line: str) -> None:
        nonlocal last
        if tty:
            line = f"leakaudit: {line}"[
                : shutil.get_terminal_size().columns - 1
            ]  # a line that wraps cannot be replaced
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        elif last is None or time.monotonic() - last >= LOG_LINE_SECONDS:
            last = time.monotonic()
            notify(line)

    try:
        yield show
    finally:
        if tty:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def attacked_when(config: AuditConfig) -> str:
    """Return when and where kept steps are attacked, in a clause."""
    if config.schedule == "inline":
        return "attacks them in this process"
    if config.schedule == "deferred" and config.at_end == "leave":
        return "leaves them to `leakaudit worker`"
    return "attacks them " + ("in a side process" if config.schedule == "beside" else "when training is over")


def by_hand(spool: Spool) -> str:
    """Return the command that goes on with a spool."""
    key = " --identity FILE" if spool.config.encrypt_to else ""
    return f"`leakaudit worker {shlex.quote(str(spool.root))}{key}`"


def what_stays(spool: Spool) -> str:
    """Return one sentence on the snapshots that are on the disk when training is over; empty where there are none.

    It names their steps, where they lie, what is in them, and how they are audited or removed.
    """
    waiting = _steps(spool, ".ready", ".run")
    refused = _steps(spool, ".bad")
    if not waiting and not refused:
        return ""
    states = []
    if waiting:
        states.append(f"not audited to the end: step {', '.join(waiting)} ({by_hand(spool)} continues with them)")
    if refused:
        states.append(f"cannot be audited any more: step {', '.join(refused)}")
    inside = "encrypted" if spool.config.encrypt_to else "in clear"
    folder = shlex.quote(str(spool.root))
    return (
        f"snapshots that stay in {folder}: {'; '.join(states)}. Each holds the private batch and its labels, by design, {inside}; "
        f"`leakaudit snapshots purge {folder} --all` removes them, or the next run does when they are older than {spool.config.retention_days:g} days"
    )


def _steps(spool: Spool, *states: str) -> list[str]:
    """Return the steps of the snapshots in some states, in order."""
    found = {path.stem for path in spool.entries() if path.suffix in states}
    return [name.lstrip("0") or "0" for name in sorted(found, key=lambda name: (len(name), name))]


def clean_environment(threads: int) -> dict[str, str]:
    """Return the environment of the side process: few threads, no credentials, nothing of a distributed launch, no hub.

    Modules are found where the trainer finds them, because a model may be built by the user's own code.
    """
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in LEAKED_VARIABLES | INTERPRETER_VARIABLES | LOUD_VARIABLES
        and not key.startswith(LEAKED_PREFIXES)
        and not key.upper().endswith(SECRET_ENDINGS)
    }
    return environment | QUIET | dict.fromkeys(THREAD_VARIABLES, str(threads)) | {"PYTHONPATH": _python_path()}


def _python_path() -> str:
    """Return where the trainer finds modules beside the interpreter's own: this package first, then its path in its order."""
    interpreters = tuple({str(Path(prefix) / "lib") for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)})
    package = str(Path(leakaudit.__file__).absolute().parent.parent)
    own = [str(Path(entry).absolute()) for entry in sys.path if not entry.startswith(interpreters)]
    return os.pathsep.join(dict.fromkeys([package, *own]))
