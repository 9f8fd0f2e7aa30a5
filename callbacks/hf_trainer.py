"""`LeakAuditCallback` for the Hugging Face `Trainer` and its subclasses.

    audit = LeakAuditCallback("leakaudit.yaml")
    trainer = Trainer(..., callbacks=[audit])
    audit.attach(trainer)          # for labels that the trainer keeps from the model, and for its loggers
    trainer.train()

Put it last among the callbacks, so that what another one does to the gradients is in what it sees. It never raises into the
run; `LEAKAUDIT_DISABLED=1` switches it off.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from leakaudit.callbacks.audit_run import OFF_SWITCH, AuditRun, Guarded, Stack, StepNow, never_raises, refuse_strategy
from leakaudit.callbacks.distributed import peers_of
from leakaudit.callbacks.side_process import say
from leakaudit.config import AuditConfig
from leakaudit.errors import SnapshotError


class LeakAuditCallback(Guarded, TrainerCallback, ExportableState):
    """Keeps a real client step now and then, lets a side process attack it, and reports what could be read."""

    def __init__(
        self, config: AuditConfig | Mapping[str, Any] | Path | str | None = None, *, num_labels: int | None = None
    ) -> None:
        """Remember the configuration; nothing is read, written or started before training begins.

        Args:
            config: a YAML file, the object (or its JSON, as a checkpoint keeps it), or None for the defaults.
            num_labels: C, for a classifier of arrays, such as `AutoModelForImageClassification`: its labels are audited.
        """
        self._source = config if config is not None else AuditConfig()
        self._num_labels = num_labels
        self._reset()

    def _reset(self) -> None:
        Guarded.__init__(self)
        self._trainer: Any = None
        self._control: TrainerControl | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the configuration only: a copy of a running audit is a new, idle one."""
        return {"_source": self._source, "_num_labels": self._num_labels}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Come back idle."""
        self.__dict__.update(state)
        self._reset()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the configuration and how many steps were kept, so that resuming goes on counting."""
        source = self._source
        config = source.model_dump(mode="json") if isinstance(source, AuditConfig) else source
        kept = self._kept if self._run is None else self._run.kept
        arguments = {"config": str(config) if isinstance(config, Path) else config, "num_labels": self._num_labels}
        return {"args": arguments, "attributes": {"_kept": kept}}

    def attach(self, trainer: Any) -> LeakAuditCallback:
        """Read the batch where the trainer has it whole: labels included, before any forward hook.

        Without it the batch is what the model is given, which lacks labels that the trainer keeps for a loss of its own; nothing
        is logged to the trainer's loggers; and a run that ends in an exception ends its audit only when the process ends or
        trains again.

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
        def training_step(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            run = self._run
            if run is not None and isinstance(inputs, Mapping):
                run.recorder.batch(inputs)
            return original_step(model, inputs, *args, **kwargs)

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
            self._control = control
            self._after_step(self._run)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait for the side process and say where the report is."""
        if self._run is not None:
            self._control = control
            self._end(state.global_step)
        if self._off and self._off != OFF_SWITCH:
            say(f"this run was not audited: {self._off}")

    @never_raises
    def _begin(self, args: TrainingArguments, state: TrainerState, kwargs: dict[str, Any]) -> None:
        def stack() -> Stack:
            _refuse(args, self._trainer)
            trainer = self._trainer
            return Stack(
                framework="transformers.Trainer",
                versions={"torch": torch.__version__, "transformers": transformers.__version__},
                model=kwargs["model"],
                optimizer=kwargs["optimizer"],
                tokenizer=kwargs.get("processing_class"),
                num_labels=self._num_labels,
                called=None if trainer is None else trainer.model_wrapped,
                batch_size_bound=args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size,
                total_steps=state.max_steps or None,
                kept_before=_kept_before(state, type(self).__name__),
                log=None if trainer is None else self._log,
                peers=peers_of(args.world_size),
            )

        self._open(self._source, stack)

    @never_raises
    def _decide(self, run: AuditRun, args: TrainingArguments, state: TrainerState, kwargs: dict[str, Any]) -> None:
        run.decide(lambda: self._now(args, state, kwargs), state.global_step)

    def _now(self, args: TrainingArguments, state: TrainerState, kwargs: dict[str, Any]) -> StepNow:
        scheduler = kwargs.get("lr_scheduler")
        rates = scheduler.get_last_lr() if scheduler is not None and hasattr(scheduler, "_last_lr") else [None]
        precision = getattr(getattr(self._trainer, "accelerator", None), "mixed_precision", None)
        return StepNow(
            step=state.global_step,
            epoch=state.epoch,
            total_steps=state.max_steps or None,
            loss=next((entry["loss"] for entry in reversed(state.log_history) if "loss" in entry), None),
            learning_rate=rates[0],
            max_grad_norm=args.max_grad_norm or None,
            autocast=precision or ("bf16" if args.bf16 else "fp16" if args.fp16 else None),
            kept_rng=not args.torch_compile,  # compiled dropout draws from a generator of its own
        )

    @never_raises
    def _after_step(self, run: AuditRun) -> None:
        run.recorder.disarm()  # if it is still armed the optimizer never stepped: an overflow, or a skipped batch
        run.after_step()

    @never_raises
    def _end(self, steps: int) -> None:
        self._close(steps)

    @never_raises
    def _break_off(self, what: str) -> None:
        self._break(what)

    def _log(self, numbers: dict[str, float]) -> None:
        control = self._control
        due = control is not None and control.should_log
        self._trainer.log(numbers)
        if control is not None:  # logging resets it, and the trainer's own line of this step would be lost
            control.should_log = due


def _refuse(args: TrainingArguments, trainer: Any) -> None:
    """Refuse the runs whose update no hook sees.

    Raises:
        SnapshotError: names the feature and what to use instead.
    """
    accelerator = getattr(trainer, "accelerator", None)
    fsdp2 = bool(getattr(accelerator, "is_fsdp2", False))
    refuse_strategy("DEEPSPEED" if getattr(args, "deepspeed", None) else _kind(accelerator), fsdp2=fsdp2)
    refuse_strategy("FSDP" if getattr(args, "fsdp", None) else "", fsdp2=fsdp2)
    refuse_strategy("DataParallel" if args.n_gpu > 1 else "", fsdp2=False)
    if args.torch_compile and trainer is None:
        raise SnapshotError("hooks inside a compiled model do not fire; call `attach(trainer)` to put them around it")


def _kind(accelerator: Any) -> str:
    kind = getattr(accelerator, "distributed_type", "")
    return str(getattr(kind, "value", kind))


def _kept_before(state: TrainerState, name: str) -> int:
    """Return how many steps a run kept before the checkpoint that it was resumed from."""
    states: Any = state.stateful_callbacks or {}
    stored = states.get(name) if state.global_step else None
    entries = stored if isinstance(stored, list) else [stored]
    return sum(int(entry["attributes"].get("_kept", 0)) for entry in entries if entry)
