"""The start of the side process, the wait for it, and its end.

This module imports neither a framework nor torch, so that the code that runs between training steps stays small.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import leakaudit
from leakaudit.capture.boundary import from_signal_handler
from leakaudit.capture.notify import notify
from leakaudit.capture.outcome import outcome_lines
from leakaudit.capture.remaining_snapshots import command_to_continue
from leakaudit.capture.worker.environment import clean_environment
from leakaudit.capture.worker.inline_attacks import InlineAttacks
from leakaudit.capture.worker.restarts import Restarts
from leakaudit.capture.worker.wait import wait_for_attacks
from leakaudit.exit_codes import ExitCode
from leakaudit.files.private_files import open_to_append
from leakaudit.storage.parent_watch import (
    DETACH,
    FACTORIES_VARIABLE,
    KEY_VARIABLE,
    PARENT_VARIABLE,
    charge_nobody,
    yield_processor,
)
from leakaudit.storage.spool import DEVICE_VARIABLE, Spool

MAIN = str(Path(leakaudit.__file__).absolute().with_name("__main__.py"))
"""The file that a side process runs. `-m leakaudit` might find another leakaudit, or none."""

GRACE_SECONDS = 60.0
"""Seconds that a side process may take to write its report after it was told to stop. Our choice: results, verdict and page take a few."""

TERMINATED_SECONDS = 10.0
"""Seconds that the end of the program waits for a side process that was told to stop. Our choice: clusters wait 30 s until they kill."""

_left_alone: list[subprocess.Popen[bytes] | None] = []
"""Side processes that continue without us. This reference keeps Python from warning about processes that still run."""


class SideProcess:
    """The process `leakaudit worker SPOOL`, started again if it dies.

    Only the training thread calls this object. It writes to the worker's standard input: first the key of the run if snapshots are
    encrypted, then `detach` if the worker shall outlive the trainer. The end of the input means that the trainer has ended.
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
        self._inline = InlineAttacks(spool, model)
        self._process: subprocess.Popen[bytes] | None = None
        self._restarts = Restarts()
        self._owner = os.getpid()
        self._training = True
        self._terminated = False
        self.detached = False
        """Whether the side process continues after the end of this process."""
        self.given_up = False
        """Whether no side process is started any more."""
        self.why_given_up = ""
        """The reason, in a clause."""

    @property
    def pid(self) -> int | None:
        """Process id of the side process; None where none was started."""
        return None if self._process is None else self._process.pid

    # ------------------------------------------------------------------ during training

    def begin(self) -> None:
        """Start the worker before there is anything to attack, if it runs beside training.

        The worker needs seconds to import torch, and a short training would be over by then.
        """
        if self._spool.config.schedule == "beside":
            self.ensure()

    def ensure(self) -> bool:
        """Start the worker, or start it again if it died.

        A call is cheap if there is nothing to do. With `schedule: inline` it attacks the waiting steps in this process instead.

        Returns:
            Whether a worker runs.
        """
        schedule = self._spool.config.schedule
        if schedule == "inline":
            self._inline.catch_up()
        if schedule == "inline" or (self._training and schedule == "deferred"):
            return False
        if self._process is not None and self._process.poll() is None:
            return True
        if self.given_up:
            return False
        if self._spool.attended():
            return True  # somebody started one by hand, or the worker of an earlier process is still at work
        if self._is_through():
            return False
        code = None if self._process is None else self._process.returncode
        late = code == ExitCode.BUSY  # another worker was at work, and has ended since
        if code is not None and not late and not self._restarts.allowed(code, self._spool.abandoned()):
            return self._give_up(f"the side process died {self._restarts.deaths} times")
        return self._start()

    def _is_through(self) -> bool:
        """Return whether the ended worker must not be started again, or not yet."""
        code = None if self._process is None else self._process.returncode
        if code is not None and self._spool.abandoned():
            return False  # it died: a worker that ends by itself claims no snapshot any more
        if code == ExitCode.USAGE:
            self._give_up("the side process cannot work with this configuration")
        return self._restarts.through(code)

    # ------------------------------------------------------------------ the end of training

    def end_training(self) -> None:
        """Give the worker the processor, and let it start if it had to wait for the end."""
        self._training = False
        self._restarts.allow_retry()
        self._raise_priority()

    def wait_or_detach(self) -> None:
        """Do what `at_end` says: wait with a countdown, detach, or leave.

        A Ctrl-C ends the waiting, not the program.
        """
        self.end_training()
        config = self._spool.config
        if config.schedule == "inline":
            self._inline.catch_up()
            self._inline.finish()
        elif config.at_end == "leave":
            if self._spool.waiting() and self._process is not None:
                command = command_to_continue(self._spool)
                notify(f"not waiting for the attacks (`at_end: leave`): {command} runs those that are left")
            self._end_early()
        elif config.at_end == "detach":
            self._detach()
        else:
            self._wait(config.wait_at_end_s)

    def continue_detached(self) -> str:
        """Let kept steps be attacked after training was interrupted.

        This does not wait for the attacks.

        Returns:
            What becomes of the kept steps, in a clause.
        """
        self._training = False
        self._restarts.allow_retry()
        config = self._spool.config
        if config.schedule == "inline":
            self._inline.finish()
            return "what was attacked by then is in the report"
        later = f"{command_to_continue(self._spool)} continues with them"
        if config.at_end == "leave":
            self._end_early()
            return later
        if config.at_end == "detach":
            return f"the side process continues with them alone: {self._log}" if self._detach() else later
        if not self.ensure():
            return later
        return f"the side process continues with them for as long as this process lives; later, {later}"

    def terminate(self) -> None:
        """Ask the worker to write its results and end; this does not wait."""
        self.given_up = self._terminated = True
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def stop(self) -> None:
        """End the worker if it still runs; its finished attempts are on the disk."""
        atexit.unregister(self.end_with_program)
        if self._process is None or os.getpid() != self._owner:
            return  # a fork of the trainer must not end the trainer's audit
        if self._terminated:
            _wait_for_results(self._process)
        if self._process.poll() is None:
            charge_nobody(self._spool.root)
            self._process.kill()
            self._process.wait()
        close_input(self._process)

    def end_with_program(self) -> None:
        """Let the worker write results; a slow one ends itself after the program."""
        running = self._process is not None and self._process.poll() is None and os.getpid() == self._owner
        if not running or self._terminated:
            self.stop()
        else:
            self._raise_priority()
            self.terminate()
            _wait_for_results(self._process)
            _left_alone.append(self._process)
            rest = f"; {command_to_continue(self._spool)} goes on" if self._spool.waiting() else ""
            for line in (f"the program ends before the attacks did{rest}", *self.outcome()):
                notify(line)

    def outcome(self) -> list[str]:
        """Return lines with the verdict, the place of the report, and unchecked steps.

        If there is no report, the line says where to look. Call this after `wait_or_detach`.
        """
        return outcome_lines(self._log, detached=self.detached)

    def _wait(self, seconds: float) -> None:
        """Wait with a countdown; if it runs out, ask the worker to write its results."""
        if reason := wait_for_attacks(self._spool, self.ensure, seconds):
            notify(f"{reason}: the report covers what is finished")
            self._end_early()

    def _raise_priority(self) -> None:
        """Give the worker the processor that training does not need any more.

        Not every system allows it.
        """
        if self._process is not None and self._process.poll() is None:
            yield_processor(self._process.pid, os.getpid(), 0)

    def _end_early(self) -> None:
        """Ask the worker to write its report and end; a Ctrl-C meanwhile ends it at once."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=GRACE_SECONDS)
        except KeyboardInterrupt:
            notify(f"the side process ended without a report; {command_to_continue(self._spool)} writes it")
            self.stop()

    def _detach(self) -> bool:
        """Let the worker continue after the end of this process.

        Returns:
            Whether there is a worker that continues.
        """
        if not self.ensure():
            return False
        if self._process is None:
            return True  # started by hand: it never depended on us
        try:
            tell(self._process, DETACH)
        except OSError:
            notify(f"the side process has died; {command_to_continue(self._spool)} continues with what it left")
            return False
        atexit.unregister(self.end_with_program)
        close_input(self._process)
        _left_alone.append(self._process)
        notify(f"the side process (process {self._process.pid}) continues alone; its log is {self._log}")
        self._process, self.detached = None, True
        self.given_up = True  # nothing more is started from here
        return True

    # ------------------------------------------------------------------ the process

    def _give_up(self, why: str) -> bool:
        self.given_up = True
        self.why_given_up = f"{why}: see {self._log}"
        notify(f"{self.why_given_up}; no more steps are kept")
        return False

    def _start(self) -> bool:
        atexit.register(self.end_with_program)
        self._restarts.started()
        close_input(self._process)
        try:
            self._process = start_worker(self._spool, self._log, self._trainer_device)
            if self._training:
                yield_processor(self._process.pid, os.getpid(), self._spool.config.nice)
            if self._spool.keys and self._spool.keys.identity:
                tell(self._process, self._spool.keys.identity)
        except BrokenPipeError:
            pass  # it died at once: the next call of `ensure` starts it again
        except OSError as error:
            if from_signal_handler(error):
                raise
            return self._give_up(f"no side process can be started ({error.strerror})")
        return True


def tell(process: subprocess.Popen[bytes], line: str) -> None:
    """Write a line to a worker.

    Lines are far shorter than a pipe holds, so this never waits.

    Raises:
        OSError: the worker has ended.
    """
    if process.stdin is None:
        raise BrokenPipeError
    process.stdin.write(f"{line}\n".encode())
    process.stdin.flush()


def close_input(process: subprocess.Popen[bytes] | None) -> None:
    """Close the pipe to a worker, if there is one."""
    if process is not None and process.stdin is not None:
        with contextlib.suppress(OSError):  # closing flushes, and the worker may have ended
            process.stdin.close()


def start_worker(spool: Spool, log: Path, trainer_device: str) -> subprocess.Popen[bytes]:
    """Start a worker that ends with this process.

    Args:
        spool: that it attacks.
        log: file to which its output is appended; no link is followed.
        trainer_device: where training computes, such as `cuda:0`.

    Raises:
        OSError: the log cannot be opened, or no process can be started.
    """
    from leakaudit.models.factories import vouched

    environment = clean_environment(spool.config.threads, spool.config.pass_environment) | {
        PARENT_VARIABLE: str(os.getpid()),
        DEVICE_VARIABLE: trainer_device,
        FACTORIES_VARIABLE: json.dumps(vouched()),
        KEY_VARIABLE: "1" if spool.keys and spool.keys.identity else "",
    }
    output = open_to_append(log)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", MAIN, "worker", str(spool.root)],
            stdin=subprocess.PIPE,  # the end of this input tells the worker that we have ended
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C in the terminal reaches the trainer only
            env=environment,
        )
    finally:
        os.close(output)


def _wait_for_results(process: subprocess.Popen[bytes] | None) -> None:
    """Wait for a worker that was told to stop."""
    if process is not None:
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(timeout=TERMINATED_SECONDS)
