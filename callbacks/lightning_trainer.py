"""`LeakAuditCallback` for the Lightning `Trainer`, in either of its package namespaces.

    audit = LeakAuditCallback("leakaudit.yaml", tokenizer=tokenizer)
    Trainer(..., callbacks=[audit]).fit(module)

A classifier of pictures or tables has no tokenizer; `LeakAuditCallback("leakaudit.yaml", num_labels=10)` audits its labels.

Lightning runs forward and backward inside the optimizer's step, and no callback of its own comes after clipping; so the audit
looks at the optimizer and at the model inside the module, and takes from Lightning only when training begins and ends. It never
raises into the run; `LEAKAUDIT_DISABLED=1` switches it off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from leakaudit.callbacks.arrays import classifier_in, labels_of
from leakaudit.callbacks.audit_run import (
    OFF_SWITCH,
    Guarded,
    Source,
    Stack,
    StepNow,
    auditable,
    never_raises,
    refuse_strategy,
)
from leakaudit.callbacks.distributed import peers_of
from leakaudit.callbacks.recorder import innermost
from leakaudit.callbacks.side_process import say
from leakaudit.errors import SnapshotError

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback


class LeakAuditCallback(Guarded, Callback):
    """Keeps a real client step now and then, lets a side process attack it, and reports what could be read."""

    def __init__(
        self,
        config: Source = None,
        *,
        tokenizer: Any = None,
        num_labels: int | None = None,
        criterion: torch.nn.Module | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Remember the configuration; nothing is read, written or started before training begins.

        Args:
            config: a YAML file, the object, a mapping, or None for the defaults.
            tokenizer: the model's; without it, the module's attribute `tokenizer` is taken.
            num_labels: C, for a classifier of arrays: any module that turns one array (B, ...) into logits (B, C). Labels are those
                that a batch names, or the last entry of a batch such as (inputs, labels).
            criterion: its loss, where that is another one than mean cross-entropy and the protocol says so.
            batch_size: largest batch of a step, where the protocol makes it public; else attacks have to guess how many labels
                there are.
        """
        self._source = config
        self._known = {
            "tokenizer": tokenizer,
            "num_labels": num_labels,
            "criterion": criterion,
            "batch_size_bound": batch_size,
        }
        self._reset()

    def _reset(self) -> None:
        Guarded.__init__(self)
        self._trainer: Any = None
        self._optimizer: Any = None
        self._hook: Any = None
        self._steps = 0

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the configuration only: a copy of a running audit is a new, idle one (`ddp_spawn` makes one)."""
        return {"_source": self._source, "_known": self._known}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Come back idle."""
        self.__dict__.update(state)
        self._reset()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, so that resuming goes on counting."""
        return {"kept": self._kept if self._run is None else self._run.kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the count of a checkpoint."""
        self._kept = int(state_dict.get("kept", 0))

    # ------------------------------------------------------------------ the trainer's events

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the spool, set the hooks, say what will happen."""
        self._off = ""
        self._begin(trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Tell of the batch: the module may keep its labels from the model."""
        if self._run is not None:
            self._run.recorder.batch(batch if isinstance(batch, Mapping) else labels_of(batch))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """See to the side process, and log what it has found since."""
        if self._run is not None:
            self._look_after()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the side process and say where the report is."""
        self._unhook()
        self._finish()
        if self._off and self._off != OFF_SWITCH:
            say(f"this run was not audited: {self._off}")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the side process to its own; Lightning calls nothing else after an exception."""
        self._unhook()
        self._break_off(f"training ended with {type(exception).__name__}")

    @never_raises
    def _begin(self, trainer: Any, pl_module: Any) -> None:
        self._unhook()
        self._trainer = trainer
        self._open(self._source, lambda: self._look(trainer, pl_module))
        if self._run is not None:
            self._steps = int(trainer.global_step)
            self._hook = innermost(self._optimizer).register_step_post_hook(self._stepped)
            self._next()

    def _look(self, trainer: Any, pl_module: Any) -> Stack:
        strategy = type(trainer.strategy).__name__
        refuse_strategy(strategy, fsdp2=strategy == "ModelParallelStrategy")
        known = self._known
        if known["num_labels"] is None:
            called, core = auditable(pl_module, self._source)
            known = known | {"tokenizer": known["tokenizer"] or getattr(pl_module, "tokenizer", None)}
        else:
            called = core = classifier_in(pl_module)
        self._optimizer = _mover(trainer.optimizers, core)
        planned = (
            trainer.max_steps if trainer.max_steps and trainer.max_steps > 0 else trainer.estimated_stepping_batches
        )
        return Stack(
            framework="lightning.Trainer",
            versions={"torch": torch.__version__, "lightning": _version()},
            model=core,
            called=called,
            optimizer=self._optimizer,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            total_steps=int(planned) if math.isfinite(planned) else None,
            kept_before=self._kept if trainer.global_step else 0,
            log=self._log,
            peers=peers_of(trainer.world_size),
            **known,
        )

    def _next(self) -> None:
        if self._run is not None:
            self._run.decide(self._now, self._steps)

    @never_raises
    def _stepped(self, *args: Any) -> None:
        """Count a step; called by the optimizer after the weights have moved, and not for steps that a GradScaler skips."""
        self._steps += 1
        self._next()

    def _now(self) -> StepNow:
        trainer = self._trainer
        bound = trainer.gradient_clip_val if trainer.lightning_module.automatic_optimization else None
        by_value = str(getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)) == "value"
        return StepNow(
            step=self._steps,
            epoch=float(trainer.current_epoch),
            total_steps=None if self._run is None else self._run.stack.total_steps,
            learning_rate=float(innermost(self._optimizer).param_groups[0]["lr"]),
            max_grad_norm=float(bound) if bound and not by_value else None,
            max_grad_value=float(bound) if bound and by_value else None,
        )

    @never_raises
    def _look_after(self) -> None:
        if self._run is not None:
            self._run.after_step()

    @never_raises
    def _finish(self) -> None:
        self._close(self._steps)

    @never_raises
    def _break_off(self, what: str) -> None:
        self._break(what)

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _log(self, numbers: dict[str, float]) -> None:
        for logger in self._trainer.loggers:
            logger.log_metrics(numbers, step=self._trainer.fit_loop.epoch_loop._batches_that_stepped)


def _mover(optimizers: list[Any], model: torch.nn.Module) -> Any:
    """Return the optimizer that moves the model.

    Raises:
        SnapshotError: none does, or several do.
    """
    mine = {id(p) for p in model.parameters()}
    found = [
        optimizer
        for optimizer in optimizers
        if any(id(p) in mine for group in innermost(optimizer).param_groups for p in group["params"])
    ]
    if len(found) != 1:
        raise SnapshotError(
            f"{len(found)} of {len(optimizers)} optimizers move the model that is audited; one has to, so that one update is "
            "what the client sends"
        )
    return found[0]


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    for name in ("lightning", "pytorch-lightning"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"
