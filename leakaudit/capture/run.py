"""Runs one audit beside a training, the same under every trainer.

It holds schedule, recorder, spool and side process, and knows how the run ends.

No framework is imported here. An adapter tells when a run begins and ends, what a step is called, and the few facts about it that
only its framework knows (`StepContext`); everything else is seen at the model and the optimizer.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from leakaudit.capture.array_batches import array_pass, for_labels, labels_only
from leakaudit.capture.boundary import entry
from leakaudit.capture.distributed import BEGIN_SECONDS, check_layout, peers_of
from leakaudit.capture.fitness import Fit, beyond, check_tensors, fitting, patched_parts
from leakaudit.capture.kept_step import KeptStep
from leakaudit.capture.optimizers import base_optimizers, parameters_of, unmoved
from leakaudit.capture.part_of_step import PartOfStep
from leakaudit.capture.plan import Plan, room_in_words, time_in_words
from leakaudit.capture.private_sgd import PrivateSgd, private_sgd
from leakaudit.capture.process_group import ProcessGroup
from leakaudit.capture.recorder import Recorder
from leakaudit.capture.step_facts import believed_bound, believed_divisor, check_words
from leakaudit.capture.step_tensors import Observe
from leakaudit.capture.unaudited import folder_of, mark
from leakaudit.capture.witness import own_part
from leakaudit.capture.worker_process import SideProcess, attacked_when, notify, what_stays
from leakaudit.client.array_batches import array_facts
from leakaudit.client.batches import public_facts
from leakaudit.client.facts import DeclaredDefense, PublicFacts
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.snapshot import KeptParts, Manifest, Provenance
from leakaudit.client.truth import reading_of
from leakaudit.config.audit import AuditConfig, load_config
from leakaudit.config.invocation import training_command
from leakaudit.errors import LeakAuditError, ModelError, PeersError, SnapshotError, SpoolError, type_and_place
from leakaudit.gate.evaluate import Policy, default_policy, load_policy
from leakaudit.models.array_classifier import ArrayClassifier, NoText, array_recipe
from leakaudit.models.first_blocks import BLOCKS, KEEP_ALL_BYTES, Parts, first_parts
from leakaudit.models.lora import refuse_prompts
from leakaudit.models.recipe import ModelRecipe, can_rebuild
from leakaudit.models.structure import dropout_rates
from leakaudit.models.tensors import coarsest_dtype, dtype_of
from leakaudit.models.wrappers import plain_name, unwrapped
from leakaudit.plugins.names import registered_names
from leakaudit.registry import attacks, defenses
from leakaudit.results.journal import load_journal
from leakaudit.results.schema import Attempt, Overhead, Score
from leakaudit.results.wording import counted
from leakaudit.storage.spool import Place, Spool, Totals, settle

logger = logging.getLogger(__name__)

Source = AuditConfig | Mapping[str, Any] | Path | str | None

OFF_SWITCH = "LEAKAUDIT_DISABLED"
SWITCHED_OFF = f"{OFF_SWITCH} is set"

SHORT_RUN_PATIENCE_S = 10.0
"""How long a due step of a run of a few steps waits until the one before is on the disk. Our choice: its end waits for both anyway,
and a disk that is slower is stuck."""

WHOLE = "everything"
"""What an attack needs that does not say otherwise (`Attack.needs`)."""

AUTOCAST: Mapping[torch.dtype, str] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
AUTOCAST_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}

METRICS = {"exact_rate": "exact", "r1": "rouge1", "token_recall": "token_recall", "label_accuracy": "label_accuracy"}
"""Name in the trainer's log -> metric of the results; the strongest attack on the step counts."""


@dataclass(frozen=True)
class StepContext:
    """What only the framework knows of the step that begins."""

    step: int
    """Optimizer step, counted from 0."""
    epoch: float | None = None
    total_steps: int | None = None
    loss: float | None = None
    """Last one that was logged."""
    learning_rate: float | None = None
    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    autocast: str | None = None
    """`bf16` or `fp16`, where the framework hides it from outside; None leaves it to what the forward passes run in."""
    kept_rng: bool = True
    note: str = ""


@dataclass(frozen=True)
class TrainerContext:
    """What an adapter knows of the run when it begins."""

    framework: str
    versions: Mapping[str, str]
    model: nn.Module
    """As the framework holds it, wrapped or not."""
    optimizer: Any
    tokenizer: Any
    called: nn.Module | None = None
    """The object that the training loop calls; None for `model`."""
    num_labels: int | None = None
    """C of a classifier of arrays, which has no tokenizer; None for text."""
    criterion: nn.Module | None = None
    """Its loss; None for mean cross-entropy."""
    scaler: Any = None
    batch_size_bound: int | None = None
    total_steps: int | None = None
    kept_before: int = 0
    """Steps that the run kept before it was resumed from a checkpoint."""
    log: Callable[[dict[str, float]], None] | None = None
    """Sends numbers to the framework's loggers."""
    observe: Observe = "update"
    local_steps: int = 1
    peers: ProcessGroup | None = None


@dataclass
class AuditRun:
    """One audited training run; a second one of the same trainer is another."""

    config: AuditConfig
    spool: Spool
    recorder: Recorder
    side: SideProcess
    stack: TrainerContext
    model: nn.Module
    """The model itself, out of every wrapper."""
    model_recipe: ModelRecipe
    facts: PublicFacts
    """What is public for as long as the run lasts; what changes from step to step is filled in per step."""
    plan: Plan
    """Which steps are due."""
    private: PrivateSgd | None = None
    fit: Fit = field(default_factory=Fit)
    """How the live model differs from the one that its recipe makes."""
    unaudited_parameters: int = 0
    started: float = field(default_factory=time.monotonic)
    skipped: int = 0
    """Due steps that came while the one before was still on its way to the disk."""
    too_full: int = 0
    """Due steps that the spool or the disk had no room for."""
    missing: tuple[int, str] | None = None
    """The due step that is not recorded, until training has come past it, and why the disk had no room; empty: the writer was busy."""
    missed_since: int = 0
    """Due steps since the last kept one that were not recorded, for either reason."""
    journal_size: int = 0
    logged: set[str] = field(default_factory=set)
    mute: bool = False
    """A logger of the trainer failed on our numbers."""
    blocked_s: float = 0.0
    postponed: bool = False
    """The last due step was one that says too little, so the next one is due in its place."""

    @property
    def kept(self) -> int:
        """Return the steps kept so far, the one on its way to the disk and those before a checkpoint included."""
        # Asked first: what arrives in between is counted twice rather than not at all.
        on_its_way = self.recorder.writing()
        return self.stack.kept_before + self.recorder.counters.kept + on_its_way

    @property
    def journal(self) -> Path:
        """Return where the side process notes finished attempts."""
        return self.config.out_dir / "journal.jsonl"

    # ------------------------------------------------------------------ beginning

    @classmethod
    def begin(
        cls, config: AuditConfig, stack: TrainerContext, spool: Spool | None = None, folder: Path | None = None
    ) -> AuditRun:
        """Make the spool, set the hooks, say what will happen.

        Args:
            config: the audit's configuration.
            stack: what the adapter knows.
            spool: an empty one of this audit, where training begins again after nothing was kept.
            folder: its folder.

        Raises:
            LeakAuditError: the model cannot be rebuilt, the folder cannot be written, a plugin does not exist.
        """
        if stack.num_labels is not None:
            stack = _labels_only(stack, stack.num_labels)
        if stack.tokenizer is None:
            raise SnapshotError(
                "there is no tokenizer, and attacks need one: give it (`processing_class`, `tokenizer`), or `num_labels` where "
                "the model classifies pictures or tables"
            )
        model = unwrapped(stack.model)
        if isinstance(model, ArrayClassifier):
            config = for_labels(config)
        _check_plugins(config)
        refuse_prompts(stack.model if stack.called is None else stack.called)
        refuse_prompts(stack.model)
        check_tensors(model)
        recipe, config = _recipe(model, config)
        fit = Fit() if config.schedule == "inline" else Fit.of(model, recipe)
        private = private_sgd(stack.optimizer)
        declared = _declared(config, private)
        facts = _facts(stack, model, declared)
        peers = stack.peers
        place = Place(folder or config.out_dir.absolute())
        if spool is None and _writes(peers):
            spool, place = settle(place.folder, config, stack.tokenizer, training_command())
        config = config.model_copy(update={"out_dir": place.folder})
        spool = spool or Spool(config.out_dir / "spool")
        try:
            run = cls._begin_in(spool, config, stack, model, recipe, facts, private, fit)
            if _writes(peers):
                notify(_plan(run) + (f"; {place.note}" if place.note else ""))
                if more := beyond(fit.foreign, recipe.class_name):
                    notify(more)
                if more := unmoved(model, base_optimizers(stack.optimizer)):
                    notify(more)
                if private is None and (why := unused_private_model(stack.model)):
                    notify(why)
                if run.plan.kept != 0:
                    run.side.begin()
        except BaseException:
            if _writes(peers):
                spool.discard()
            raise
        return run

    @classmethod
    def _begin_in(
        cls,
        spool: Spool,
        config: AuditConfig,
        stack: TrainerContext,
        model: nn.Module,
        recipe: ModelRecipe,
        facts: PublicFacts,
        private: PrivateSgd | None,
        fit: Fit,
    ) -> AuditRun:
        """Set the hooks of a run whose spool is there."""
        moving = [group for mover in base_optimizers(stack.optimizer) for group in mover.param_groups]
        recorder = Recorder(
            model,
            stack.optimizer,
            functools.partial(_write, spool, private is not None, fit.foreign),
            called=stack.model if stack.called is None else stack.called,
            scaler=stack.scaler,
            peers=stack.peers,
            observe=stack.observe,
            local_steps=stack.local_steps,
            learning_rate=float(moving[0]["lr"]) if stack.observe == "delta" else None,
            max_bytes=config.max_spool_gb * 1e9,
            as_stepped=functools.partial(_with_defenses, config, private),
            beside=fit.unlike,
            withdraw=spool.withdraw,
            in_place=config.check == "in_place",
            **_words_of(model),
        )
        if parts := _parts_to_keep(config, stack, model, recipe, fit, recorder):
            recorder.keep_only(parts)
        moved = {id(p) for group in moving for p in group["params"] if p.requires_grad}
        run = cls(
            config=config,
            spool=spool,
            recorder=recorder,
            side=SideProcess(spool, trainer_device=str(next(model.parameters()).device), model=model),
            stack=stack,
            model=model,
            model_recipe=recipe,
            facts=facts,
            plan=Plan.of(config, _policy(config), _steps_of(stack)),
            private=private,
            fit=fit,
            unaudited_parameters=len(moved - {id(p) for p in model.parameters()}),
        )
        recorder.install()
        return run

    # ------------------------------------------------------------------ steps

    def due(self, step: int) -> bool:
        """Return whether the schedule wants a step; a matter of its number alone, so that all processes agree on it."""
        return self.plan.due(step)

    def decide(self, now: Callable[[], StepContext], step: int) -> None:
        """Record the step that begins, if it is due and there is room for it.

        Args:
            now: what the framework knows of it; asked only if it is recorded.
            step: its number, from 0.

        Raises:
            SpoolError: somebody removed the spool.
        """
        self._count_missed(step)
        if self._has_parted() or not (self.due(step) or self.postponed or self.recorder.due_again):
            return
        start = time.perf_counter()
        self.postponed = _fresh_adapters(self.model)
        if self.postponed:
            if _writes(self.stack.peers):
                notify(
                    f"step {step} is not kept: its adapters are at their start, so half of the update is zero; the next step is kept instead"
                )
            return
        manifest: Manifest | None = None
        try:
            if self._wanted(step):
                manifest = self._describe(now())
        finally:  # whatever went wrong here, the others wait for an answer
            mine, peers = manifest is not None, self.stack.peers
            agreed = mine if peers is None else peers.agree(f"step {step}", mine)
        if agreed and manifest is not None:
            self.missed_since = 0
            self.recorder.start(step, manifest)
        self.blocked_s += time.perf_counter() - start

    def _wanted(self, step: int) -> bool:
        """Return whether this process would record a step; only the one that writes knows of room for it."""
        if not _writes(self.stack.peers):
            return not self.recorder.disabled
        if self.recorder.disabled or self.side.given_up or self.kept >= self.plan.most:
            return False
        if self.spool.gone():
            raise SpoolError(f"somebody removed {self.spool.root}")
        if self.plan.short:
            self.recorder.written(SHORT_RUN_PATIENCE_S)
        if self.recorder.writing():
            self.missing = (step, "")
        elif lacking := self.spool.lacks(self.recorder.bytes_to_write()):
            self.missing = (step, lacking)
        return self.missing is None

    def _count_missed(self, steps: int) -> None:
        """Count the last due step if it was not recorded and is over.

        A step that never began is not missed.
        """
        if self.missing is None or self.missing[0] >= steps:
            return
        (step, lacking), self.missing = self.missing, None
        self.missed_since += 1
        if not lacking:
            self.skipped += 1
            return
        if not self.too_full:
            logger.warning("step %d was not kept: %s", step, lacking)
        self.too_full += 1

    def _describe(self, now: StepContext) -> Manifest:
        """Note what is public about the step, and how its update comes about, as they are now."""
        clipped = self.stack.observe != "local" and bool(now.max_grad_norm or now.max_grad_value)
        recipe = StepRecipe(
            max_grad_norm=now.max_grad_norm if clipped else None,
            max_grad_value=now.max_grad_value if clipped else None,
            autocast=now.autocast if now.autocast in AUTOCAST_DTYPES else None,  # type: ignore[arg-type]
            kept_rng=now.kept_rng,
            neftune_alpha=_neftune_alpha(self.model),
            attention=str(getattr(getattr(self.model, "config", None), "_attn_implementation", None) or ""),
            processes=1 if self.stack.peers is None or self.stack.observe == "local" else self.stack.peers.mean_over,
            unaudited_parameters=self.unaudited_parameters,
            patched=patched_parts(self.model),
            note=now.note,
        )
        defenses = _declared(self.config, self.private)
        return Manifest(
            model=self.model_recipe.model_copy(
                update={"parts": dict(self.fit.parts), "settings": self.fit.settings(self.model)}
            ),
            facts=self.facts.model_copy(
                update={
                    "dropout": dropout_rates(self.model.named_modules()),
                    "max_grad_norm": recipe.max_grad_norm,
                    "dtype": AUTOCAST_DTYPES.get(str(recipe.autocast), self.facts.dtype),
                    "defenses": defenses,
                }
            ),
            recipe=recipe,
            provenance=Provenance(
                framework=self.stack.framework,
                versions=dict(self.stack.versions),
                step=now.step,
                epoch=now.epoch,
                total_steps=now.total_steps,
                loss=now.loss,
                learning_rate=now.learning_rate,
                skipped_before=self.missed_since,
            ),
        )

    def _has_parted(self) -> bool:
        """Return whether the processes of this run keep no more steps together."""
        if self.stack.peers is None or not self.stack.peers.over:
            return False
        self.recorder.stop_recording()
        return True

    def after_step(self) -> None:
        """See to the side process, and log what it has found since."""
        if not _writes(self.stack.peers):
            return
        start = time.perf_counter()
        if self.config.schedule == "inline":
            self.recorder.written()  # attacks on it come next, and training waits for them anyway
        if self.recorder.counters.kept or self.side.pid is not None:
            self.side.ensure()
        self.log_results()
        self.blocked_s += time.perf_counter() - start

    # ------------------------------------------------------------------ the end

    def end(self, steps: int) -> None:
        """Wait for the side process and say where the report is.

        Raises:
            SpoolError: somebody removed the spool.
        """
        self.recorder.remove()
        parted = self._has_parted()
        self._part()
        if not _writes(self.stack.peers):
            return
        counters = self.recorder.counters
        self._count_missed(steps // (self.stack.local_steps if self.stack.observe == "delta" else 1))
        totals = self.totals(steps, interrupted=False)
        if counters.kept == 0:
            reasons = _reasons(totals, self.config) + ([self.side.why_given_up] if self.side.given_up else [])
            reasons += [self.stack.peers.over] if parted and self.stack.peers is not None else []
            reasons += [f"the first that was not kept: {counters.reason}"] if counters.reason else []
            why = f"no step was kept, so there is nothing to report: the run had {counted(steps, 'step')}"
            self._leave_empty("; ".join([why, *reasons]))
            notify("; ".join([why, *reasons]))
            return
        if self.spool.gone():
            raise SpoolError(f"somebody removed {self.spool.root}")
        self.spool.finish(totals)
        self.side.wait_or_detach()
        self.log_results()
        self.side.stop()
        for line in self.side.outcome():
            notify(line)
        kept = [f"{counted(counters.kept, 'step')} kept", *_reasons(totals, self.config)]
        held_up = f"training was held up for {totals.overhead.blocked_s:.2f} s of {totals.overhead.training_s:.1f} s"
        notify("; ".join([*kept, held_up]))
        if not self.side.detached and (stays := what_stays(self.spool)):
            notify(stays)

    def break_off(self, what: str) -> None:
        """End the audit of a run that an exception ended: what was kept is audited for as long as this process lives."""
        self.recorder.remove()
        self._part()
        if not _writes(self.stack.peers):
            return
        if self.recorder.counters.kept == 0:
            self._leave_empty(f"{what} before a step was kept")
            return
        self.spool.finish(self.totals(None, interrupted=True))
        notify(
            f"{what}; {counted(self.recorder.counters.kept, 'step was', 'steps were')} kept; {self.side.continue_detached()}"
        )
        if stays := what_stays(self.spool):
            notify(stays)

    def _leave_empty(self, why: str) -> None:
        """Leave a folder that says why there are no results."""
        self.side.stop()
        self.spool.discard()
        mark(self.config.out_dir, why)

    def stop(self) -> None:
        """Take everything off a run whose audit is over, without waiting for anything."""
        self._part()
        self.recorder.remove(patience_s=0.0)
        self.side.terminate()

    def _part(self) -> None:
        """Let the other processes go on without this one."""
        if self.stack.peers is not None:
            self.stack.peers.leave()

    def untouched(self) -> bool:
        """Return whether nothing was put into the spool, so that a run that begins again can go on with it."""
        return not (self.recorder.counters.kept or self.recorder.writing() or self.spool.gone())

    def totals(self, total_steps: int | None, *, interrupted: bool) -> Totals:
        """Return what the trainer's side counted."""
        blocked = self.recorder.counters.blocked_s + self.blocked_s
        training = time.monotonic() - self.started
        return Totals(
            total_steps=total_steps,
            kept=self.recorder.counters.kept,
            skipped=self.skipped,
            too_full=self.too_full,
            not_finite=self.recorder.counters.not_finite,
            failed=self.recorder.counters.failed,
            overhead=Overhead(
                blocked_s=round(blocked, 4),
                training_s=round(training, 4),
                check_s=round(self.recorder.counters.check_s, 4),
                writer_s=round(self.recorder.counters.writer_s, 4),
                memory_mb=round(self.recorder.bytes_held() / 1e6, 3),
                disk_mb=round(self.recorder.counters.written / 1e6, 3),
            ),
            interrupted=interrupted,
        )

    # ------------------------------------------------------------------ numbers for the trainer's loggers

    def log_results(self) -> None:
        """Send the numbers of every step whose attempts are all there to the trainer's loggers."""
        if self.stack.log is None:
            return
        try:
            size = self.journal.stat().st_size
            if size == self.journal_size:
                return
            self.journal_size = size
            entries = load_journal(self.journal)
        except OSError:
            return  # nothing is finished yet, or somebody cleared up
        attempts: dict[str, list[Attempt]] = {}
        for line in entries:
            if line.attempt.defense == "none":
                attempts.setdefault(line.attempt.step, []).append(line.attempt)
        for step, found in attempts.items():
            if step not in self.logged and len(found) == len(self.config.attacks):
                self.logged.add(step)
                self._log({"leakaudit/step": int(step.removeprefix("st-")), **_numbers(found)})

    def _log(self, numbers: dict[str, float]) -> None:
        """Log now; a logger that fails costs the numbers of this run in the log, not the audit."""
        if self.mute or self.stack.log is None:
            return
        try:
            self.stack.log(numbers)
        except Exception as error:
            self.mute = True
            logger.warning("leakaudit's numbers are not logged any more: a logger raised %s", type(error).__name__)


class Adapter:
    """What every adapter is: at most one audited run at a time, and no problem of the audit ever reaches training.

    Its state stands in the class until it changes, so that an adapter needs no constructor that could fail.
    """

    config: Source = None
    """A YAML file, the object, a mapping, or None for the defaults."""
    _off = ""
    """Why the audit of this run is off; empty while it is on."""
    _run: AuditRun | None = None
    _folder: Path | None = None
    _kept = 0
    _speaks = False
    """Whether this process marks the folder though it is not the first one, which has no audit."""
    _left: tuple[Spool, ...] = ()
    """Spools with steps that are still to be audited; they say that this process lives for as long as they do."""

    @property
    def folder(self) -> Path | None:
        """Folder of the audit (results.json, report.html), known once training has begun."""
        return self._folder

    def _open(self, stack: Callable[[], TrainerContext]) -> None:
        """Begin a run, or go on with the spool of one that never kept a step."""
        self._off = ""
        spool, folder = self._leave_earlier_run()
        if not self._off and os.environ.get(OFF_SWITCH):
            self._switch_off(SWITCHED_OFF)
        if self._off:  # or the earlier run went wrong, which has been said
            if (others := peers_of()) is not None:
                others.decline()
            return
        self._run = _together(
            lambda peers: AuditRun.begin(configuration(self.config), _among(stack(), peers), spool, folder)
        )
        self._folder = self._run.config.out_dir

    @entry
    def _close(self, steps: int) -> None:
        """End a run that came to its end."""
        run = self._run
        if run is None:
            return
        run.end(steps)
        self._kept, self._run = run.kept, None
        if run.spool.waiting():
            self._left = (*self._left, run.spool)

    @entry
    def _break(self, what: str) -> None:
        """End a run that an exception ended."""
        run = self._run
        if run is None:
            return
        run.break_off(what)
        self._kept, self._run = run.kept, None
        self._left = (*self._left, run.spool)

    @entry
    def _remind(self) -> None:
        """Say again at the end of training why it was not audited, if it was not."""
        if self._off and self._off != SWITCHED_OFF:
            notify(f"this run was not audited: {self._off}")

    def _leave_earlier_run(self) -> tuple[Spool | None, Path | None]:
        """Come away from a run that never came to its end; return its spool and folder if nothing was put into them.

        `auto_find_batch_size` begins again like this, with another optimizer, after the first step ran out of memory.
        """
        run = self._run
        if run is None:
            return None, None
        if not run.untouched():
            self._break("the earlier training run never came to its end")
            return None, None
        run.stop()
        self._kept, self._run = run.kept, None
        return run.spool, run.config.out_dir

    def _fail(self, error: Exception) -> None:
        """Switch the audit off; only our own exceptions are known to hold no private text in their message."""
        ours = isinstance(error, LeakAuditError)
        self._speaks = isinstance(error, PeersError) and error.first
        self._switch_off(f"{type(error).__name__}: {error}" if ours else type_and_place(error))

    def _switch_off(self, reason: str) -> None:
        """Stop auditing, and say why once; training goes on.

        The other processes of a distributed run are told.
        """
        run, said = self._run, bool(self._off)
        self._off, self._run = self._off or reason, None
        notes = list(self._come_away(run, reason))
        if not said:
            logger.warning(
                "leakaudit is off for this run: %s; training goes on without it", "; ".join([reason, *notes])
            )

    def _come_away(self, run: AuditRun | None, reason: str) -> Iterator[str]:
        """Take everything off a run and mark its folder; yield what came of it, a clause each."""
        try:
            if run is not None:
                run.stop()
                if run.untouched() and _writes(run.stack.peers):
                    run.spool.discard()
        except Exception as error:
            yield f"it could not be switched off cleanly ({type_and_place(error)})"
        if run is not None and (not _writes(run.stack.peers) or run.recorder.counters.kept or run.spool.entries()):
            return  # what was kept stays
        folder = folder_of(self.config) if run is None else run.config.out_dir
        try:
            yield from _marked(folder, reason, speaks=self._speaks)
        except Exception as error:
            yield f"{folder} may hold results of an earlier run and could not be marked as not audited ({type_and_place(error)})"


def _marked(folder: Path | None, reason: str, *, speaks: bool = False) -> Iterator[str]:
    """Mark the folder of a run that is not audited; yield what became of an earlier audit there.

    A run that is switched off leaves a folder alone that does not exist.
    """
    if folder is None:
        yield "its `out_dir` could not be read, so that folder may still hold results of an earlier run"
    elif (speaks or _writes(peers_of())) and (reason != SWITCHED_OFF or folder.exists()):
        place = mark(folder, reason)
        if place.note:
            yield place.note


def _recipe(model: nn.Module, config: AuditConfig) -> tuple[ModelRecipe, AuditConfig]:
    """Describe how to rebuild a model; where it is attacked in this process, its name is enough.

    Attacks on labels take milliseconds, so a classifier of arrays that nobody else can make is attacked in this process unless
    the configuration says when.

    Raises:
        ModelError: nothing says how, and another process would have to.
    """
    inline = config.schedule == "inline"
    if isinstance(model, ArrayClassifier):
        recipe = array_recipe(model)
        if recipe.made_by or inline:
            return recipe, config
        if "schedule" not in config.model_fields_set:
            return recipe, config.model_copy(update={"schedule": "inline"})
        ModelRecipe.of(model.net)  # says what to do
    try:
        return ModelRecipe.of(model), config
    except ModelError:
        if not inline:
            raise
        return ModelRecipe(class_name=type(model).__name__), config


def _labels_only(stack: TrainerContext, num_labels: int) -> TrainerContext:
    """Return a run on arrays as one whose model brings its loss, like those of text; the loop goes on calling its own."""
    return replace(
        stack,
        model=labels_only(stack.model, num_labels, stack.criterion),
        called=stack.model if stack.called is None else stack.called,
        tokenizer=NoText(),
    )


def _words_of(model: nn.Module) -> dict[str, Any]:
    """Return what the recorder needs to know of a model whose forward passes are kept in other words than the loop's."""
    if not isinstance(model, ArrayClassifier):
        return {}
    return {"as_kept": functools.partial(array_pass, num_labels=model.num_labels)}


def auditable(root: nn.Module, source: Source = None) -> tuple[nn.Module, nn.Module]:
    """Return the object that a training loop calls and the model to audit in it.

    That is the root itself, out of its wrappers, if it can be rebuilt elsewhere; else the one model inside it that can, such as a
    model of transformers in a LightningModule. Parameters beside it are trained, but not part of the audit; the report says so.
    With `schedule: inline` a root that nobody can rebuild is audited in the training process.

    Args:
        root: what the loop calls.
        source: the audit's configuration.

    Raises:
        ModelError: there is none, or more than one.
    """
    inline = configuration(source).schedule == "inline"
    if can_rebuild(unwrapped(root)) or (inline and hasattr(unwrapped(root), "config")):
        return root, unwrapped(root)  # a model's own class, be it the user's: not only the part of it that is known
    found: list[tuple[str, nn.Module]] = []
    layers = [("", unwrapped(root))]
    while layers and not found:
        below = [(f"{name}.{part}", m) for name, module in layers for part, m in module.named_children()]
        found = [(name, module) for name, module in below if can_rebuild(unwrapped(module))]
        layers = [(name, unwrapped(module)) for name, module in below]
    if len(found) == 1:
        return found[0][1], unwrapped(found[0][1])
    if inline:
        return root, unwrapped(root)
    names = ", ".join(name.removeprefix(".") for name, _ in found) or "none"
    raise ModelError(
        f"{type(root).__name__} is no model that the side process can rebuild, and inside it {len(found)} were found ({names}); "
        "one is needed. Name how to make the model with `leakaudit.models.factories.rebuilt_by(model, 'package.module:function')`, or set "
        "`schedule: inline`"
    )


def refuse_strategy(name: str, *, fsdp2: bool) -> None:
    """Refuse the ways of distributing a model whose update no hook sees.

    Args:
        name: of the strategy, as the framework calls it.
        fsdp2: whether it is FSDP2, which keeps parameters as they are.

    Raises:
        SnapshotError: names it and what to use instead.
    """
    kind = name.upper()
    reason = ""
    if "DEEPSPEED" in kind:
        reason = "DeepSpeed moves the weights inside backward, where no hook sees the update; train with FSDP2 or DDP to audit"
    elif ("FSDP" in kind or "FULLYSHARDEDDATAPARALLEL" in kind) and not fsdp2:
        reason = "FSDP1 keeps parameters flattened and in shards; train with FSDP2 (`fully_shard`) or DDP to audit"
    elif kind in ("DATAPARALLEL", "DATAPARALLELSTRATEGY"):
        reason = "DataParallel splits a batch over threads, where its parts are not seen; use DDP, or one GPU, to audit"
    elif "MEGATRON" in kind or "XLA" in kind or "TPU" in kind:
        reason = f"{name} keeps its updates where no hook of an optimizer sees them; train with FSDP2 or DDP to audit"
    if reason:
        raise SnapshotError(reason)


def _together(begin: Callable[[ProcessGroup | None], AuditRun]) -> AuditRun:
    """Begin in all processes of a distributed run or in none.

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


def _among(stack: TrainerContext, peers: ProcessGroup | None) -> TrainerContext:
    """Return what an adapter knows of a run, with the processes it met.

    Processes that train alone stay alone.

    Raises:
        SnapshotError: the model is shared out among the processes in a way that is not audited.
    """
    if stack.peers is None or peers is None:
        return stack
    called = stack.model if stack.called is None else stack.called
    check_layout(unwrapped(stack.model), called, reduced=stack.observe == "update")
    return replace(stack, peers=peers)


def _writes(peers: ProcessGroup | None) -> bool:
    return peers is None or peers.first


def configuration(source: Source) -> AuditConfig:
    """Return the configuration, wherever it comes from."""
    if source is None:
        return AuditConfig()
    return AuditConfig.model_validate(source) if isinstance(source, Mapping) else load_config(source)


def _check_plugins(config: AuditConfig) -> None:
    """Refuse what the side process could not use: better now than after hours of training.

    Raises:
        ConfigError: an attack, a defence or an option that does not exist, or a policy that cannot be read or names one.
    """
    for registry, specs in ((attacks, config.attacks), (defenses, config.defenses)):
        for spec in specs:
            registry.create(spec.name, spec.options)
    _policy(config)


def _write(spool: Spool, private: bool, foreign: frozenset[str], kept: KeptStep) -> None:
    """Write a kept step into the spool; runs in the recorder's thread and takes everything from `kept`.

    Args:
        spool: takes it.
        private: whether the optimizer is one of Opacus, whose loaders put a batch of nobody's data in place of an empty draw.
        foreign: tensors that the model, made again, will not have.
        kept: the step.
    """
    kept = fitting(kept, foreign)
    facts, provenance, recipe = kept.manifest.facts, kept.manifest.provenance, kept.manifest.recipe
    truth = replace(kept.truth, reading=reading_of(facts))
    check_words(facts, truth)
    bound, loose = believed_bound(facts, truth)
    divisor, uneven = believed_divisor(truth)
    autocast = recipe.autocast or AUTOCAST.get(kept.autocast) if kept.autocast else recipe.autocast
    again = sum(batch.repeated_pass for batch in kept.truth.micro_batches)
    notes = [note for note in (recipe.note, loose, uneven) if note]
    if again:
        notes.append(f"{again} forward passes saw a batch that another one had seen")
    recipe = recipe.model_copy(
        update={
            "loss": "pulls" if kept.has_output_gradients else "forward",
            "loss_scale": kept.loss_scale,
            "training": kept.training,
            "eval_modules": kept.eval_modules,
            "autocast": autocast,
            "note": "; ".join(notes),
        }
    )
    if private and _is_placeholder(kept):
        raise SnapshotError(
            "the Poisson draw was empty, and the loader made up a batch in its place, which is nobody's data"
        )
    everything = [name for name in (*facts.shared, *facts.frozen) if name not in foreign]
    sent = kept.update.keys() if kept.part is None else kept.part.sketches.keys()
    manifest = kept.manifest.model_copy(
        update={
            "recipe": recipe,
            "checked": kept.checked,
            "facts": facts.model_copy(
                update={
                    "training_mode": kept.training,
                    "batch_size_bound": bound,
                    "loss_divisor": divisor,
                    "own_loss": kept.own_loss,
                    "dtype": AUTOCAST_DTYPES.get(str(autocast), facts.dtype),
                    "input_shape": _input_shape(kept),
                    "shared": tuple(name for name in everything if name in sent),
                    "frozen": tuple(name for name in everything if name not in sent),
                }
            ),
            "provenance": provenance.model_copy(
                update={
                    "created": datetime.now(UTC).isoformat(timespec="seconds"),
                    "copy_seconds": round(kept.copy_seconds, 4),
                    "check_seconds": round(kept.check_seconds, 4),
                    "not_in_place": kept.not_in_place,
                }
            ),
        }
    )
    parts: dict[str, Any] = {"update": kept.update, "weights": kept.weights, "truth": kept.truth}
    if (part := kept.part) is not None:
        manifest = manifest.model_copy(update={"parts": _kept_parts(kept, part)})
        parts["sketches"] = part.sketches
        parts["table"] = part.rows if part.rows in kept.weights else None
        parts["rows"] = None if part.index is None or part.values is None else (part.index, part.values)
    parts["manifest"] = manifest
    spool.write(kept.step, frozen=kept.frozen, **parts)
    notify(f"kept step {kept.step} ({len(kept.update)} updates, copied in {kept.copy_seconds * 1000:.0f} ms)")


def _kept_parts(kept: KeptStep, part: PartOfStep) -> KeptParts:
    """Describe what is there of a step that was not kept as a whole."""
    gone = tuple(name for name in part.sketches if name not in kept.update and name != part.rows)
    return KeptParts(blocks=BLOCKS, parameters=kept.parameters, rows=part.rows, not_kept=gone)


def _parts_to_keep(
    config: AuditConfig, stack: TrainerContext, model: nn.Module, recipe: ModelRecipe, fit: Fit, recorder: Recorder
) -> Parts | None:
    """Return which parts of each step to keep; None to keep all.

    Parts are kept if all of a step would be too much.

    That is where an attack of the configuration reads the first blocks only, and the model can be rebuilt without the others.
    """
    size = recorder.bytes_of_a_step()
    elsewhere = config.schedule == "inline" or config.server is not None
    if config.keep == "all" or size <= KEEP_ALL_BYTES or elsewhere or stack.peers or stack.observe != "update":
        return None
    needs = {spec.name: getattr(attacks.create(spec.name, spec.options), "needs", WHOLE) for spec in config.attacks}
    reading = [name for name, need in needs.items() if need != WHOLE]
    parts = first_parts(model, recipe, fit.unlike) if reading else None
    if parts is not None:
        rest = [name for name in needs if name not in reading]
        more = f"; attacks that read everything do not run: {', '.join(rest)} (`keep: all` runs them)" if rest else ""
        notify(
            f"a step of this model takes {size / 1e9:.1f} GB; kept is what {' and '.join(reading)} needs of the first {BLOCKS} blocks, and a "
            f"sketch of the rest{more}"
        )
    return parts


def _input_shape(kept: KeptStep) -> tuple[int, ...] | None:
    """Return the shape of one example of a batch of arrays."""
    inputs = kept.truth.micro_batches[0].inputs.get("inputs")
    return None if inputs is None else tuple(inputs.shape[1:])


def _is_placeholder(kept: KeptStep) -> bool:
    """Return whether a batch is one row of zeros and ones: what Opacus' `rand_on_empty` makes of an empty draw."""
    parts = [batch.inputs.get("inputs", batch.inputs["input_ids"]) for batch in kept.truth.micro_batches]
    rows = [row for part in parts for row in part]
    return len(rows) == 1 and bool(((rows[0] == 0) | (rows[0] == 1)).all())


def unused_private_model(model: nn.Module) -> str:
    """Return a sentence where a model computes gradients per example and the optimizer adds no noise to them; else nothing.

    `make_private` returns a model, an optimizer and a loader; training with the optimizer it was given is no private training.
    """
    per_example = any("GradSampleModule" in kind.__name__ for kind in type(model).__mro__) or any(
        hasattr(p, "grad_sample") for p in model.parameters()
    )
    if not per_example:
        return ""
    return (
        "the model computes a gradient for every example, as Opacus does, but the optimizer that moves it adds no noise: this run "
        "is audited as undefended. Train with the optimizer that `make_private` returned"
    )


def _facts(stack: TrainerContext, model: nn.Module, declared: tuple[DeclaredDefense, ...]) -> PublicFacts:
    """Note what is public about every step of a run."""
    known: dict[str, Any] = {
        "training": True,
        "batch_size_bound": stack.batch_size_bound,
        "dtype": str(_dtype(stack.optimizer, model)).removeprefix("torch."),
        "defenses": declared,
    }
    if isinstance(model, ArrayClassifier):
        facts = array_facts(model, (), **known)  # the shape is known from the first batch on
    else:
        facts = public_facts(model, stack.tokenizer, task=_task(model), **known)
    names = {name: plain_name(name) for name in facts.shared}
    view = {"update": "reduced" if stack.peers is not None else "local", "local": "local", "delta": "delta"}[
        stack.observe
    ]
    update: dict[str, Any] = {
        "shared": tuple(names.values()),
        "tied": tuple((plain_name(a), plain_name(b)) for a, b in facts.tied),
        "view": view,
    }
    if stack.observe == "delta":
        rate = base_optimizers(stack.optimizer)[0].param_groups[0]["lr"]
        update |= {"local_steps": stack.local_steps, "learning_rate": float(rate)}
    return facts.model_copy(update=update)


def _dtype(optimizer: Any, model: nn.Module) -> torch.dtype:
    """Return the type in which the update is computed.

    It is the coarsest of the parameters that are trained.
    """
    moved = {id(p) for mover in base_optimizers(optimizer) for p in parameters_of(mover)}
    trained = (p for p in model.parameters() if id(p) in moved)
    return coarsest_dtype(trained) or dtype_of(model)


def _fresh_adapters(model: nn.Module) -> bool:
    """Return whether LoRA's B matrices are all zero, as they are made: then the update of every A is zero and tells nothing."""
    last = [p for name, p in model.named_parameters() if ".lora_B." in name and p.requires_grad]
    return bool(last) and not any(bool(own_part(p.detach()).any()) for p in last)


def _neftune_alpha(model: nn.Module) -> float | None:
    """Return the strength of NEFTune's noise, which transformers and trl keep as an attribute of the word embeddings."""
    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None  # type: ignore[operator]
    alpha = getattr(table, "neftune_noise_alpha", None)
    return None if alpha is None else float(alpha)


def _plan(run: AuditRun) -> str:
    """Return the line that describes the plan of this run.

    It says which steps are kept, how long attacks on them may take, and whether the policy can pass.
    """
    config, plan = run.config, run.plan
    if plan.kept == 0:
        return plan.steps_in_words()
    size = run.recorder.bytes_of_a_step()
    once = run.recorder.bytes_to_write() - size
    room = max(0, int(config.max_spool_gb * 1e9) - once) // max(1, size)
    clauses = [
        f"{plan.steps_in_words()}, {attacked_when(config)} ({time_in_words(config)})",
        room_in_words(plan, config, room),
        plan.policy_in_words(config, room),
        f"report in {config.out_dir}",
        f"off with {OFF_SWITCH}=1",
    ]
    return "; ".join(filter(None, clauses))


def _reasons(totals: Totals, config: AuditConfig) -> list[str]:
    """Return how many due steps were not kept, a clause for each reason."""
    return [f"{counted(number, 'step')} not kept: {why}" for number, why in totals.not_kept(config)]


def _steps_of(stack: TrainerContext) -> int | None:
    """Return the steps of the run as the audit counts them.

    A round of local steps counts once, if the client sends those.
    """
    if stack.total_steps is None or stack.observe != "delta":
        return stack.total_steps
    return stack.total_steps // stack.local_steps


def _policy(config: AuditConfig) -> Policy:
    """Return the policy that the gate will apply.

    Raises:
        ConfigError: it cannot be read, or names an attack, a defence or a metric that does not exist.
    """
    return default_policy() if config.policy is None else load_policy(config.policy, registered_names())


def _task(model: nn.Module) -> Any:
    """Return the task that the model is made for.

    The names of its class and of those that it is derived from tell it.
    """
    names = [kind.__name__ for kind in type(model).__mro__]
    if any(name.endswith("ForSequenceClassification") for name in names):
        return "classification"
    config = getattr(model, "config", None)
    words = hasattr(model, "get_output_embeddings") and model.get_output_embeddings() is not None  # type: ignore[operator]
    if words and getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder"
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        return "causal-lm"
    return "masked-lm" if words and any(name.endswith(("ForMaskedLM", "ForPreTraining")) for name in names) else "other"


def _with_defenses(config: AuditConfig, private: PrivateSgd | None, manifest: Manifest) -> Manifest:
    """Return a manifest with the current knobs of the private optimizer.

    Schedulers change them after each step.
    """
    if private is None:
        return manifest
    facts = manifest.facts.model_copy(update={"defenses": _declared(config, private)})
    return manifest.model_copy(update={"facts": facts})


def _declared(config: AuditConfig, private: PrivateSgd | None) -> tuple[DeclaredDefense, ...]:
    """Return what the run's protocol declares: what its optimizer does, then the shipped defence, its knobs converted by their types.

    Where both are one defence, the optimizer's own numbers count.
    """
    optimizer = private.declared() if private else ()
    shipped: Any = defenses.create(config.shipped_defense.name, config.shipped_defense.options)
    if shipped.is_identity() or any(declared.name == shipped.name for declared in optimizer):
        return optimizer
    return (*optimizer, shipped.declared())


def _numbers(attempts: list[Attempt]) -> dict[str, float]:
    """Return the strongest attack's number for each metric; a metric that nothing measured is left out."""
    found: dict[str, float] = {}
    for name, metric in METRICS.items():
        values = [s.value for a in attempts if isinstance(s := a.scores.get(metric), Score)]
        if values:
            found[f"leakaudit/{name}"] = max(values)
    return found
