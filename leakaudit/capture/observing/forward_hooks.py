"""Hooks that record a model's inputs and the gradients that reach its outputs.

A loss may be computed anywhere: in the model, in the trainer or in user code. The audit need not know where, because each gradient
reaches the parameters through the model's outputs. So a step can be repeated exactly from the call, the random state before the forward
pass, and the gradient that arrived at each output. If the model computes the loss itself, this output gradient is one number: the weight
that the trainer gave to the loss.

Hooks are on the model only while a step is recorded, and they only read: training computes the same numbers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.capture.boundary import Hook, around, entry
from leakaudit.capture.observing.calls import CallContext, ModelCall, copied
from leakaudit.models.tensors import outputs_of
from leakaudit.models.wrappers import unwrapped

MOST_BYTES = 512_000_000
"""Most bytes of output gradients that are held in a step. Our choice: logits of 2,000 tokens over 60,000 words fit. Where the model
computes the loss itself, one number a pass is held."""

SMALL_BYTES = 1_000_000
"""Size in bytes up to which an output gradient stays on the device, and is held even where a loss inside the model explains it. Our
choice: the logits of a classifier and a batch of pooled states fit, the logits of a language model do not."""


@dataclass
class BackwardPass:
    """The gradients that one backward pass sent to the outputs of one forward pass."""

    accumulates: bool
    """Whether it adds to the parameters' gradients; `torch.autograd.grad` does not."""
    output_gradients: dict[str, Tensor] = field(default_factory=dict)
    """Path of an output -> the whole gradient that arrived there, directly or through later outputs; in the output's shape."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Path of an output whose gradient was not held, because a loss inside the model came first -> sum and norm of the gradient, (2,)."""

    unexplained: set[str] = field(default_factory=set)
    """Paths of the other outputs whose gradients the repeated loss inside the model has not explained yet."""

    @property
    def has_inner_loss(self) -> bool:
        """Whether the backward pass started from a loss that the model computed itself.

        Such a loss is an output of one number.
        """
        return any(gradient.dim() == 0 for gradient in self.output_gradients.values())


@dataclass
class ForwardPass:
    """One forward pass of the step that is being recorded."""

    inputs: dict[str, Tensor]
    """Name of a parameter of `forward` -> tensor that the model was called with; copies on the CPU."""
    options: dict[str, bool | float] = field(default_factory=dict)
    """Plain values that the model was called with."""
    rng: dict[str, Tensor] = field(default_factory=dict)
    """Device type -> state of torch's default generator before the pass."""
    num_items: Tensor | None = None
    """What the trainer gave the model as `num_items_in_batch`; None where it did not."""
    withheld_inputs: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of the batch that the trainer did not give to the model, such as labels for a loss of its own; copies."""
    backwards: dict[int, BackwardPass] = field(default_factory=dict)
    """Number of a backward pass that reached this pass -> the gradients that it sent."""
    autocast: torch.dtype | None = None
    too_large: bool = False
    """Whether the gradients at its outputs were larger than may be held, as when the loop computes a loss over a large vocabulary."""
    stepped: bool = False
    """Whether a local step used its gradients. Emptying the gradients afterwards does not undo that."""
    repeated_pass: bool = False
    """Whether it saw the same examples as another pass of the same backward pass (R-Drop): one batch, two passes."""
    call: ModelCall | None = None
    """The call itself, to be repeated."""
    context: CallContext | None = None
    """What the call depends on beside its arguments and the model."""
    weights: dict[int, Tensor] = field(default_factory=dict)
    """Identity of a parameter that had another value than in the first pass -> that value; copies on the CPU."""
    modes: list[tuple[nn.Module, bool]] = field(default_factory=list)
    """Modules that were in another mode than in the first pass, each with True for training mode."""
    on_other_weights: bool = False
    """Whether it ran on other weights than the first pass."""
    entered: bool = False
    """Whether the call reached `forward`; set only if calls of `forward` are recorded."""
    differentiable: bool = False
    """Whether one of its gradients can be differentiated again (`create_graph`), as a penalty on gradients requires."""
    counts_all_outputs: bool = False
    """Whether the gradients at all outputs count, because the loss inside the model does not explain them."""

    @property
    def contributing(self) -> dict[int, BackwardPass]:
        """The backward passes that the update comes from: those that add to gradients.

        If no backward pass adds to gradients, all count. A saliency map takes a gradient with `torch.autograd.grad` before the loss is
        differentiated, and is no part of the update. But a loop that computes all its gradients that way has no other backward passes.
        """
        adding = {number: one for number, one in self.backwards.items() if one.accumulates}
        return adding or self.backwards

    @property
    def backward(self) -> int | None:
        """Number of the first backward pass that the update comes from; None without any."""
        return min(self.contributing, default=None)

    @property
    def output_gradients(self) -> dict[str, Tensor]:
        """Path of an output -> the gradient that the contributing passes sent there."""
        found: dict[str, Tensor] = {}
        for one in self.contributing.values():
            for path, gradient in one.output_gradients.items():
                found[path] = found[path] + gradient if path in found else gradient
        scalars = {path: gradient for path, gradient in found.items() if gradient.dim() == 0}
        return scalars if scalars and not self.counts_all_outputs else found


class ForwardHooks:
    """Hooks that record the forward passes of one module and their output gradients."""

    def __init__(
        self,
        model: nn.Module,
        began: Callable[[ForwardPass], None],
        reached: Callable[[ForwardPass, int], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Prepare; nothing is hooked before `open`.

        Args:
            model: the object that the training loop calls, wrappers included: hooks inside a compiled model do not fire.
            began: called with each pass immediately before its forward.
            reached: called when a backward pass arrives at a pass for the first time, before any gradient of it is
                accumulated, with the number of that backward.
            failed: called with each exception that is raised in a hook, which would otherwise end the training.
        """
        self.model = model
        self._began = began
        self._reached = reached
        self._failed = failed
        self._names = forward_names(model)
        self._handles: list[Any] = []
        self._running: list[ForwardPass] = []
        self._held = 0
        """Bytes of output gradients that are held of this step."""
        self._direct: list[bool] = []
        """For each running call of `forward`: whether the loop itself called it."""
        self.paused = False
        """Whether calls are not recorded now, because the audit makes them itself."""
        self.watches_forward = False
        """Whether calls of `model.forward`, which reach no hook, are recorded as well."""
        self.holds_everything = False
        """Whether a gradient at an output is held even where a loss inside the model came first."""
        self.due_again = False
        """Whether the next step is to be recorded, because the last one lacked something that is held from then on."""

    def watch_forward(self) -> None:
        """Record calls of `model.forward` from the next step on."""
        self.watches_forward = self.due_again = True

    def hold_everything(self) -> None:
        """Hold all gradients at the outputs from the next step on."""
        self.holds_everything = self.due_again = True

    def open(self) -> None:
        """Set the hooks; a second call changes nothing."""
        if self._handles:
            return
        self._held = 0
        self._handles = [
            self.model.register_forward_pre_hook(Hook(self._before), with_kwargs=True, prepend=True),
            self.model.register_forward_hook(Hook(self._after)),
        ]
        compiled = getattr(self.model, "_compiled_call_impl", None)
        if compiled is not None:  # `model.compile()`: hooks would be compiled into the graph, and fire once
            self._handles[0].remove()
            self._handles[1].remove()
            self.model._compiled_call_impl = around(compiled, self._called, self._returned)
            self._handles = [_Undo(functools.partial(setattr, self.model, "_compiled_call_impl", compiled))]
        elif self.watches_forward and not {"forward", "_orig_mod"} & {*vars(self.model), *self.model._modules}:
            forward = _Forward(around(self.model.forward, self._forward_called, self._forward_returned))
            forward.model = self.model
            vars(self.model)["forward"] = forward
            self._handles.append(_Undo(functools.partial(vars(self.model).pop, "forward", None)))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._running = []
        self._direct = []

    def _fail(self, error: Exception) -> None:
        self._failed(error)

    @entry
    def _called(self, *args: Any, **kwargs: Any) -> None:
        self._before(self.model, args, kwargs)

    @entry
    def _returned(self, outputs: Any) -> None:
        self._after(self.model, (), outputs)

    @entry
    def _forward_called(self, *args: Any, **kwargs: Any) -> None:
        direct = not self.paused and not (self._running and not self._running[-1].entered)
        self._direct.append(direct)
        if direct:
            self._before(self.model, args, kwargs)
        if self._running and not self.paused:
            self._running[-1].entered = True

    @entry
    def _forward_returned(self, outputs: Any) -> None:
        if self._direct.pop():
            self._after(self.model, (), outputs)

    @entry
    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if module is not self.model:
            return  # a copy of the model has our hooks as well
        if self.paused or not torch.is_grad_enabled():
            return  # an evaluation, or a reference model: it has no part in the update
        named = {**dict(zip(self._names, args, strict=False)), **kwargs}
        items = named.pop("num_items_in_batch", None)
        seen = ForwardPass(
            inputs=copied(named),
            options={name: value for name, value in named.items() if isinstance(value, bool | int | float)},
            num_items=None if items is None else torch.as_tensor(items).detach().to("cpu", copy=True),
            autocast=_autocast(next(module.parameters()).device),
        )
        seen.call = ModelCall.of(args, kwargs, {id(named[name]): copy for name, copy in seen.inputs.items()})
        seen.context = CallContext.now()
        self._running.append(seen)
        self._began(seen)

    @entry
    def _after(self, _module: nn.Module, _args: Any, outputs: Any) -> None:
        if self.paused or not torch.is_grad_enabled() or not self._running:
            return
        seen = self._running.pop()
        for path, tensor in outputs_of(outputs):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._arrived, seen, path))

    @entry
    def _arrived(self, seen: ForwardPass, path: str, gradient: Tensor | None) -> None:
        """Keep the gradient that arrives at an output, or its sum and norm.

        Sum and norm are enough if a loss inside the model came first and may explain the gradient. A scalar output is computed from the
        other outputs, so a backward pass reaches it before them.
        """
        if gradient is None:
            return  # DDP sends None to outputs that the loss does not use
        number = torch._C._current_graph_task_id()
        one = seen.backwards.get(number)
        if one is None:
            self._reached(seen, number)
            one = seen.backwards[number] = BackwardPass(self._accumulates())
            seen.differentiable |= torch.is_grad_enabled()
        gradient = gradient.detach()
        size = gradient.numel() * gradient.element_size()
        if one.has_inner_loss and gradient.dim() == 0 and path not in one.output_gradients:
            return  # a part of the loss that the model also returns by itself
        full = self._held + size > MOST_BYTES
        if one.has_inner_loss and (full or size > SMALL_BYTES) and not self.holds_everything:
            one.sums[path] = sums(gradient)
        elif full:
            seen.too_large = True
        else:
            self._held += size
            one.output_gradients[path] = gradient.clone() if size <= SMALL_BYTES else gradient.to("cpu", copy=True)

    def _accumulates(self) -> bool:
        """Return whether the running backward pass adds to gradients of the model."""
        if torch.autograd._is_checkpoint_valid():
            return True  # `backward()` without `inputs`
        trained = [p for p in self.model.parameters() if p.requires_grad]
        nodes = (torch.autograd.graph.get_gradient_edge(p).node for p in trained)
        try:
            return any(torch._C._will_engine_execute_node(node) for node in nodes)
        except RuntimeError:  # torch raises it within `torch.autograd.grad`
            return False


def sums(tensor: Tensor) -> Tensor:
    """Return the sum and the norm of a tensor, (2,) float32 on its device."""
    return torch.stack((tensor.sum(dtype=torch.float32), torch.linalg.vector_norm(tensor, dtype=torch.float32)))


class _Forward(functools.partial[Any]):
    """The function that replaces a model's `forward` while a step is recorded.

    Copies and pickles of the model get the `forward` of its class.
    """

    model: nn.Module

    def __reduce__(self) -> Any:
        """Restore the `forward` of the class."""
        return getattr, (self.model, "forward")


class _Undo:
    """A handle whose `remove` calls a function."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self.remove = undo


def forward_names(model: nn.Module) -> list[str]:
    """Return the names of the positional parameters of the unwrapped model's forward."""
    forward = unwrapped(model).forward
    with contextlib.suppress(ValueError, TypeError):
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return [name for name, p in inspect.signature(forward).parameters.items() if p.kind in kinds]
    return []


def _autocast(device: torch.device) -> torch.dtype | None:
    enabled = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if enabled else None
