"""Keeps what a client transmits: the weights before the step, the update as the optimizer gets it, the batch.

No framework is imported here; adapters say when a step is due and what its batch was. The one place where the final gradient
can be read in every stack is a step pre-hook on the innermost optimizer: after accumulation, unscaling, clipping and a
defence's noise, before the weights move.

The training thread copies into buffers that are reused, and nothing else; writing happens in the background. Nothing raises
into training: a step that cannot be written is counted, anything unforeseen is reported once and ends the recording.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.errors import LeakAuditError, NonFiniteUpdateError, SnapshotError
from leakaudit.models import state_of
from leakaudit.snapshot import Manifest, MicroBatch, Truth, check_finite

logger = logging.getLogger(__name__)

WRAPPERS = ("original_optimizer", "optimizer", "_optimizer")
"""Attributes under which Opacus, Accelerate and Lightning keep the optimizer they wrap."""


@dataclass(frozen=True)
class Kept:
    """One step, copied to the CPU."""

    step: int
    update: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    truth: Truth
    manifest: Manifest
    """What the adapter knew of the step when it began."""
    copy_seconds: float


@dataclass
class Counters:
    """What the recorder did, for the last line and the report."""

    kept: int = 0
    not_finite: int = 0
    failed: int = 0
    """Steps that were due and could not be kept: a full disk, an empty batch, an optimizer without gradients."""
    blocked_s: float = 0.0
    """Seconds of the training thread spent in the recorder."""


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that moves the weights, out of the wrappers of Accelerate, Lightning and Opacus.

    Wrappers subclass `Optimizer` without calling its constructor, so hooks on them fail; they are looked up in the instance,
    because some delegate every attribute.
    """
    while True:
        inner = next((vars(optimizer)[name] for name in WRAPPERS if name in vars(optimizer)), None)
        if inner is None:
            return optimizer  # type: ignore[no-any-return]
        optimizer = inner


@dataclass
class _Armed:
    """The step that is being recorded."""

    step: int
    manifest: Manifest
    batches: list[MicroBatch] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Persistent buffers before the first forward pass, which may change them (batch norm)."""


class Recorder:
    """Records single steps of one model and optimizer."""

    def __init__(self, model: nn.Module, optimizer: Any, write: Callable[[Kept], None]) -> None:
        """Prepare; hooks are set by `install`.

        Args:
            model: the unwrapped model whose parameters the optimizer moves.
            optimizer: it, or a wrapper around it.
            write: called in a background thread with each kept step; its exceptions are reported, never raised.
        """
        self._model = model
        self._optimizer = innermost(optimizer)
        self._write = write
        self._armed: _Armed | None = None
        self._buffers: dict[str, Tensor] = {}
        self._handles: list[Any] = []
        self._writer: threading.Thread | None = None
        self.counters = Counters()
        self.disabled = False

    # ------------------------------------------------------------------ what adapters call

    def install(self) -> None:
        """Set the hooks and make the buffers; a second call changes nothing."""
        if not self._handles:
            self._make_buffers()
            self._handles = [
                self._optimizer.register_step_pre_hook(self._before_step),
                self._optimizer.register_step_post_hook(self._after_step),
            ]

    def remove(self) -> None:
        """Take the hooks off and wait for the writer."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._armed = None
        if self._writer is not None:
            self._writer.join()

    def writing(self) -> bool:
        """Return whether a kept step is still on its way to the disk."""
        return self._writer is not None and self._writer.is_alive()

    def arm(self, step: int, manifest: Manifest) -> None:
        """Record the step that begins now.

        Args:
            step: its number.
            manifest: everything about it that is not a tensor, as it is now: the writer must not look it up later.
        """
        if not self.disabled:
            self._armed = _Armed(step, manifest)

    def disarm(self) -> None:
        """Forget what was recorded of a step that did not come to its end."""
        self._armed = None

    @property
    def armed(self) -> bool:
        """Whether the current step is being recorded."""
        return self._armed is not None

    def micro_batch(self, inputs: Mapping[str, Any], num_items: Any = None) -> None:
        """Keep one micro-batch and the random state; call immediately before its forward pass."""
        armed = self._armed
        if armed is None:
            return
        start = time.perf_counter()
        try:
            if not armed.batches:
                armed.buffers = {name: b.detach().clone() for name, b in self._model.named_buffers()}
            armed.batches.append(
                MicroBatch(
                    inputs={k: v.detach().to("cpu", copy=True) for k, v in inputs.items() if isinstance(v, Tensor)},
                    rng=_random_state(self._model),
                    num_items=None if num_items is None else torch.as_tensor(num_items).detach().to("cpu", copy=True),
                )
            )
        except Exception as error:
            self._give_up(error)
        self.counters.blocked_s += time.perf_counter() - start

    # ------------------------------------------------------------------ the optimizer's hooks

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Copy now, or after the closure where the optimizer computes its gradients itself."""
        if self._armed is None:
            return None
        closure = kwargs.get("closure") or next((a for a in args[1:] if callable(a)), None)
        if closure is None:
            self._copy()
            return None
        first = True

        def observed() -> Any:
            nonlocal first
            loss = closure()
            if first:
                first = False
                self._copy()
            return loss

        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": observed}
        return tuple(observed if a is closure else a for a in args), kwargs

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._armed = None

    def _copy(self) -> None:
        armed, self._armed = self._armed, None
        if armed is None or self.disabled:
            return
        start = time.perf_counter()
        try:
            self._keep(armed, start)
        except Exception as error:
            self._give_up(error)
        self.counters.blocked_s += time.perf_counter() - start

    def _keep(self, armed: _Armed, start: float) -> None:
        if self.writing():
            return  # buffers are in use; the adapter counts a skipped step before it comes to this
        mine = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        scale = getattr(self._optimizer, "grad_scale", None)  # set by a GradScaler for fused optimizers
        update = {
            name: parameter.grad
            for name, parameter in self._model.named_parameters()
            if parameter.grad is not None and id(parameter) in mine
        }
        weights = state_of(self._model)
        weights |= {name: buffer for name, buffer in armed.buffers.items() if name in weights}
        kept = Kept(
            step=armed.step,
            update={name: self._into_buffer(f"u/{name}", g, torch.float32, scale) for name, g in update.items()},
            weights={name: self._into_buffer(f"w/{name}", w, w.dtype, None) for name, w in weights.items()},
            truth=Truth(tuple(armed.batches)),
            manifest=armed.manifest,
            copy_seconds=time.perf_counter() - start,
        )
        self._writer = threading.Thread(target=self._write_quietly, args=(kept,), name="leakaudit-writer")
        self._writer.start()

    def _make_buffers(self) -> None:
        """Allocate and touch the buffers before training begins: page faults would make the first copy twenty times as slow.

        MiniLM on one thread: 330 ms for a first copy into fresh memory, 15 ms for every later one.
        """
        trained = {id(p) for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad}
        for name, parameter in self._model.named_parameters():
            if id(parameter) in trained:
                self._buffers[f"u/{name}"] = torch.empty(parameter.shape, dtype=torch.float32).fill_(0.0)
        for name, tensor in state_of(self._model).items():
            self._buffers[f"w/{name}"] = torch.empty(tensor.shape, dtype=tensor.dtype).fill_(0)

    def _into_buffer(self, key: str, source: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
        """Copy into a reused buffer: fresh allocations cost six times as much in page faults."""
        source = source.detach()
        if source.is_sparse:
            source = source.to_dense()
        if scale is not None:
            source = source / scale
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != dtype:
            buffer = self._buffers[key] = torch.empty(source.shape, dtype=dtype)
        return buffer.copy_(source)

    def _write_quietly(self, kept: Kept) -> None:
        try:
            _check_worth_keeping(kept)
            self._write(kept)
            self.counters.kept += 1
        except NonFiniteUpdateError:
            self.counters.not_finite += 1
            logger.warning("step %d was not kept: its update is not finite", kept.step)
        except LeakAuditError as error:
            self.counters.failed += 1
            # A disk that is full now is full at the next step, too: once is a message, the rest is noise.
            level = logging.WARNING if self.counters.failed == 1 else logging.DEBUG
            logger.log(level, "step %d was not kept: %s", kept.step, error)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Report the first problem and do nothing any more: training comes first."""
        self.disabled = True
        self._armed = None
        self.counters.failed += 1
        logger.warning(
            "leakaudit stops recording after a %s; training goes on, later steps are not audited", type(error).__name__
        )


def _check_worth_keeping(kept: Kept) -> None:
    """Refuse a step that nothing could be said about.

    Raises:
        NonFiniteUpdateError: the update holds NaN or infinity.
        SnapshotError: no gradient, no batch, or a batch without tokens.
    """
    if not kept.update:
        raise SnapshotError(
            "the optimizer held no gradient when it stepped; optimizers that move the weights during the backward pass "
            "cannot be audited"
        )
    if any("input_ids" not in batch.inputs for batch in kept.truth.micro_batches):
        raise SnapshotError("its batch has no `input_ids`; only models that read token ids can be audited")
    if not any(batch.inputs["input_ids"].numel() for batch in kept.truth.micro_batches):
        raise SnapshotError("its batch was empty")
    check_finite(kept.update)


def _random_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the states of the random generators that dropout draws from; reading them changes nothing."""
    states = {"cpu": torch.get_rng_state()}
    device = next(model.parameters()).device
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states
