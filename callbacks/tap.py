"""Sees what goes into a model and what the client's loss sends back into its outputs.

A loss may be computed anywhere: in the model, in the trainer, in user code, from a curriculum. None of that has to be known. What
reaches the parameters passes through the model's outputs, so a step is repeated exactly from the inputs, the random state before
the forward pass, and the gradient that arrived at each output: its pull. Where the model computes the loss itself, the pull is
one number, the weight that the trainer gave the loss.

Hooks are on the model for as long as a step is recorded and no longer, and only ever read: training computes the same numbers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.callbacks.accumulation import Nodes, accumulates
from leakaudit.callbacks.boundary import around, entry
from leakaudit.models import outputs_of, unwrapped

MOST_BYTES = 512_000_000
"""Most that is held of what arrives at the outputs of one pass, in bytes. Our choice: logits of 2,000 tokens over 60,000 words fit;
where the model computes the loss itself it is one number."""


@dataclass
class Pass:
    """One forward pass of the step that is being recorded."""

    inputs: dict[str, Tensor]
    """Tensors that the model was called with, by the names of its forward's parameters; copies on the CPU."""
    options: dict[str, bool | float] = field(default_factory=dict)
    """Plain values that it was called with."""
    rng: dict[str, Tensor] = field(default_factory=dict)
    num_items: Tensor | None = None
    kept_back: dict[str, Tensor] = field(default_factory=dict)
    """What the trainer had in the batch and did not give to the model, such as labels for a loss of its own; copies."""
    pulls: dict[str, Tensor] = field(default_factory=dict)
    """Path of an output -> gradient that arrived there."""
    autocast: torch.dtype | None = None
    too_large: bool = False
    """More arrived at its outputs than may be held: a loss of one's own over a large vocabulary."""
    tapped: bool = False
    """Whether pulls were looked out for; if so, a pass without any was not part of the update."""
    backward: int | None = None
    """Number of the backward pass that first reached it."""
    stepped: bool = False
    """A local step was made of it: emptying the gradients afterwards does not undo that."""
    again: bool = False
    """It saw the same tokens as another pass of the same backward (R-Drop): one batch, two passes."""


class Tap:
    """Records the forward passes of one module, with what the loss sends back to them."""

    def __init__(
        self,
        model: nn.Module,
        began: Callable[[Pass], None],
        reached: Callable[[Pass, int], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Prepare; nothing is hooked before `open`.

        Args:
            model: the object that the training loop calls, wrappers included: hooks inside a compiled model do not fire.
            began: called with each pass immediately before its forward.
            reached: called when a backward pass arrives at a pass for the first time, before any gradient of it is
                accumulated, with the number of that backward.
            failed: called with whatever goes wrong in a hook, which would end the training if it got out.
        """
        self._model = model
        self._began = began
        self._reached = reached
        self._failed = failed
        self._names = forward_names(model)
        self._handles: list[Any] = []
        self._running: list[Pass] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Tap:
        """Return an idle one: a copy that the user makes of a model carries its hooks, and is not what is audited."""
        return _idle()

    def __reduce__(self) -> tuple[Callable[[], Tap], tuple[()]]:
        """Pickle as an idle one, for the same reason."""
        return _idle, ()

    def open(self) -> None:
        """Set the hooks; a second call changes nothing."""
        if self._handles:
            return
        self._handles = [
            self._model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
            self._model.register_forward_hook(self._after),
        ]
        compiled = getattr(self._model, "_compiled_call_impl", None)
        if compiled is not None:  # `model.compile()`: hooks would be compiled into the graph, and fire once
            self._handles[0].remove()
            self._handles[1].remove()
            self._model._compiled_call_impl = around(compiled, self._called, self._returned)
            self._handles = [_Undo(functools.partial(setattr, self._model, "_compiled_call_impl", compiled))]

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._running = []

    def _fail(self, error: Exception) -> None:
        self._failed(error)

    @entry
    def _called(self, *args: Any, **kwargs: Any) -> None:
        self._before(self._model, args, kwargs)

    @entry
    def _returned(self, outputs: Any) -> None:
        self._after(self._model, (), outputs)

    @entry
    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if module is not self._model:
            return  # a copy of the model, which has our hooks
        if not torch.is_grad_enabled():
            return  # an evaluation, or a reference model: it has no part in the update
        named = {**dict(zip(self._names, args, strict=False)), **kwargs}
        items = named.pop("num_items_in_batch", None)
        seen = Pass(
            inputs=copied(named),
            options={name: value for name, value in named.items() if isinstance(value, bool | int | float)},
            num_items=None if items is None else torch.as_tensor(items).detach().to("cpu", copy=True),
            autocast=_autocast(next(module.parameters()).device),
            tapped=True,
        )
        self._running.append(seen)
        self._began(seen)

    @entry
    def _after(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if not torch.is_grad_enabled() or not self._running:
            return
        seen = self._running.pop()
        for path, tensor in outputs_of(outputs):
            if tensor.requires_grad:
                below = tensor.grad_fn.next_functions if tensor.grad_fn is not None else ()
                tensor.register_hook(functools.partial(self._arrived, seen, path, below))

    @entry
    def _arrived(self, seen: Pass, path: str, below: Nodes, pull: Tensor | None) -> None:
        """Keep what arrives at an output, unless it comes from a loss inside the model, which is enough by itself.

        A scalar output is computed from the others, so a backward pass reaches it before them.
        """
        if pull is None:
            return  # DDP sends a gradient of nothing to outputs that the loss does not use
        if not accumulates(below):
            return  # `torch.autograd.grad`, such as a saliency map: it adds to no gradient
        number = torch._C._current_graph_task_id()
        if not seen.pulls:
            self._reached(seen, number)
            seen.backward = number
        if pull.dim() > 0 and any(other.dim() == 0 for other in seen.pulls.values()):
            return
        if pull.dim() == 0 and path not in seen.pulls and any(other.dim() == 0 for other in seen.pulls.values()):
            return  # a part of the loss that the model also returns by itself
        held = sum(p.numel() * p.element_size() for p in seen.pulls.values())
        if held + pull.numel() * pull.element_size() > MOST_BYTES:
            seen.too_large = True
            return
        pull = pull.detach()
        seen.pulls[path] = seen.pulls[path] + pull if path in seen.pulls else pull.clone()


def _idle() -> Tap:
    """Return a tap that records nothing."""
    nobody: Any = lambda *given: None
    return Tap(nn.Identity(), nobody, nobody, nobody)


class _Undo:
    """Something to call instead of a hook's `remove`."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self.remove = undo


def copied(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors among some values, copied to the CPU: user code may change them in place."""
    return {k: v.detach().to("cpu", copy=True) for k, v in values.items() if isinstance(v, Tensor)}


def forward_names(model: nn.Module) -> list[str]:
    """Return the names of the positional parameters of the innermost model's forward."""
    forward = unwrapped(model).forward
    with contextlib.suppress(ValueError, TypeError):
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return [name for name, p in inspect.signature(forward).parameters.items() if p.kind in kinds]
    return []


def _autocast(device: torch.device) -> torch.dtype | None:
    enabled = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if enabled else None
