"""`watch`, which audits a training loop of your own.

It works in plain torch, Accelerate, Fabric and Opacus.

    with watch(model, optimizer, tokenizer=tokenizer, config="leakaudit.yaml"):
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

A classifier of pictures or tables has no tokenizer: `num_labels` asks for an audit of its labels, and the loop passes them on.

    with watch(net, optimizer, num_labels=10, config="leakaudit.yaml") as audit:
        for inputs, labels in loader:
            audit.batch({"labels": labels})
            criterion(net(inputs), labels).backward()
            ...

Give it what the loop uses: the objects that `accelerator.prepare` or `privacy_engine.make_private` returned. The loop does not
change; steps are counted at the optimizer. The audit never raises into the loop, unless `defense` asks for a defence
that cannot be applied. `LEAKAUDIT_DISABLED=1` switches the audit off, and no defence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Self

import torch
from torch import nn

from leakaudit.capture.adapter import Adapter
from leakaudit.capture.boundary import entry, last_resort
from leakaudit.capture.context import Source, StepContext, TrainerContext
from leakaudit.capture.observing.local_optimizer import check_local_optimizer
from leakaudit.capture.observing.optimizers import base_optimizers, every_layer
from leakaudit.capture.processes.distributed import peers_of
from leakaudit.capture.recording.step_tensors import Observe
from leakaudit.capture.refusals import auditable, refuse_accelerate, refuse_wrapper
from leakaudit.capture.step_counter import StepCounter
from leakaudit.capture.trackers import Trackers, trackers_behind
from leakaudit.capture.training_defense import Trained
from leakaudit.config.audit import PluginSpec
from leakaudit.errors import RedLineError, SnapshotError


@dataclass(eq=False, repr=False)
class Watch(Adapter):
    """A context in which a training loop is audited.

    A new object only stores its arguments; entering it begins the audit.
    """

    FRAMEWORK = "torch"

    model: nn.Module
    """The object that the loop calls: a model of transformers, wrapped or not, or a module with one such model inside; with `num_labels`
    any classifier."""
    optimizer: Any
    """The optimizer of the loop, wrapped or not; a list if several optimizers share the model. A step of the audit ends when all of them
    have stepped after the same forward passes."""
    _: KW_ONLY
    tokenizer: Any = None
    """The model's tokenizer; None for a classifier of arrays."""
    num_labels: int | None = None
    """C, for a classifier of arrays: any module that turns one array (B, ...) into logits (B, C)."""
    criterion: nn.Module | None = None
    """Loss of a classifier of arrays, if it is not mean cross-entropy and the protocol makes it public."""
    batch_size: int | None = None
    """Largest batch of a step, if the protocol makes it public; else attacks have to guess how many labels there are."""
    config: Source = None
    """A YAML file, the object, a mapping, or None for the defaults."""
    scaler: Any = None
    """The `GradScaler`, if the loop has one that no wrapper of the optimizer holds."""
    max_grad_norm: float | None = None
    """L2 norm to which the loop clips the gradient; without it a clipped step is stamped `scaled` instead of `verified`."""
    observe: Observe = "update"
    """What the client sends. `update`: what the optimizer gets. `local`: this process's share of it, before the processes are summed.
    `delta`: the difference of the weights after `local_steps` steps of the optimizer, as in federated averaging."""
    local_steps: int = 1
    """K, for `delta`."""
    total_steps: int | None = None
    """Optimizer steps of the loop, if known; `auto` spreads the kept steps over them."""
    first_step: int = 0
    """Number of the first step, if the loop continues from a checkpoint."""
    defense: PluginSpec | str | None = None
    """Defence that changes the update which training uses, such as `gaussian-noise(scale=0.1)`; None for the key `defense` of the
    configuration. A training that cannot apply it ends with a `DefenseError`."""
    defense_seed: int | None = None
    """Seed of its random numbers, for tests: whoever knows it can remove the noise. None draws them from the operating system."""
    log: Callable[[dict[str, float]], None] | None = None
    """Called with finished numbers, such as `accelerator.log`; the trackers of an `Accelerator` get them at the audited step."""
    _counter: StepCounter = field(default_factory=StepCounter, init=False)

    @last_resort
    def __enter__(self) -> Self:
        """Begin the audit and tell the user what will happen."""
        self._begin_loop()
        return self

    @last_resort
    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """End the audit, and tell the user where the report is.

        After an exception it does not wait for the side process.
        """
        self._unhook()
        if kind is None:
            self._close(self._counter.number)
        else:
            self._interrupt(f"training ended with {kind.__name__}")
        self._remind()

    @entry
    def batch(self, values: Mapping[str, Any]) -> None:
        """Tell the audit the whole batch, before its forward pass.

        Call it if the loop withholds labels from the model: attacks are scored against them.

        Args:
            values: name -> tensor, as in `{"labels": labels}`.
        """
        if self._run is not None:
            self._run.recorder.batch(values)

    @property
    def should_stop(self) -> bool:
        """Whether the loop should end: a leak was found that `stop_on` names.

        In a distributed run it becomes true in all processes after the same step. Nothing happens unless the loop asks.
        """
        return self._red_line is not None

    def stop_if_asked(self) -> None:
        """Raise if the loop should end; for loops that an exception leaves best.

        Raises:
            RedLineError: `should_stop` is true. The message names the rule, and the numbers that violate it.
        """
        if self._red_line is not None:
            raise RedLineError(f"rule {self._red_line.rule}: {self._red_line.sentence}")

    @entry
    def _begin_loop(self) -> None:
        self._counter.number = self.first_step
        self._open()
        if self._run is not None:
            self._counter.begin(self.optimizer, self.first_step, self._stepped)
            self._next()

    @entry
    def _stepped(self, *args: Any) -> None:
        """Count a step, after an optimizer has moved the weights; each optimizer calls it."""
        if self._counter.count(self._run):
            self._after_step()
            self._next()

    @entry
    def _unhook(self) -> None:
        self._counter.remove()

    def _next(self) -> None:
        """Decide about the step that begins; a round of local steps counts as one."""
        if self._run is not None and self._counter.number % self._run.trainer.steps_per_round == 0:
            self._decide(self._counter.number // self._run.trainer.steps_per_round)

    # ------------------------------------------------------------------ what the audit asks

    def _trained(self) -> Trained:
        return Trained(self.model, self.optimizer)

    def _one_update_a_step(self) -> bool:
        return self.observe == "update"

    def _refuse(self) -> None:
        refuse_accelerate(self._accelerator_state())
        refuse_wrapper(self.model)
        if self.observe == "delta":
            check_local_optimizer(self.optimizer)
            if peers_of() is not None:
                raise SnapshotError("`observe='delta'` is for one client in one process; several share this run")

    def _versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__}

    def _trainer_context(self) -> TrainerContext:
        called, core = auditable(self.model, self.config) if self.num_labels is None else (self.model, self.model)
        return TrainerContext(
            model=core,
            called=called,
            optimizer=self.optimizer,
            tokenizer=self.tokenizer,
            num_labels=self.num_labels,
            criterion=self.criterion,
            batch_size_bound=self.batch_size,
            scaler=self.scaler,
            total_steps=self.total_steps,
            observe=self.observe,
            local_steps=self.local_steps,
            peers=peers_of(),
        )

    def _step_context(self) -> StepContext:
        rounds = self.local_steps if self.observe == "delta" else 1
        return StepContext(
            step=self._counter.number // rounds,
            total_steps=self.total_steps,
            learning_rate=float(base_optimizers(self.optimizer)[0].param_groups[0]["lr"]),
            max_grad_norm=self.max_grad_norm,
            autocast=getattr(self._accelerator_state(), "mixed_precision", None) or _fabric_precision(self.model),
            kept_rng=not _compiled(self.model),
        )

    def _trackers(self) -> Trackers | None:
        return None if self.log is None else Trackers.of(trackers_behind(self.log))

    def _accelerator_state(self) -> Any:
        """Return the state of Accelerate, which a prepared optimizer holds.

        It is None without Accelerate.
        """
        layers = every_layer(self.optimizer)
        return next((s for layer in layers if (s := vars(layer).get("accelerator_state")) is not None), None)


watch = Watch
"""The name for use in a loop: `with watch(model, optimizer, ...):`."""


def _fabric_precision(model: nn.Module) -> str | None:
    """Return the autocast of a module of Lightning Fabric.

    The autocast begins inside the module, so a hook on the module does not see it.
    """
    precision = getattr(getattr(model, "_strategy", None), "precision", None)
    return {"bf16-mixed": "bf16", "16-mixed": "fp16"}.get(str(getattr(precision, "precision", "")))


def _compiled(model: nn.Module) -> bool:
    """Return whether a model is compiled.

    The dropout of a compiled model may draw from a generator of its own.
    """
    kinds = [kind.__name__ for kind in type(model).__mro__]
    return "OptimizedModule" in kinds or getattr(model, "_compiled_call_impl", None) is not None
