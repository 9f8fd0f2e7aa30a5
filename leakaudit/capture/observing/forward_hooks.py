"""Hooks that record a model's inputs and the gradients that reach its outputs.

A loss may be computed anywhere: in the model, in the trainer or in user code. The audit need not know where, because each gradient
reaches the parameters through the model's outputs. So a step can be computed again from the inputs, the random state before the forward
pass, and the gradient that arrived at each output. If the model computes the loss itself, the gradient at the loss is one number: the
weight that the trainer gave to it.

Inputs are recorded as `forward` gets them, and outputs as `forward` returns them: our hooks are called next to it, inside the user's own
hooks on the same module. Hooks are set only while a step is recorded, and they only read: training computes the same numbers.
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
from torch.utils.hooks import unserializable_hook

from leakaudit.capture.boundary import LEFT_OUT, Hook, around, entry
from leakaudit.capture.observing.calls import copied
from leakaudit.models.tensors import outputs_of
from leakaudit.models.wrappers import unwrapped

MOST_BYTES = 512_000_000
"""Most bytes of output gradients that are held in a step. Our choice: logits of 2,000 tokens over 60,000 words fit. Where the model
computes the loss itself, one number a pass is held."""

MOST_BYTES_BESIDE_LOSS = 64_000_000
"""Most bytes of them in a step if the model also returns a loss, which explains them in most loops. Our choice: logits of 500 tokens over
30,000 words fit."""

SMALL_BYTES = 1_000_000
"""Size in bytes up to which an output gradient stays on the device. Our choice: the logits of a classifier and a batch of pooled states
fit, the logits of a language model do not."""


@dataclass
class BackwardPass:
    """The gradients that one backward pass sent to the outputs of one forward pass."""

    accumulates: bool
    """Whether it adds to the parameters' gradients; `torch.autograd.grad` does not."""
    output_gradients: dict[str, Tensor] = field(default_factory=dict)
    """Path of an output -> the whole gradient that arrived there, directly or through later outputs; in the output's shape."""
    unheld: set[str] = field(default_factory=set)
    """Paths of other outputs that a gradient reached; it was too large to be held beside a loss that the model computed."""

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
    eval_modules: tuple[str, ...] = ()
    """Modules of the audited model that were in eval mode; the name of the model itself is empty."""
    on_other_weights: bool = False
    """Whether it ran on other weights than the first pass."""
    entered: bool = False
    """Whether the call reached `forward`; set only if calls of `forward` are recorded."""
    differentiable: bool = False
    """Whether one of its gradients can be differentiated again (`create_graph`), as a penalty on gradients requires."""

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
        return found

    @property
    def unheld(self) -> frozenset[str]:
        """Paths of outputs whose gradients were too large to be held beside a loss."""
        return frozenset(path for one in self.contributing.values() for path in one.unheld)


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
        """Bytes of gradients at the model's outputs that are held of this step."""
        self._held_inside = 0
        """Bytes of gradients at outputs of modules inside the model. They take no room from the others, without which a step is not kept."""
        self._left_out = 0
        """How often hooks had been left out of a graph when these were set."""
        self._inside: dict[str, nn.Module] = {}
        """Path -> module inside the model at whose output the gradient is recorded as well."""
        self._reached_by: dict[int, list[ForwardPass]] = {}
        """Number of a backward pass of this step -> the passes that it reached."""
        self._direct: list[bool] = []
        """For each running call of `forward`: whether the loop itself called it."""
        self.watches_forward = False
        """Whether calls of `model.forward`, which reach no hook, are recorded as well."""
        self.due_again = False
        """Whether the next step is to be recorded, because the last one lacked something that is held from then on."""

    def watch_forward(self) -> None:
        """Record calls of `model.forward` from the next step on."""
        self.watches_forward = self.due_again = True

    def watch_inside(self, modules: Mapping[str, nn.Module]) -> None:
        """Record the gradients at the outputs of modules inside the model, by path.

        Code of a compiled model calls no hooks there, so nothing is recorded in it.
        """
        self._inside = dict(modules)

    def open(self) -> None:
        """Set the hooks; a second call changes nothing."""
        if self._handles:
            return
        self._held = self._held_inside = 0
        self._reached_by = {}
        self._left_out = LEFT_OUT["hooks"]
        self._handles = [
            nn.Module.register_forward_pre_hook(self.model, Hook(self._before), with_kwargs=True),
            nn.Module.register_forward_hook(self.model, Hook(self._after), prepend=True),
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
        if self._inside and not _is_compiled(self.model):
            for path, module in self._inside.items():
                hook = Hook(functools.partial(self._made_inside, path))
                self._handles.append(nn.Module.register_forward_hook(module, hook, prepend=True))

    @property
    def left_out_of_a_graph(self) -> bool:
        """Whether the model was compiled after `open`, for which hooks would break it."""
        return LEFT_OUT["hooks"] > self._left_out

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
        direct = not (self._running and not self._running[-1].entered)
        self._direct.append(direct)
        if direct:
            self._before(self.model, args, kwargs)
        if self._running:
            self._running[-1].entered = True

    @entry
    def _forward_returned(self, outputs: Any) -> None:
        if self._direct.pop():
            self._after(self.model, (), outputs)

    @entry
    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if module is not self.model:
            return  # a copy of the model has our hooks as well
        if not torch.is_grad_enabled() or _transformed():
            return  # an evaluation, or a reference model: it has no part in the update
        named = {**dict(zip(self._names, args, strict=False)), **kwargs}
        items = named.pop("num_items_in_batch", None)
        seen = ForwardPass(
            inputs=copied(named),
            options={name: value for name, value in named.items() if isinstance(value, bool | int | float)},
            num_items=None if items is None else torch.as_tensor(items).detach().to("cpu", copy=True),
            autocast=_autocast(next(module.parameters()).device),
        )
        self._running.append(seen)
        self._began(seen)

    @entry
    def _after(self, _module: nn.Module, _args: Any, outputs: Any) -> None:
        if not torch.is_grad_enabled() or _transformed() or not self._running:
            return
        seen = self._running.pop()
        for path, tensor in outputs_of(outputs):
            if tensor.requires_grad:
                self._hook(tensor, seen, path)

    @entry
    def _made_inside(self, path: str, module: nn.Module, _args: Any, outputs: Any) -> None:
        """Note the output of a module inside the model.

        Checkpointing calls the module again during a backward pass. A reentrant checkpoint makes the output without a graph first, and
        differentiates the second one in a backward pass of its own: that one counts for the backward pass around it. Nothing reaches the
        second output of a checkpoint that is not reentrant.
        """
        tensor = next((tensor for _, tensor in outputs_of(outputs)), None)
        if module is not self._inside[path] or tensor is None or not tensor.requires_grad:
            return
        around_it = torch._C._current_graph_task_id()
        if around_it == -1:
            found, number = self._running[-1:], None
        else:
            found, number = self._reached_by.get(around_it, []), around_it
        if len(found) == 1:  # two passes of one backward pass (R-Drop) cannot be told apart
            self._hook(tensor, found[0], path, number)

    def _hook(self, tensor: Tensor, seen: ForwardPass, path: str, number: int | None = None) -> None:
        """Set a hook on an output.

        If the user pickles the output, torch warns of hooks that are lost, with their `repr`. This one is unknown to the user and holds the
        private batch, so it is marked as one whose loss is meant.
        """
        tensor.register_hook(unserializable_hook(functools.partial(self._arrived, seen, path, number=number)))

    @entry
    def _arrived(self, seen: ForwardPass, path: str, gradient: Tensor | None, number: int | None = None) -> None:
        """Keep the gradient that arrives at an output.

        A loss of one number is computed from the other outputs, so a backward pass reaches it before them.

        Args:
            seen: the pass that made the output.
            path: of the output.
            gradient: what arrived.
            number: of the backward pass; None for the one that runs.
        """
        if gradient is None:
            return  # DDP sends None to outputs that the loss does not use
        number = torch._C._current_graph_task_id() if number is None else number
        one, inside = seen.backwards.get(number), path in self._inside
        if one is None:
            self._reached_by.setdefault(number, []).append(seen)
            self._reached(seen, number)
            one = seen.backwards[number] = BackwardPass(self._accumulates())
            seen.differentiable |= torch.is_grad_enabled()
        gradient = gradient.detach()
        size = gradient.numel() * gradient.element_size()
        most = MOST_BYTES_BESIDE_LOSS if one.has_inner_loss and not inside else MOST_BYTES
        if self._held + size + (self._held_inside if inside else 0) <= most:
            self._held += 0 if inside else size
            self._held_inside += size if inside else 0
            one.output_gradients[path] = gradient.clone() if size <= SMALL_BYTES else gradient.to("cpu", copy=True)
        elif inside:
            return  # the step is kept without it, and cannot be verified
        elif one.has_inner_loss:
            one.unheld.add(path)
        else:
            seen.too_large = True

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


def _transformed() -> bool:
    """Return whether a transform of `torch.func` runs.

    Its tensors have no hooks and cannot be copied; what it computes does not arrive at the model's outputs in a backward pass.
    """
    return torch._C._functorch.maybe_current_level() is not None


def _is_compiled(model: nn.Module) -> bool:
    """Return whether a part of a model is compiled or scripted."""
    return any(
        isinstance(module, torch.jit.ScriptModule)
        or getattr(module, "_compiled_call_impl", None) is not None
        or "_orig_mod" in module._modules
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        for module in model.modules()
    )


def _autocast(device: torch.device) -> torch.dtype | None:
    enabled = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if enabled else None
