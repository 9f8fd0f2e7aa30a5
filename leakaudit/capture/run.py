"""One audit beside a training run, the same under every trainer.

It holds the plan, the recorder, the spool and the side process. No framework is imported here: an adapter tells when a run begins and
ends, the number of each step, and the few facts about a step that only its framework knows (`StepContext`). Hooks on the model and the
optimizer tell everything else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from leakaudit.capture.announcements import kept_in_words, not_kept_in_words, nothing_kept_in_words, plan_in_words
from leakaudit.capture.array_batches import for_labels
from leakaudit.capture.context import StepContext, TrainerContext
from leakaudit.capture.describe import RunDescription, audited_model, has_fresh_adapters, recipe_of
from leakaudit.capture.fitness import left_out_in_words
from leakaudit.capture.missed_steps import MissedSteps
from leakaudit.capture.notify import notify
from leakaudit.capture.observing.optimizers import base_optimizers, unmoved
from leakaudit.capture.origin import beginning_of
from leakaudit.capture.plan import Plan
from leakaudit.capture.recording.background_writer import PATIENCE_SECONDS
from leakaudit.capture.recording.recorder import Recorder
from leakaudit.capture.recording.recorder_setup import make_recorder
from leakaudit.capture.refusals import check_run, policy_of, unused_private_model
from leakaudit.capture.remaining_snapshots import remaining_snapshots
from leakaudit.capture.results_log import ResultsLog
from leakaudit.capture.unaudited import mark
from leakaudit.capture.worker.process import SideProcess
from leakaudit.client.snapshot import Manifest
from leakaudit.config.audit import AuditConfig
from leakaudit.errors import SpoolError
from leakaudit.gate.early import red_lines
from leakaudit.models.array_classifier import ArrayClassifier
from leakaudit.results.schema import Overhead
from leakaudit.results.wording import counted
from leakaudit.storage.run_folders import RunFolder, allocate_run_folder
from leakaudit.storage.spool import Spool
from leakaudit.storage.spool_files import Totals

DISK_PATIENCE_S = 10.0
"""Seconds that a due step waits until the step before it is on the disk, in a short run or if the user gave the distance of kept steps. Our
choice: the end of a short run waits for both steps anyway, and a disk that is slower is stuck."""


@dataclass
class AuditRun:
    """One audited training run; a second run of the same trainer has its own object."""

    config: AuditConfig
    spool: Spool
    recorder: Recorder
    side: SideProcess
    description: RunDescription
    plan: Plan
    """Which steps are due."""
    results_log: ResultsLog
    missed: MissedSteps = field(default_factory=MissedSteps)
    started: float = field(default_factory=time.monotonic)
    trained: int = 0
    """Optimizer steps since this run began."""
    blocked_s: float = 0.0
    """Seconds that the training thread spent in this object, without those in the recorder."""
    disk_stuck: bool = False
    """Whether training waited for the disk in vain; then no step waits for it again."""
    postponed: bool = False
    """Whether the last due step was left out because its LoRA adapters were still untrained; then the next step is due in its place."""

    @property
    def trainer(self) -> TrainerContext:
        """What the adapter knew of the run when it began."""
        return self.description.trainer

    @property
    def kept(self) -> int:
        """Number of kept steps, also the one in writing and those before a checkpoint."""
        # Read before the counter: a step that is finished in between is counted twice rather than not at all.
        on_its_way = self.recorder.writing()
        return self.trainer.kept_before + self.recorder.counters.kept + on_its_way

    # ------------------------------------------------------------------ beginning

    @classmethod
    def begin(
        cls, config: AuditConfig, trainer: TrainerContext, spool: Spool | None = None, folder: Path | None = None
    ) -> AuditRun:
        """Make the spool, set the hooks, tell the user what will happen.

        Args:
            config: the audit's configuration.
            trainer: what the adapter knows.
            spool: the empty spool of an earlier run, if training begins again and nothing was kept; None makes one.
            folder: of that earlier run.

        Raises:
            LeakAuditError: the model cannot be rebuilt, the folder cannot be written, or a plugin does not exist.
        """
        trainer, model = audited_model(trainer)
        if isinstance(model, ArrayClassifier):
            config = for_labels(config)
        check_run(config, trainer, model)
        recipe, config = recipe_of(model, config)
        description = RunDescription.of(config, trainer, model, recipe)
        place = RunFolder(folder or config.out_dir.absolute())
        if spool is None and trainer.writes:
            begun = beginning_of(config, model, trainer.tracked)
            spool, place = allocate_run_folder(place.folder, config, trainer.tokenizer, *begun)
        config = config.model_copy(update={"out_dir": place.folder})
        spool = spool or Spool(config.out_dir / "spool")
        try:
            run = _with_hooks(config, spool, description)
            if trainer.writes:
                _announce(run, place)
                if run.plan.kept != 0:
                    run.side.begin()
        except BaseException:
            if trainer.writes:
                spool.discard()
            raise
        return run

    # ------------------------------------------------------------------ steps

    def decide(self, now: Callable[[], StepContext], step: int) -> None:
        """Record the step that begins, if it is due and there is room for it.

        Args:
            now: returns what the framework knows of it; called only if it is recorded.
            step: its number, from 0.

        Raises:
            SpoolError: somebody removed the spool.
        """
        self.missed.count_before(step)
        if self._has_parted() or not (self.plan.due(step) or self.postponed or self.recorder.due_again):
            return
        start = time.perf_counter()
        self.postponed = self.trainer.one_step and has_fresh_adapters(self.description.model)
        if self.postponed:
            if self.trainer.writes:
                notify(
                    f"step {step} is not kept: its adapters are at their start, so half of the update is zero; the next step is kept instead"
                )
            return
        manifest: Manifest | None = None
        try:
            if self._wanted(step):
                manifest = self.description.manifest(now(), self.missed.since_kept)
        finally:  # also after an error, because the other processes wait for an answer
            mine, peers = manifest is not None, self.trainer.peers
            agreed = mine if peers is None else peers.agree(f"step {step}", mine)
        if agreed and manifest is not None:
            self.missed.since_kept = 0
            self.recorder.start(step, manifest)
        self.blocked_s += time.perf_counter() - start

    def _wanted(self, step: int) -> bool:
        """Return whether this process would record a step.

        Only the process that writes knows whether there is room for it.
        """
        if not self.trainer.writes:
            return not self.recorder.disabled
        if self.recorder.disabled or self.side.given_up or self.kept >= self.plan.most:
            return False
        if self.spool.gone():
            raise SpoolError(f"somebody removed {self.spool.root}")
        if self.plan.waits:
            _wait_for_disk(self, DISK_PATIENCE_S)
        if self.recorder.writing():
            self.missed.miss(step, "")
        elif lacking := self.spool.lacks(self.recorder.bytes_to_write()):
            self.missed.miss(step, lacking)
        return not self.missed.pending

    def _has_parted(self) -> bool:
        """Return whether the processes keep no more steps together; stop recording then."""
        if self.trainer.peers is None or not self.trainer.peers.over:
            return False
        self.recorder.stop_recording()
        return True

    def after_step(self) -> None:
        """Start the side process again if it died, and log its new results."""
        self.trained += 1
        if not self.trainer.writes:
            return
        start = time.perf_counter()
        if self.config.schedule == "inline":
            _wait_for_disk(self, PATIENCE_SECONDS)  # attacks on it come next, and training waits for them anyway
        if self.recorder.counters.kept or self.side.pid is not None:
            self.side.ensure()
        self.results_log.update()
        self.blocked_s += time.perf_counter() - start

    # ------------------------------------------------------------------ the end

    def end(self, steps: int) -> None:
        """Wait for the side process and tell the user where the report is.

        Args:
            steps: optimizer steps of the run.

        Raises:
            SpoolError: somebody removed the spool.
        """
        self.recorder.remove(DISK_PATIENCE_S if self.disk_stuck else PATIENCE_SECONDS)
        parted = self._has_parted()
        self._part()
        if not self.trainer.writes:
            return
        self.missed.count_before(steps // self.trainer.steps_per_round)
        totals = self.totals(steps, interrupted=False)
        if self.recorder.counters.kept == 0:
            why = nothing_kept_in_words(steps, list(self._reasons(totals, parted)))
            self._leave_empty(why)
            notify(why)
            return
        if self.spool.gone():
            raise SpoolError(f"somebody removed {self.spool.root}")
        self.spool.finish(totals)
        self.side.wait_or_detach()
        self.results_log.finish(report_is_there=not self.side.detached)
        self.side.stop()
        for line in (*self.side.outcome(), kept_in_words(totals, self.config)):
            notify(line)
        if not self.side.detached:
            _notify_of_remaining(self.spool)

    def interrupt(self, what: str) -> None:
        """End the audit of a run that an exception ended.

        This waits for no attack. `at_end` decides whether the side process continues with the kept steps.

        Args:
            what: what happened, as the beginning of a sentence.
        """
        self.recorder.remove()
        self._part()
        if not self.trainer.writes:
            return
        if self.recorder.counters.kept == 0:
            self._leave_empty(f"{what} before a step was kept")
            return
        self.spool.finish(self.spool.totals() or self.totals(None, interrupted=True))  # totals: only the waiting ended
        kept = counted(self.recorder.counters.kept, "step was", "steps were")
        notify(f"{what}; {kept} kept; {self.side.continue_detached()}")
        _notify_of_remaining(self.spool)

    def stop(self) -> None:
        """Remove the hooks and tell the side process to end, without waiting."""
        self._part()
        self.recorder.remove(patience_s=0.0)
        self.side.terminate()

    def untouched(self) -> bool:
        """Return whether the spool is empty, so that another run can use it."""
        return not (self.recorder.counters.kept or self.recorder.writing() or self.spool.gone())

    def totals(self, total_steps: int | None, *, interrupted: bool) -> Totals:
        """Return what the training process counted."""
        counters = self.recorder.counters
        return Totals(
            total_steps=total_steps,
            kept=counters.kept,
            skipped=self.missed.busy,
            too_full=self.missed.too_full,
            not_finite=counters.not_finite,
            failed=counters.failed,
            overhead=_overhead(self),
            privacy=self.description.privacy(self.config.privacy, self.trained),
            interrupted=interrupted,
        )

    def _reasons(self, totals: Totals, parted: bool) -> Iterator[str]:
        """Yield why no step was kept, a clause each."""
        yield from not_kept_in_words(totals, self.config)
        if self.side.given_up:
            yield self.side.why_given_up
        if parted and self.trainer.peers is not None:
            yield self.trainer.peers.over
        if reason := self.recorder.counters.reason:
            yield f"the first that was not kept: {reason}"

    def _leave_empty(self, why: str) -> None:
        """Discard the spool, and mark the folder with why there are no results."""
        self.side.stop()
        self.spool.discard()
        mark(self.config.out_dir, why)

    def _part(self) -> None:
        """Tell the other processes that this one takes no part any more."""
        if self.trainer.peers is not None:
            self.trainer.peers.leave()


# ---------------------------------------------------------------------- beginning


def _with_hooks(config: AuditConfig, spool: Spool, description: RunDescription) -> AuditRun:
    """Return a run whose hooks are set."""
    trainer, model = description.trainer, description.model
    recorder = make_recorder(config, spool, description)
    run = AuditRun(
        config=config,
        spool=spool,
        recorder=recorder,
        side=SideProcess(spool, trainer_device=str(next(model.parameters()).device), model=model),
        description=description,
        plan=Plan.of(config, policy_of(config), trainer.audited_steps),
        results_log=ResultsLog.of(config, trainer.trackers),
    )
    recorder.install()
    return run


def _announce(run: AuditRun, place: RunFolder) -> None:
    """Tell the user the plan, and which parts of the training are not audited."""
    step = run.recorder.bytes_of_a_step()
    plan = plan_in_words(run.plan, run.config, step, run.recorder.bytes_to_write() - step, place.note)
    for line in (*plan, *_warnings(run.description), *_never_stops(run.config)):
        notify(line)


def _warnings(description: RunDescription) -> Iterator[str]:
    """Yield a sentence on each thing that is not audited as expected."""
    trainer = description.trainer
    yield from filter(None, [left_out_in_words(description.fit.foreign, description.recipe.class_name)])
    yield from filter(None, [unmoved(description.model, base_optimizers(trainer.optimizer))])
    if description.private is None:
        yield from filter(None, [unused_private_model(trainer.model)])


def _never_stops(config: AuditConfig) -> Iterator[str]:
    """Yield a sentence if `stop_on` is set and the policy has no rule that could stop."""
    if config.stop_on is not None and not red_lines(policy_of(config)):
        yield "`stop_on: critical` never ends this training: no rule of the policy is critical with `max_count: 0` at level error"


def _wait_for_disk(run: AuditRun, patience_s: float) -> None:
    """Wait until the last kept step is on the disk, but not for a disk that is stuck."""
    if not run.disk_stuck and not run.recorder.written(patience_s):
        run.disk_stuck = True
        notify(
            f"a kept step is still not on the disk after {patience_s:g} s; no later step waits for the disk: those that find it busy are "
            "not kept"
        )


def _notify_of_remaining(spool: Spool) -> None:
    """Tell the user which steps are not audited yet."""
    if remaining := remaining_snapshots(spool):
        notify(remaining)


def _overhead(run: AuditRun) -> Overhead:
    """Return what the audit cost the training process so far."""
    counters = run.recorder.counters
    return Overhead(
        blocked_s=round(counters.blocked_s + run.blocked_s, 4),
        training_s=round(time.monotonic() - run.started, 4),
        writer_s=round(counters.writer_s, 4),
        memory_mb=round(run.recorder.bytes_held() / 1e6, 3),
        disk_mb=round(counters.written / 1e6, 3),
    )
