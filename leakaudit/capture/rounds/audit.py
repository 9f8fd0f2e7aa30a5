"""One audit of rounds, as one of its processes sees it.

The spool on the disk is what its processes share: the numbers of the rounds, their counts, the configuration and the kept rounds. This
object adds what one process needs between two rounds. The training thread calls it; writing and counting happen beside training.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from leakaudit.capture.announcements import kept_in_words, nothing_kept_in_words, plan_in_words
from leakaudit.capture.background_tasks import BackgroundTasks
from leakaudit.capture.context import TrainerContext
from leakaudit.capture.describe import RunDescription, declared_defenses
from leakaudit.capture.fitness import Fit, left_out_in_words
from leakaudit.capture.notify import notify
from leakaudit.capture.observing.optimizers import base_optimizers, unmoved
from leakaudit.capture.origin import beginning_of
from leakaudit.capture.plan import Plan
from leakaudit.capture.recording.background_writer import PATIENCE_SECONDS
from leakaudit.capture.recording.recorder import Recorder
from leakaudit.capture.recording.recorder_setup import make_recorder
from leakaudit.capture.refusals import policy_of
from leakaudit.capture.remaining_snapshots import remaining_snapshots
from leakaudit.capture.results_log import ResultsLog
from leakaudit.capture.rounds.run import RoundRun
from leakaudit.capture.rounds.sent import OpenRound
from leakaudit.capture.unaudited import mark
from leakaudit.capture.worker.shared_process import SharedSideProcess
from leakaudit.client.facts import DeclaredDefense
from leakaudit.config.audit import NONE, AuditConfig
from leakaudit.errors import RoundError, SpoolError
from leakaudit.models.recipe import ModelRecipe
from leakaudit.models.wrappers import plain_name
from leakaudit.results.wording import counted
from leakaudit.storage.held_rounds import held_rounds, release
from leakaudit.storage.participants import others_left
from leakaudit.storage.round_tensors import write_round_tensors
from leakaudit.storage.rounds_file import added, changing_rounds, read_rounds, totals_so_far
from leakaudit.storage.run_folders import check_same_configuration, join_or_allocate
from leakaudit.storage.spool import Spool
from leakaudit.storage.spool_files import Totals, read_totals


@dataclass(eq=False)
class RoundAudit:
    """The audit of the rounds that are trained with one `out_dir`."""

    config: AuditConfig
    """The configuration, with the folder of the audit."""
    spool: Spool
    plan: Plan
    """Which rounds are due."""
    side: SharedSideProcess
    log: ResultsLog
    architecture: str
    """Digest of the model; all rounds have the same."""
    note: str
    """For the user: what happened to an earlier audit in the folder."""
    trains_elsewhere: bool = False
    """Whether another process trains, and this one only says what is sent."""
    tasks: BackgroundTasks = field(default_factory=BackgroundTasks)
    owner: int = field(default_factory=os.getpid)
    """Process that this object belongs to; a fork of it has its own."""
    current: RoundRun | None = None
    """The round that is being trained, if it is due."""
    last: OpenRound | None = None
    """The last kept round, until it is known what was sent of it."""
    _fit: Fit | None = field(default=None, init=False)
    """How the model differs from the one that the side process makes; the same for all rounds."""
    _announced: bool = field(default=False, init=False)

    @classmethod
    def open(cls, config: AuditConfig, trainer: TrainerContext, model: nn.Module) -> RoundAudit:
        """Begin an audit, or take part in the one that another process began.

        Args:
            config: the audit's configuration.
            trainer: what the adapter knows of the first round.
            model: the model itself, without wrappers.

        Raises:
            RoundError: the folder holds an audit of rounds that this one does not belong to.
            SpoolError: the folder cannot be written.
        """
        begun = beginning_of(config, model, trainer.tracked)
        spool, place = join_or_allocate(config.out_dir.absolute(), config, trainer.tokenizer, *begun)
        spool.holds = True
        config = config.model_copy(update={"out_dir": place.folder})
        return cls(
            config=config,
            spool=spool,
            plan=Plan.of(config, policy_of(config), config.rounds),
            side=SharedSideProcess(spool, str(next(model.parameters()).device)),
            log=ResultsLog.of(config, trainer.trackers),
            architecture=architecture_of(model),
            note=place.note,
        )

    def check(self, config: AuditConfig, model: nn.Module) -> None:
        """Refuse a round that does not belong to this audit.

        Raises:
            RoundError: the configuration or the model differs.
        """
        check_same_configuration(self.config.out_dir, self.config, config)
        self._check_model(self.architecture, model)

    def _check_model(self, known: str, model: nn.Module) -> None:
        if known and architecture_of(model) != known:
            raise RoundError(
                f"this round trains another model than the rounds in {self.config.out_dir} (names, shapes or types of its parameters "
                "differ): give it another `out_dir`"
            )

    # ------------------------------------------------------------------ a round begins

    def begin(self, trainer: TrainerContext, model: nn.Module, recipe: ModelRecipe) -> RoundRun | None:
        """Begin the next round; return None if it is not due.

        Args:
            trainer: what the adapter knows.
            model: the model itself, without wrappers.
            recipe: how the side process makes it.

        Raises:
            RoundError: all planned rounds began already, another process finished the audit, or its model is another one.
            LeakAuditError: the model cannot be recorded.
        """
        if self.current is not None:
            self.current.interrupt("the training before never came to its end")
        self.release()
        self.log.use(trainer.trackers)
        number, kept = self._next_number(model)
        try:
            run = self._recorded(number, kept, trainer, model, recipe)
        except BaseException:
            self._count_back(number)
            raise
        self.current = run
        return run

    def _next_number(self, model: nn.Module) -> tuple[int, int]:
        """Return the number of the round, and how many rounds are kept."""
        planned, folder = self.config.rounds, self.config.out_dir
        with changing_rounds(self.spool.root) as rounds:
            if planned is not None and rounds.begun >= planned:
                raise RoundError(f"all {planned} rounds of the audit in {folder} began already (`rounds`)")
            if read_totals(self.spool.root) is not None:
                raise RoundError(
                    f"another process finished the audit in {folder}; give another `out_dir` to begin anew"
                )
            self._check_model(rounds.architecture, model)
            rounds.architecture = self.architecture
            rounds.begun += 1
            return rounds.begun - 1, rounds.totals.kept

    def _recorded(
        self, number: int, kept: int, trainer: TrainerContext, model: nn.Module, recipe: ModelRecipe
    ) -> RoundRun | None:
        """Return the round with its hooks set; None if it is not recorded."""
        description = RunDescription.of(self.config, trainer, model, recipe, self._fit)
        self._fit = None if description.fit.quantised else description.fit  # which would keep this round's layers alive
        recorder = make_recorder(self.config, self.spool, description)
        self._announce(description, recorder)
        if not self.plan.due(number) or kept >= self.plan.most or self.side.given_up:
            self._count(Totals())
            return None
        if lacking := self.spool.lacks(recorder.bytes_to_write()):
            notify(f"round {number} is not kept: {lacking}")
            self._count(Totals(too_full=1))
            return None
        recorder.install()
        self.side.begin()
        return RoundRun(self, number, recorder, description)

    def _announce(self, description: RunDescription, recorder: Recorder) -> None:
        """Tell the user the plan, once, and what is not audited."""
        if self._announced:
            return
        self._announced = True
        size = recorder.bytes_of_a_step()
        plan = plan_in_words(self.plan, self.config, size, recorder.bytes_to_write() - size, self.note)
        for line in (*plan, *_warnings(description)):
            notify(line)

    # ------------------------------------------------------------------ a round ends

    def round_ended(self, run: RoundRun, *, completely: bool) -> None:
        """Count a round when it is on the disk, and keep it open for what is sent.

        Args:
            run: the round.
            completely: whether it came to its end; only then anything is sent.
        """
        self.current = None
        seconds = time.monotonic() - run.started
        if completely and run.before is not None:
            kept, defenses = (lambda: run.recorder.counters.kept > 0), _defenses(run.description)
            self.last = OpenRound(
                run.number, self.config.out_dir, run.before, self.spool, *defenses, self.tasks.add, kept
            )
        self.tasks.add(functools.partial(self._count_written, run, seconds))

    def _count_written(self, run: RoundRun, seconds: float) -> None:
        run.recorder.written(PATIENCE_SECONDS)
        try:
            _list_tensors(self, run)
        finally:
            self._count(run.totals(seconds))

    def _count(self, more: Totals) -> None:
        with changing_rounds(self.spool.root) as rounds:
            rounds.ended += 1
            rounds.totals = added(rounds.totals, more)

    def give_back(self, run: RoundRun) -> None:
        """Count a round as if it had not begun: the trainer begins it again."""
        self.current = None
        self._count_back(run.number)

    def _count_back(self, number: int) -> None:
        with changing_rounds(self.spool.root) as rounds:
            if rounds.begun == number + 1:
                rounds.begun -= 1
            else:  # another process has the next number
                rounds.ended += 1

    def release(self) -> None:
        """Give the last round to the worker, if nobody said what was sent of it."""
        if self.last is not None:
            self.last.release()
            self.last = None

    def kept(self) -> int:
        """Return how many rounds are kept so far, in all processes."""
        return read_rounds(self.spool.root).totals.kept

    # ------------------------------------------------------------------ the end

    def finish(self, *, at_exit: bool = False, wait: bool = True) -> None:
        """End the audit: one report and one verdict on all rounds.

        Args:
            at_exit: whether this process ends. Then other processes continue the audit, if there are any, or if rounds are planned that
                have not begun.
            wait: whether to wait for the attacks as `at_end` says.

        Raises:
            SpoolError: somebody removed the spool.
        """
        if self.current is not None:
            self.current.interrupt("the audit was finished during a round")
        if not (at_exit and self.config.sent_elsewhere):
            self.release()
        self.tasks.wait(PATIENCE_SECONDS)
        if self.spool.gone():
            raise SpoolError(f"somebody removed {self.spool.root}")
        if at_exit and self._goes_on():
            return
        totals = totals_so_far(self.spool.root)
        if not totals.kept:
            _leave_empty(self, totals)
            return
        for folder in held_rounds(self.spool.root):
            release(folder)  # of processes that have ended
        if self.spool.totals() is None:
            self.spool.finish(totals)
        self._wait(wait=wait)
        self.log.finish(report_is_there=not self.side.detached)
        for line in (*self.side.outcome(), kept_in_words(totals, self.config)):
            notify(line)
        if not self.side.detached and (remaining := remaining_snapshots(self.spool)):
            notify(remaining)

    def _goes_on(self) -> bool:
        """Return whether other processes continue the audit; say so if they are to come."""
        waits = self.config.sent_elsewhere and bool(held_rounds(self.spool.root))
        if waits or others_left(self.spool.root, self.spool.lock):
            return True
        begun, planned = read_rounds(self.spool.root).begun, self.config.rounds
        if planned is None or begun >= planned:
            return False
        notify(
            f"{begun} of {counted(planned, 'round')} so far; the next process with this `out_dir` continues the audit"
        )
        return True

    def _wait(self, *, wait: bool) -> None:
        if self.config.at_end == "leave":
            self.side.wait_or_detach()
        elif self.config.at_end == "wait" and wait:
            self.side.wait_then_leave(self.config.wait_at_end_s)
        elif self.side.ensure():
            self.side.leave_alone()


def _list_tensors(audit: RoundAudit, run: RoundRun) -> None:
    """Write the list of a kept round's tensors, if another process sends it."""
    if audit.config.sent_elsewhere and run.before is not None and run.recorder.counters.kept:
        listed = run.before.listed(*_defenses(run.description))
        write_round_tensors(audit.spool.snapshot_folder(run.number), listed)


def _defenses(run: RunDescription) -> tuple[tuple[DeclaredDefense, ...], tuple[DeclaredDefense, ...]]:
    """Return the declared defences in the produced update, and those after it."""
    return declared_defenses(NONE, run.private), declared_defenses(run.shipped_defense, None)


def _leave_empty(audit: RoundAudit, totals: Totals) -> None:
    """Discard the spool, and mark the folder with why there are no results."""
    reasons = [f"{counted(number, 'round')} not kept: {why}" for number, why in totals.not_kept(audit.config)]
    why = nothing_kept_in_words(totals.total_steps or 0, reasons, "round")
    audit.side.terminate()
    audit.spool.discard()
    mark(audit.config.out_dir, why)
    notify(why)


def architecture_of(model: nn.Module) -> str:
    """Return the digest of a model's parameters by name, shape and type."""
    parts = ((plain_name(name), tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters())
    return hashlib.sha256(repr((type(model).__name__, sorted(parts))).encode()).hexdigest()


def _warnings(description: RunDescription) -> Iterator[str]:
    """Yield a sentence on each thing that is not audited as expected."""
    trainer = description.trainer
    yield from filter(None, [left_out_in_words(description.fit.foreign, description.recipe.class_name)])
    yield from filter(None, [unmoved(description.model, base_optimizers(trainer.optimizer))])
