"""`LeakAuditCallback` for the Hugging Face `Trainer`: schedules the recorder, runs the side process, logs its numbers.

    audit = LeakAuditCallback("leakaudit.yaml")
    trainer = Trainer(..., callbacks=[audit])
    audit.attach(trainer)          # for the exact batch and loss
    trainer.train()

Put it last among the callbacks, so that what another one does to the gradients is in what it sees. It never raises into the
run; `LEAKAUDIT_DISABLED=1` switches it off.
"""

from __future__ import annotations

import functools
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ParamSpec

import torch
import transformers
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from leakaudit.callbacks.recorder import Kept, Recorder
from leakaudit.callbacks.side_process import SideProcess, by_hand, say
from leakaudit.client import public_facts
from leakaudit.config import AuditConfig, load_config
from leakaudit.errors import LeakAuditError
from leakaudit.gate import load_policy
from leakaudit.models import ModelRecipe
from leakaudit.registry import attacks, defenses
from leakaudit.scores import Attempt, Overhead, Score, load_journal
from leakaudit.snapshot import (
    DeclaredDefense,
    Manifest,
    Provenance,
    PublicFacts,
    StepRecipe,
    dropout_rates,
    write_snapshot,
)
from leakaudit.spool import Place, Spool, Totals, make_room

logger = logging.getLogger(__name__)

P = ParamSpec("P")

OFF_SWITCH = "LEAKAUDIT_DISABLED"
SPARE_DISK = 3
"""Free disk that a snapshot asks for, in sizes of the model: it takes two, weights and update."""

AUTOCAST_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}

METRICS = {"exact_rate": "exact", "r1": "rouge1", "token_recall": "token_recall", "label_accuracy": "label_accuracy"}
"""Name in the trainer's log -> metric of the results; the strongest attack on the step counts."""


def _never_raises(method: Callable[P, None]) -> Callable[P, None]:
    """Keep every problem of the audit out of the training run: one warning, then the audit is off.

    Ctrl-C is no problem of the audit and goes through.
    """

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        audit: Any = args[0]
        if audit._off:
            return
        try:
            method(*args, **kwargs)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}" if isinstance(error, LeakAuditError) else type(error).__name__
            try:
                audit._switch_off(reason)
            except Exception as again:
                logger.warning("leakaudit could not be switched off cleanly: %s", type(again).__name__)

    return guarded


@dataclass
class _Run:
    """One audited training run; a second `trainer.train()` makes a second one."""

    config: AuditConfig
    spool: Spool
    recorder: Recorder
    side: SideProcess
    model_recipe: ModelRecipe
    facts: PublicFacts
    """What is public for as long as the run lasts; what changes from step to step is filled in per step."""
    kept_before: int
    """Steps that the run kept before it was resumed from a checkpoint."""
    forward_hook: Any = None
    started: float = field(default_factory=time.monotonic)
    skipped: int = 0
    skipped_since: int = 0
    """Skipped since the last kept step."""
    too_full: int = 0
    """Due steps that the disk had no room for."""
    journal_size: int = 0
    logged: set[str] = field(default_factory=set)
    mute: bool = False
    """A logger of the trainer failed on our numbers."""
    blocked_s: float = 0.0

    @property
    def kept(self) -> int:
        """Return the steps kept so far, the one on its way to the disk and those before a checkpoint included."""
        on_its_way = (
            self.recorder.writing()
        )  # asked first: what arrives in between is counted twice rather than not at all
        return self.kept_before + self.recorder.counters.kept + on_its_way

    @property
    def journal(self) -> Path:
        """Return where the side process notes finished attempts."""
        return self.config.out_dir / "journal.jsonl"

    def unhook(self) -> None:
        """Take every hook off the model and the optimizer, and let the writer come to its end."""
        if self.forward_hook is not None:
            self.forward_hook.remove()
            self.forward_hook = None
        self.recorder.remove()

    def totals(self, total_steps: int | None, *, interrupted: bool) -> Totals:
        """Return what the trainer's side counted."""
        blocked = self.recorder.counters.blocked_s + self.blocked_s
        training = time.monotonic() - self.started
        return Totals(
            total_steps=total_steps,
            kept=self.recorder.counters.kept,
            skipped=self.skipped,
            overhead=Overhead(blocked_s=round(blocked, 4), training_s=round(training, 4)),
            interrupted=interrupted,
        )


class LeakAuditCallback(TrainerCallback, ExportableState):
    """Keeps a real client step now and then, lets a side process attack it, and reports what could be read."""

    def __init__(self, config: AuditConfig | Mapping[str, Any] | Path | str | None = None) -> None:
        """Remember the configuration; nothing is read, written or started before training begins.

        Args:
            config: a YAML file, the object (or its JSON, as a checkpoint keeps it), or None for the defaults.
        """
        self._source = config if config is not None else AuditConfig()
        self._reset()

    def _reset(self) -> None:
        self._off = ""
        """Why the audit of this run is off; empty while it is on."""
        self._run: _Run | None = None
        self._trainer: Any = None
        self._folder: Path | None = None
        self._kept = 0

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the configuration only: a copy of a running audit is a new, idle one."""
        return {"_source": self._source}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Come back idle."""
        self._source = state["_source"]
        self._reset()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the configuration and how many steps were kept, so that resuming goes on counting."""
        source = self._source
        config = source.model_dump(mode="json") if isinstance(source, AuditConfig) else source
        kept = self._kept if self._run is None else self._run.kept
        return {"args": {"config": str(config) if isinstance(config, Path) else config}, "attributes": {"_kept": kept}}

    @property
    def folder(self) -> Path | None:
        """Folder of the audit (results.json, report.html), known once training has begun."""
        return self._folder

    def attach(self, trainer: Any) -> LeakAuditCallback:
        """Read the batch where the trainer has it whole: labels included, before any forward hook, with its loss recipe.

        Without it the batch is taken from the model's forward pass, which does not see labels that the trainer keeps back;
        nothing is logged to the trainer's loggers; and a run that ends in an exception ends its audit only when the process
        ends or trains again.

        Args:
            trainer: a `transformers.Trainer`; it is given this callback if it does not have it yet.

        Returns:
            This callback.
        """
        if self._trainer is trainer or os.environ.get(OFF_SWITCH):
            return self
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)  # without its events nothing would be kept, and nobody would say so
        self._trainer = trainer
        original_step, original_train = trainer.training_step, trainer.train

        @functools.wraps(original_step)
        def training_step(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
            self._see_batch(inputs, num_items_in_batch)
            return original_step(model, inputs, num_items_in_batch)

        @functools.wraps(original_train)
        def train(*args: Any, **kwargs: Any) -> Any:
            try:
                return original_train(*args, **kwargs)
            except BaseException as error:  # Ctrl-C as well; no event of the trainer tells of either
                self._break_off(f"training ended with {type(error).__name__}")
                raise

        trainer.training_step = training_step
        trainer.train = train
        return self

    # ------------------------------------------------------------------ the trainer's events

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make the spool, set the hook, say what will happen."""
        self._off = ""
        self._begin(args, state, kwargs)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Decide whether the step that begins is kept."""
        if self._run is not None:
            self._decide(self._run, args, state, kwargs)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Forget a step that the optimizer skipped; see to the side process; log what it has found since."""
        if self._run is not None:
            self._after_step(self._run, control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait for the side process and say where the report is."""
        if self._run is not None:
            self._end(self._run, state, control)
        if self._off and self._off != OFF_SWITCH:
            say(f"this run was not audited: {self._off}")

    @_never_raises
    def _begin(self, args: TrainingArguments, state: TrainerState, kwargs: dict[str, Any]) -> None:
        spool, folder = self._leave_earlier_run()
        if self._off:
            return  # because that went wrong, and has been said
        if os.environ.get(OFF_SWITCH) or not state.is_world_process_zero:
            self._off = OFF_SWITCH
            return
        reason = _unsupported(args)
        tokenizer = kwargs.get("processing_class") or kwargs.get("tokenizer")
        if not reason and tokenizer is None:
            reason = "the Trainer has no tokenizer: give it `processing_class=tokenizer`"
        if reason:
            self._switch_off(reason)
            return
        config = _load(self._source)
        _check_plugins(config)
        place = Place(folder) if folder else make_room(config.out_dir.absolute())
        config = config.model_copy(update={"out_dir": place.folder})
        model = kwargs["model"]
        recipe = _model_recipe(model)
        facts = _facts(args, model, tokenizer, _declared(config))
        if spool is None:
            command = shlex.join([Path(sys.executable).name, *sys.argv])
            spool = Spool.create(config.out_dir / "spool", config, tokenizer, command)
        self._folder = config.out_dir
        self._run = run = _Run(
            config=config,
            spool=spool,
            recorder=Recorder(model, kwargs["optimizer"], functools.partial(_write, spool)),
            side=SideProcess(spool, config.out_dir / "worker.log", config.threads),
            model_recipe=recipe,
            facts=facts,
            kept_before=_kept_before(state, type(self).__name__),
        )
        run.recorder.install()
        if self._trainer is None:
            run.forward_hook = model.register_forward_pre_hook(self._see_forward, with_kwargs=True)
        say(_plan(config, state.max_steps) + (f"; {place.note}" if place.note else ""))

    @_never_raises
    def _decide(self, run: _Run, args: TrainingArguments, state: TrainerState, kwargs: dict[str, Any]) -> None:
        step, config = state.global_step, run.config
        due = step >= config.first_step and (step - config.first_step) % config.every_n_steps == 0
        if not due or run.recorder.disabled or run.side.given_up or run.kept >= config.max_snapshots:
            return
        start = time.perf_counter()
        if run.spool.gone():
            self._switch_off(f"somebody removed {run.spool.root}")
        elif run.recorder.writing() or run.spool.busy():
            run.skipped += 1
            run.skipped_since += 1
        elif run.spool.free_bytes() < (needed := SPARE_DISK * _bytes_of(kwargs["model"])):
            if not run.too_full:
                logger.warning("step %d was not kept: its snapshot needs %d MB of free disk", step, needed // 10**6)
            run.too_full += 1
        else:
            run.recorder.arm(step, self._describe(run, args, state, kwargs))
        run.blocked_s += time.perf_counter() - start

    def _describe(self, run: _Run, args: TrainingArguments, state: TrainerState, kwargs: dict[str, Any]) -> Manifest:
        """Note what is public about the step, and how its loss comes about, as they are now."""
        recipe = _recipe(args, self._trainer)
        scheduler = kwargs.get("lr_scheduler")
        rates = scheduler.get_last_lr() if scheduler is not None and hasattr(scheduler, "_last_lr") else [None]
        manifest = Manifest(
            model=run.model_recipe,
            facts=run.facts.model_copy(
                update={
                    "dropout": dropout_rates(kwargs["model"].named_modules()),
                    "max_grad_norm": recipe.max_grad_norm,
                    "loss_divisor": recipe.loss_divisor,
                    "dtype": AUTOCAST_DTYPES.get(str(recipe.autocast), run.facts.dtype),
                }
            ),
            recipe=recipe,
            provenance=Provenance(
                framework="transformers.Trainer",
                versions={"torch": torch.__version__, "transformers": transformers.__version__},
                step=state.global_step,
                epoch=state.epoch,
                total_steps=state.max_steps or None,
                loss=next((entry["loss"] for entry in reversed(state.log_history) if "loss" in entry), None),
                learning_rate=rates[0],
                skipped_before=run.skipped_since,
            ),
        )
        run.skipped_since = 0
        return manifest

    @_never_raises
    def _after_step(self, run: _Run, control: TrainerControl) -> None:
        start = time.perf_counter()
        if run.recorder.armed:
            run.recorder.disarm()  # the optimizer never stepped: an overflow, or a skipped batch
        if run.recorder.counters.kept:
            run.side.ensure()
        self._log_results(run, control)
        run.blocked_s += time.perf_counter() - start

    @_never_raises
    def _end(self, run: _Run, state: TrainerState, control: TrainerControl) -> None:
        run.unhook()
        counters = run.recorder.counters
        if counters.kept == 0:
            self._forget(run)
            run.spool.discard()
            missed = run.skipped + run.too_full + counters.failed + counters.not_finite
            say(
                f"kept no step, so there is nothing to report: the run had {state.global_step} steps, {missed} were missed"
            )
            return
        totals = run.totals(state.global_step, interrupted=False)
        if run.spool.gone():
            self._forget(run)
            self._switch_off(f"somebody removed {run.spool.root}")
            return
        run.spool.finish(totals)
        run.side.wait(run.config.wait_at_end_s, run.journal)
        self._log_results(run, control)
        self._forget(run)
        report = run.config.out_dir / "report.html"
        where = f"report: {report}" if report.is_file() else f"no report: see {run.config.out_dir / 'worker.log'}"
        left = run.spool.waiting()
        say(
            f"{where}; {counters.kept} steps kept, {run.skipped} skipped because the battery was busy, "
            f"{counters.not_finite} not finite, {counters.failed + run.too_full} failed; "
            f"training was held up for {totals.overhead.blocked_s:.2f} s of {totals.overhead.training_s:.0f} s"
        )
        if left:
            say(f"{left} kept steps are not audited to the end: {by_hand(run.spool)} goes on with them")

    # ------------------------------------------------------------------ runs that end otherwise

    @_never_raises
    def _break_off(self, what: str) -> None:
        """End the audit of a run that an exception ended: what was kept is audited for as long as this process lives."""
        run = self._run
        if run is None:
            return
        run.unhook()
        self._run, self._kept = None, run.kept
        if run.recorder.counters.kept == 0:
            run.side.stop()
            run.spool.discard()
            return
        run.spool.finish(run.totals(None, interrupted=True))
        run.side.ensure()
        say(
            f"{what}; {run.recorder.counters.kept} steps were kept, and the side process goes on with "
            f"them for as long as this process lives; later, {by_hand(run.spool)} does"
        )

    def _leave_earlier_run(self) -> tuple[Spool | None, Path | None]:
        """Come away from a run that never came to its end; return its spool and folder if nothing was put into them.

        `auto_find_batch_size` begins again like this, with another optimizer, after the first step ran out of memory.
        """
        run = self._run
        if run is None:
            return None, None
        if run.recorder.counters.kept or run.recorder.writing() or run.spool.gone():
            self._break_off("the earlier training run never came to its end")
            return None, None
        run.unhook()
        self._forget(run)
        return run.spool, run.config.out_dir

    def _forget(self, run: _Run) -> None:
        """Leave no side process behind and be ready for another run."""
        run.side.stop()
        self._kept = run.kept
        self._run = None

    def _switch_off(self, reason: str) -> None:
        """Stop auditing, say why once, and leave training alone."""
        self._off = reason
        run, self._run = self._run, None
        if run is not None:
            run.unhook()
            run.side.stop()
        logger.warning("leakaudit is off for this run: %s", reason)

    # ------------------------------------------------------------------ the batch and the snapshot

    def _see_batch(self, inputs: Any, num_items: Any) -> None:
        run = self._run
        if run is not None and run.recorder.armed:
            run.recorder.micro_batch(inputs, num_items)

    def _see_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            self._see_batch(
                {k: v for k, v in kwargs.items() if k != "num_items_in_batch"}, kwargs.get("num_items_in_batch")
            )

    # ------------------------------------------------------------------ numbers for the trainer's loggers

    def _log_results(self, run: _Run, control: TrainerControl) -> None:
        """Send the numbers of every step whose attempts are all there to the trainer's loggers."""
        if self._trainer is None:
            return
        try:
            size = run.journal.stat().st_size
            if size == run.journal_size:
                return
            entries = load_journal(run.journal)
        except (OSError, LeakAuditError):
            return  # removed, or read at a bad moment; the side process itself reports a broken journal
        run.journal_size = size
        attempts: dict[str, list[Attempt]] = {}
        for entry in entries:
            if entry.attempt.defense == "none":
                attempts.setdefault(entry.attempt.step, []).append(entry.attempt)
        for step, found in attempts.items():
            if step not in run.logged and len(found) == len(run.config.attacks):
                run.logged.add(step)
                self._log({"leakaudit/step": int(step.removeprefix("st-")), **_numbers(found)}, run, control)

    def _log(self, numbers: dict[str, float], run: _Run, control: TrainerControl) -> None:
        """Log now; a logger that fails costs the numbers of this run in the log, not the audit."""
        if run.mute:
            return
        due = control.should_log  # logging resets it, and the trainer's own line of this step would be lost
        try:
            self._trainer.log(numbers)
        except Exception as error:
            run.mute = True
            logger.warning("leakaudit's numbers are not logged any more: a logger raised %s", type(error).__name__)
        control.should_log = due


def _write(spool: Spool, kept: Kept) -> None:
    """Write a kept step into the spool; runs in the recorder's thread and takes everything from `kept`."""
    facts, provenance, recipe = kept.manifest.facts, kept.manifest.provenance, kept.manifest.recipe
    if recipe.pass_num_items and all(batch.num_items is None for batch in kept.truth.micro_batches):
        # The Trainer found nothing to count (no input called `labels`), and divides by the micro-batches of the window.
        recipe = recipe.model_copy(update={"loss_divisor": float(max(1, len(kept.truth.micro_batches)))})
    everything = (*facts.shared, *facts.frozen)
    manifest = kept.manifest.model_copy(
        update={
            "recipe": recipe,
            "facts": facts.model_copy(
                update={
                    "loss_divisor": recipe.loss_divisor,
                    "shared": tuple(name for name in everything if name in kept.update),
                    "frozen": tuple(name for name in everything if name not in kept.update),
                }
            ),
            "provenance": provenance.model_copy(
                update={
                    "created": datetime.now(UTC).isoformat(timespec="seconds"),
                    "copy_seconds": round(kept.copy_seconds, 4),
                }
            ),
        }
    )
    write_snapshot(spool.slot(kept.step), update=kept.update, weights=kept.weights, truth=kept.truth, manifest=manifest)
    say(f"kept step {kept.step} ({len(kept.update)} updates, copied in {kept.copy_seconds * 1000:.0f} ms)")


def _numbers(attempts: list[Attempt]) -> dict[str, float]:
    """Return the strongest attack's number for each metric; a metric that nothing measured is left out."""
    found: dict[str, float] = {}
    for name, metric in METRICS.items():
        values = [s.value for a in attempts if isinstance(s := a.scores.get(metric), Score)]
        if values:
            found[f"leakaudit/{name}"] = max(values)
    return found


def _unsupported(args: TrainingArguments) -> str:
    """Return why this kind of run cannot be audited yet, or nothing."""
    if getattr(args, "deepspeed", None):
        return "DeepSpeed moves the weights inside backward, where no hook sees the update; train without it to audit"
    if getattr(args, "fsdp", None):
        return "FSDP shards the update; auditing it is not implemented yet; train in one process to audit"
    if args.world_size > 1:
        return f"{args.world_size} processes share this run, and their updates are summed before we see them; use one"
    if args.n_gpu > 1:
        return f"DataParallel over {args.n_gpu} GPUs is not supported; make one visible (CUDA_VISIBLE_DEVICES=0)"
    return ""


def _recipe(args: TrainingArguments, trainer: Any) -> StepRecipe:
    """Describe how `Trainer.training_step` of transformers 5.23 makes a loss and an update of a batch."""
    precision = getattr(getattr(trainer, "accelerator", None), "mixed_precision", None)
    precision = precision or ("bf16" if args.bf16 else "fp16" if args.fp16 else "no")
    common: dict[str, Any] = {
        "training": True,
        "max_grad_norm": args.max_grad_norm or None,
        "autocast": precision if precision in AUTOCAST_DTYPES else None,
        "kept_rng": not args.torch_compile,  # compiled dropout draws from a generator of its own
    }
    if trainer is None:
        if args.label_smoothing_factor:
            return StepRecipe(**common, loss="unsupported", note="label smoothing without attach(trainer)")
        note = "not attached: batch from the forward pass, scale of the loss by the Trainer's usual rule"
        return StepRecipe(**common, pass_num_items=True, note=note)  # passed on where the forward pass was given it
    if trainer.compute_loss_func is not None:
        return StepRecipe(**common, loss="unsupported", note="compute_loss_func is user code")
    for method in ("compute_loss", "training_step"):
        if getattr(type(trainer), method) is not getattr(Trainer, method):
            note = f"{type(trainer).__name__}.{method} is user code"
            return StepRecipe(**common, loss="unsupported", note=note)
    passes = bool(trainer.model_accepts_loss_kwargs)
    scaled = trainer.loss_is_scaled_for_ga if trainer.loss_is_scaled_for_ga is not None else passes
    divisor = 1.0 if scaled else float(getattr(trainer, "current_gradient_accumulation_steps", 1))
    return StepRecipe(
        **common,
        loss="label_smoothing" if trainer.label_smoother is not None else "forward",
        label_smoothing=float(args.label_smoothing_factor),
        loss_divisor=divisor,
        pass_num_items=passes,
    )


def _facts(
    args: TrainingArguments, model: nn.Module, tokenizer: Any, declared: tuple[DeclaredDefense, ...]
) -> PublicFacts:
    """Note what is public about every step of a run."""
    return public_facts(
        model,
        tokenizer,
        task=_task(model),
        training=True,
        batch_size_bound=args.per_device_train_batch_size * args.gradient_accumulation_steps,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        stage="protected" if declared else "clipped",
        defenses=declared,
    )


def _model_recipe(model: nn.Module) -> ModelRecipe:
    """Describe the model in the precision of its weights: `model.to(torch.bfloat16)` leaves its configuration behind."""
    recipe = ModelRecipe.of(model)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return recipe.model_copy(update={"config": {**recipe.config, "dtype": dtype}})


def _load(source: AuditConfig | Mapping[str, Any] | Path | str) -> AuditConfig:
    """Return the configuration, wherever it comes from."""
    return AuditConfig.model_validate(source) if isinstance(source, Mapping) else load_config(source)


def _check_plugins(config: AuditConfig) -> None:
    """Refuse what the side process could not use: better now than after hours of training.

    Raises:
        ConfigError: an attack, a defence or an option that does not exist, or a policy that cannot be read.
    """
    for registry, specs in ((attacks, config.attacks), (defenses, config.defenses)):
        for spec in specs:
            registry.create(spec.name, spec.options)
    if config.policy is not None:
        load_policy(config.policy)


def _kept_before(state: TrainerState, name: str) -> int:
    """Return how many steps a run kept before the checkpoint that it was resumed from."""
    states: Any = state.stateful_callbacks or {}
    stored = states.get(name) if state.global_step else None
    entries = stored if isinstance(stored, list) else [stored]
    return sum(int(entry["attributes"].get("_kept", 0)) for entry in entries if entry)


def _plan(config: AuditConfig, max_steps: int) -> str:
    """Return the line that says what, where, how often, and how to switch it off."""
    last = config.first_step + config.every_n_steps * (config.max_snapshots - 1)
    if max_steps <= config.first_step:
        return f"will keep no step: the run has {max_steps}, and `first_step` is {config.first_step}"
    return (
        f"keeps every {config.every_n_steps}. step from {config.first_step} (up to {config.max_snapshots}, last {last}), "
        f"attacks them in a side process, report in {config.out_dir}; off with {OFF_SWITCH}=1"
    )


def _task(model: nn.Module) -> Any:
    """Return the task by what the model is made for."""
    name = type(model).__name__
    if name.endswith("ForSequenceClassification"):
        return "classification"
    return "causal-lm" if name.endswith(("ForCausalLM", "LMHeadModel")) else "other"


def _declared(config: AuditConfig) -> tuple[DeclaredDefense, ...]:
    """Return the shipped defence as attacks know it, its knobs converted by its own types."""
    spec = config.shipped_defense
    if spec.name == "none":
        return ()
    return (DeclaredDefense(name=spec.name, parameters=asdict(defenses.create(spec.name, spec.options))),)


def _bytes_of(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())
