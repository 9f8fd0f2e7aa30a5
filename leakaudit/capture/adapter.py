"""The base of the trainer adapters.

It begins and ends audited runs, and keeps their problems out of training.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from leakaudit.capture.boundary import entry, from_signal_handler
from leakaudit.capture.context import OFF_SWITCH, Source, StepContext, TrainerContext, configuration, writes
from leakaudit.capture.defended import Defended
from leakaudit.capture.finished import Finished
from leakaudit.capture.notify import notify
from leakaudit.capture.processes.distributed import BEGIN_SECONDS, check_layout, peers_of
from leakaudit.capture.processes.process_group import ProcessGroup
from leakaudit.capture.red_line import red_line_alone, red_line_of_all
from leakaudit.capture.refusals import refuse_versions
from leakaudit.capture.rounds.registry import audit_in, begin_round
from leakaudit.capture.rounds.run import RoundRun
from leakaudit.capture.run import AuditRun
from leakaudit.capture.run_name import named
from leakaudit.capture.trackers import Trackers
from leakaudit.capture.unaudited import folder_of, mark
from leakaudit.errors import LeakAuditError, PeersError, RoundError, type_and_place
from leakaudit.models.wrappers import unwrapped
from leakaudit.storage.spool import Spool
from leakaudit.storage.spool_files import RedLine

logger = logging.getLogger(__name__)

SWITCHED_OFF = f"{OFF_SWITCH} is set"


class Adapter(Finished, Defended):
    """At most one audited run at a time, whose problems never reach training.

    A framework's adapter derives from this class, answers six questions (`_trained`, `_refuse`, `_versions`, `_trainer_context`,
    `_step_context` and `_trackers`), and calls `_open`, `_decide`, `_after_step`, `_close`, `_interrupt` and `_remind` from the framework's events.
    Each event is an `entry` of `leakaudit.capture.boundary`.

    All state has a default in the class, so that an adapter needs no constructor that could fail.
    """

    FRAMEWORK = ""
    """Name of the trainer in snapshots."""

    config: Source = None
    """A YAML file, the object, a mapping, or None for the defaults."""
    _off = ""
    """Why the audit of this run is off; empty while it is on."""
    _run: AuditRun | RoundRun | None = None
    _kept = 0
    """Number of steps that the last run kept, including those before its checkpoint."""
    _marks_folder = False
    """Whether this process marks the folder in place of the first process, which may have no audit."""
    _leaves_folder = False
    """Whether the folder is not marked, because another audit there goes on."""
    _red_line: RedLine | None = None
    """Why this training was asked to stop; None if it was not."""
    _left: tuple[Spool, ...] = ()
    """Spools with steps that are not audited yet. While these objects exist, their locks show that this process lives."""

    # ------------------------------------------------------------------ the six questions

    def _refuse(self) -> None:
        """Refuse a run whose update no hook sees.

        Raises:
            SnapshotError: names the feature and what to use instead.
        """

    def _versions(self) -> Mapping[str, str]:
        """Return the versions of the framework and of torch, by package."""
        raise NotImplementedError

    def _trainer_context(self) -> TrainerContext:
        """Return what the framework knows about the run that begins."""
        raise NotImplementedError

    def _step_context(self) -> StepContext:
        """Return what the framework knows about the step that begins."""
        raise NotImplementedError

    def _trackers(self) -> Trackers | None:
        """Return the framework's loggers, or None where there are none."""
        return None

    def _run_name(self) -> str:
        """Return what the framework calls the run; empty if it has no name."""
        return ""

    def _stop_training(self) -> None:
        """Ask the framework to stop at the next step boundary; by default nothing can."""

    # ------------------------------------------------------------------ what the events call

    def _open(self) -> None:
        """Begin a run.

        It uses the spool of an earlier run of this adapter, if that run never kept a step.
        """
        self._protect()
        self._off, self._red_line = "", None
        spool, folder = self._leave_earlier_run()
        if not self._off and os.environ.get(OFF_SWITCH):
            self._switch_off(SWITCHED_OFF)
        if self._off:  # or the earlier run failed, and the user was told
            if (others := peers_of()) is not None:
                others.decline()
            return
        if configuration(self.config).unit == "round":
            self._open_round()
            return
        self._run = run = begin_together(lambda peers: self._begin(peers, spool, folder))
        self._folder = run.config.out_dir

    def _begin(self, peers: ProcessGroup | None, spool: Spool | None, folder: Path | None) -> AuditRun:
        config = self._configuration()
        refuse_versions()
        self._refuse()
        trainer = _with_peers(self._described(), peers)
        return AuditRun.begin(named(config, trainer), trainer, spool, folder)

    def _open_round(self) -> None:
        """Begin a round of the audit in its folder; there is no run if it is not due."""
        if (others := peers_of()) is not None:
            others.decline()
        refuse_versions()
        self._refuse()
        trainer = self._described()
        audit, self._run = begin_round(named(configuration(self.config), trainer), trainer)
        self._folder = audit.config.out_dir

    def _described(self) -> TrainerContext:
        context = replace(self._trainer_context(), framework=self.FRAMEWORK, versions=self._versions())
        if not context.writes:  # the trackers are those of the process that writes
            return context
        return replace(context, trackers=self._trackers(), run_name=self._run_name())

    def _decide(self, step: int) -> None:
        """Record the step that begins, if it is due.

        Args:
            step: its number, from 0, as the audit counts.
        """
        if self._run is not None:
            self._run.decide(self._step_context, step)
            if self._red_line is None and isinstance(self._run, AuditRun):
                self._stop_at(self._run, red_line_of_all(self._run, step))

    def _after_step(self) -> None:
        """Start the side process again if it died, and log its new results."""
        if self._run is not None:
            self._run.after_step()
            if self._red_line is None and isinstance(self._run, AuditRun):
                self._stop_at(self._run, red_line_alone(self._run))

    def _stop_at(self, run: AuditRun, line: RedLine | None) -> None:
        """Stop training, if there is a leak that the user wants it to stop for."""
        if line is None:
            return
        self._red_line = line
        if run.trainer.writes:
            notify(f"training stops here (`stop_on: critical`, rule {line.rule}): {line.sentence}")
        self._stop_training()

    @entry
    def _close(self, steps: int) -> None:
        """End a run that was trained to its end.

        Args:
            steps: optimizer steps of the run.
        """
        self._unprotect()
        run = self._run
        if run is None:
            return
        run.end(steps)
        self._kept, self._run = run.kept, None
        if isinstance(run, AuditRun) and run.spool.waiting():
            self._left = (*self._left, run.spool)

    @entry
    def _interrupt(self, what: str) -> None:
        """End a run that an exception ended."""
        self._unprotect()
        self._break_off(what)

    def _break_off(self, what: str) -> None:
        """End the audit of a run that did not come to its end."""
        run = self._run
        if run is None:
            return
        run.interrupt(what)
        self._kept, self._run = run.kept, None
        if isinstance(run, AuditRun):
            self._left = (*self._left, run.spool)

    @entry
    def _remind(self) -> None:
        """Tell the user again, at the end, why the training was not audited."""
        if self._off and self._off != SWITCHED_OFF:
            notify(f"this run was not audited: {self._off}")

    def _kept_so_far(self) -> int:
        """Return the steps that were kept, for a checkpoint."""
        return self._kept if self._run is None else self._run.kept

    # ------------------------------------------------------------------ runs that do not end as planned

    def _leave_earlier_run(self) -> tuple[Spool | None, Path | None]:
        """End an earlier run, if training begins again without having ended it.

        Return the spool and folder of that run if it kept no step; otherwise None for both.

        `auto_find_batch_size` does this: it begins again with another optimizer after the first step ran out of memory.
        """
        run = self._run
        if run is None:
            return None, None
        if not run.untouched():
            self._break_off("the earlier training run never came to its end")
            return None, None
        run.stop()
        self._kept, self._run = run.kept, None
        return (run.spool, run.config.out_dir) if isinstance(run, AuditRun) else (None, None)

    def _fail(self, error: Exception) -> None:
        """Switch the audit off.

        The message of an exception is shown only if the exception is ours: others may quote private text.
        """
        ours = isinstance(error, LeakAuditError)
        self._marks_folder = isinstance(error, PeersError) and error.first
        self._leaves_folder = isinstance(error, RoundError)
        self._switch_off(f"{type(error).__name__}: {error}" if ours else type_and_place(error))

    def _switch_off(self, reason: str) -> None:
        """Stop auditing, and tell the user why, once; training continues.

        The other processes of a distributed run are told.
        """
        run, told = self._run, bool(self._off)
        self._off, self._run = self._off or reason, None
        notes = list(self._clear_away(run, reason))
        if not told:
            logger.warning(
                "leakaudit is off for this run: %s; training continues without it", "; ".join([reason, *notes])
            )

    def _clear_away(self, run: AuditRun | RoundRun | None, reason: str) -> Iterator[str]:
        """Stop a run, discard its spool if it is empty, and mark its folder.

        Each yielded clause tells the user about one problem, or about an earlier audit.
        """
        try:
            if run is not None:
                run.stop()
                if isinstance(run, AuditRun) and run.untouched() and run.trainer.writes:
                    run.spool.discard()
        except Exception as error:
            if from_signal_handler(error):
                raise
            yield f"it could not be switched off cleanly ({type_and_place(error)})"
        folder = folder_of(self.config) if run is None else run.config.out_dir
        if self._leaves_folder or isinstance(run, RoundRun) or (folder is not None and audit_in(folder) is not None):
            return  # it belongs to an audit of rounds that goes on
        if run is not None and (not run.trainer.writes or run.recorder.counters.kept or run.spool.entries()):
            return  # kept steps stay in the folder
        try:
            yield from _mark_folder(folder, reason, marks=self._marks_folder)
        except Exception as error:
            if from_signal_handler(error):
                raise
            yield f"{folder} may hold results of an earlier run and could not be marked as not audited ({type_and_place(error)})"


def begin_together(begin: Callable[[ProcessGroup | None], AuditRun]) -> AuditRun:
    """Begin in all processes of a distributed run or in none.

    Args:
        begin: begins in this process, given the group that all processes joined; None where the process is alone.

    Raises:
        PeersError: another process is not audited, or could not begin.
    """
    peers = peers_of()
    if peers is None:
        return begin(None)
    peers.meet()
    run: AuditRun | None = None
    try:
        peers.connect()
        run = begin(peers)
    finally:
        together = peers.agree("the beginning", run is not None, BEGIN_SECONDS)
    if not together:
        run.stop()
        if peers.first:
            run.spool.discard()
        raise PeersError(peers.over or "another process of this run cannot be audited; its own message says why")
    return run


def _with_peers(trainer: TrainerContext, peers: ProcessGroup | None) -> TrainerContext:
    """Return what an adapter knows of a run, with the group that its processes joined.

    A process that trains alone has no group.

    Raises:
        SnapshotError: the model is divided among the processes in a way that is not audited.
    """
    if trainer.peers is None or peers is None:
        return trainer
    check_layout(unwrapped(trainer.model), trainer.loop_calls, reduced=trainer.observe == "update")
    return replace(trainer, peers=peers)


def _mark_folder(folder: Path | None, reason: str, *, marks: bool) -> Iterator[str]:
    """Mark the folder of a run that is not audited.

    The yielded clause, if there is one, says where the results of an earlier audit in that folder are now.

    Args:
        folder: of the run; None where its configuration cannot be read.
        reason: why it is not audited. If the user switched the audit off, a folder that does not exist is not made.
        marks: whether this process marks the folder although it is not the first one.
    """
    if folder is None:
        yield "its `out_dir` could not be read or has no name yet, so that folder may still hold results of an earlier run"
    elif (marks or writes(peers_of())) and (reason != SWITCHED_OFF or folder.exists()):
        place = mark(folder, reason)
        if place.note:
            yield place.note
