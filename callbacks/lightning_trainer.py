"""`LeakAuditCallback` for the Lightning `Trainer`.

Both package names work, `lightning` and `pytorch_lightning`.

    audit = LeakAuditCallback("leakaudit.yaml", tokenizer=tokenizer)
    Trainer(..., callbacks=[audit]).fit(module)

A classifier of pictures or tables has no tokenizer; `LeakAuditCallback("leakaudit.yaml", num_labels=10)` audits its labels.

Lightning runs forward and backward inside the optimizer's step, and calls no callback after clipping. So the audit looks at the
optimizer and at the model inside the module; Lightning only tells it when training and each batch begin and end. It never raises into
the run, unless `defense` asks for a defence that cannot be applied. `LEAKAUDIT_DISABLED=1` switches the audit off, and no defence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from leakaudit.capture.adapter import Adapter
from leakaudit.capture.array_batches import classifier_in, labels_of
from leakaudit.capture.boundary import entry, last_resort
from leakaudit.capture.context import Source, StepContext, TrainerContext
from leakaudit.capture.observing.optimizers import base_optimizers
from leakaudit.capture.processes.distributed import peers_of
from leakaudit.capture.refusals import auditable, optimizers_that_move, refuse_strategy
from leakaudit.capture.step_counter import StepCounter
from leakaudit.capture.trackers import OtherLogger, Tracker, Trackers, tracker_of
from leakaudit.capture.training_defense import Trained
from leakaudit.config.audit import PluginSpec

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    # Each package takes callbacks of its own class only (before 2.6 its Trainer refuses others), and a user may have both.
    NAMESPACES = ("lightning.pytorch", "pytorch_lightning")
    INSTALLED = [name for name in NAMESPACES if find_spec(name.partition(".")[0]) is not None]
    Callback = type("Callback", tuple(import_module(name).Callback for name in INSTALLED or NAMESPACES[:1]), {})


@dataclass(eq=False, repr=False)
class LeakAuditCallback(Adapter, Callback):
    """A callback that keeps training steps, has them attacked, and reports.

    A new object only stores its arguments; nothing is read, written or started before training begins.
    """

    FRAMEWORK = "lightning.Trainer"

    config: Source = None
    """A YAML file, the object, a mapping, or None for the defaults."""
    _: KW_ONLY
    tokenizer: Any = None
    """The model's tokenizer; None for the module's attribute `tokenizer`."""
    num_labels: int | None = None
    """C, for a classifier of arrays: any module that turns one array (B, ...) into logits (B, C). Labels are those that a batch names,
    or the last entry of a batch such as (inputs, labels)."""
    criterion: torch.nn.Module | None = None
    """Loss of a classifier of arrays, if it is not mean cross-entropy and the protocol makes it public."""
    batch_size: int | None = None
    """Largest batch of a step, if the protocol makes it public; else attacks have to guess how many labels there are."""
    defense: PluginSpec | str | None = None
    """Defence that changes the update which training uses, such as `gaussian-noise(scale=0.1)`; None for the key `defense` of the
    configuration. A training that cannot apply it ends with a `DefenseError`."""
    defense_seed: int | None = None
    """Seed of its random numbers, for tests: whoever knows it can remove the noise. None draws them from the operating system."""
    _trainer: Any = field(default=None, init=False)
    _optimizer: Any = field(default=None, init=False)
    _counter: StepCounter = field(default_factory=StepCounter, init=False)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the configuration only: a copy is a new audit that has not begun.

        `ddp_spawn` makes such a copy.
        """
        return {one.name: getattr(self, one.name) for one in fields(self) if one.init} | {"_counter": StepCounter()}

    @last_resort
    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, so that a resumed run continues to count."""
        return self._state() or {}

    @entry
    def _state(self) -> dict[str, Any] | None:
        return {"kept": self._kept_so_far()}

    @entry
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the count of a checkpoint."""
        self._kept = int(state_dict.get("kept", 0))

    # ------------------------------------------------------------------ the trainer's events

    @entry
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the audit and tell the user what will happen."""
        self._unhook()
        self._trainer = trainer
        self._open()
        if self._run is not None:
            self._counter.begin(self._optimizer, int(trainer.global_step), self._stepped)
            self._decide(self._counter.number)

    @entry
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note the batch: the module may withhold its labels from the model."""
        if self._run is not None:
            self._run.recorder.batch(batch if isinstance(batch, Mapping) else labels_of(batch))

    @entry
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Start a dead side process again, and log new results."""
        self._after_step()

    @entry
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the side process and tell the user where the report is."""
        self._unhook()
        self._close(self._counter.number)
        self._remind()

    @entry
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the audit of the run: Lightning calls no other event after an exception."""
        self._unhook()
        self._interrupt(f"training ended with {type(exception).__name__}")

    @entry
    def _stepped(self, *args: Any) -> None:
        """Count a step, after an optimizer has moved the weights; each optimizer calls it."""
        if self._counter.count(self._run):
            self._decide(self._counter.number)
            if self._red_line is not None:  # not at the end of a batch, which may be a part of a step
                self._trainer.should_stop = True

    @entry
    def _unhook(self) -> None:
        self._counter.remove()

    # ------------------------------------------------------------------ what the audit asks

    def _trained(self) -> Trained:
        return Trained(self._trainer.lightning_module, self._trainer.optimizers)

    def _refuse(self) -> None:
        strategy = type(self._trainer.strategy).__name__
        config = getattr(self._trainer.strategy, "config", None)
        refuse_strategy(strategy, fsdp2=strategy == "ModelParallelStrategy", config=config)

    def _versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__, "lightning": _version()}

    def _trainer_context(self) -> TrainerContext:
        trainer, module, tokenizer = self._trainer, self._trainer.lightning_module, self.tokenizer
        if self.num_labels is None:
            called, core = auditable(module, self.config)
            tokenizer = tokenizer or getattr(module, "tokenizer", None)
        else:
            called = core = classifier_in(module)
        self._optimizer = optimizers_that_move(core, trainer.optimizers)
        planned = (
            trainer.max_steps if trainer.max_steps and trainer.max_steps > 0 else trainer.estimated_stepping_batches
        )
        return TrainerContext(
            model=core,
            called=called,
            optimizer=self._optimizer,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            total_steps=int(planned) if math.isfinite(planned) else None,
            kept_before=self._kept if trainer.global_step else 0,
            peers=peers_of(trainer.world_size),
            tokenizer=tokenizer,
            num_labels=self.num_labels,
            criterion=self.criterion,
            batch_size_bound=self.batch_size,
        )

    def _step_context(self) -> StepContext:
        trainer = self._trainer
        bound = trainer.gradient_clip_val if trainer.lightning_module.automatic_optimization else None
        by_value = str(getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)) == "value"
        return StepContext(
            step=self._counter.number,
            epoch=float(trainer.current_epoch),
            total_steps=None if self._run is None else self._run.trainer.total_steps,
            learning_rate=float(base_optimizers(self._optimizer)[0].param_groups[0]["lr"]),
            max_grad_norm=float(bound) if bound and not by_value else None,
            max_grad_value=float(bound) if bound and by_value else None,
        )

    def _run_name(self) -> str:
        named = ((logger.name, logger.version) for logger in self._trainer.loggers)
        return next((f"{name or ''}-{version}" for name, version in named if version not in (None, "")), "")

    def _trackers(self) -> Trackers:
        return Trackers.of(_tracker(logger) for logger in self._trainer.loggers)


def _tracker(logger: Any) -> Tracker:
    """Return the tracker behind a logger; the logger itself if it is unknown."""
    run_id = getattr(logger, "run_id", None)
    known = tracker_of(getattr(logger, "experiment", None), run_id if isinstance(run_id, str) else None)
    return known or OtherLogger(lambda step, numbers: logger.log_metrics(numbers, step=step))


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    for name in ("lightning", "pytorch-lightning"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"
