"""The optimizers that move a model's weights, and the count of their steps.

Frameworks wrap optimizers, and a loop may have several of them. Hooks are set on the base optimizers, inside all wrappers: at their
step the gradient is final, and the weights are still those of the forward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from leakaudit.capture.boundary import entry
from leakaudit.capture.observing.entry_sample import own_part
from leakaudit.errors import SnapshotError
from leakaudit.models.wrappers import plain_name

WRAPPERS = ("original_optimizer", "optimizer", "_optimizer")
"""Attributes in which Opacus, Accelerate and Lightning keep the optimizer that they wrap. They are looked up in the object itself,
because some wrappers delegate every attribute. Other wrappers are recognized by their parameters: see `_inside`."""

WAYS_OUT = "give the audit all optimizers, `watch(model, [a, b])`, or call `requires_grad_(False)` on parameters that none of them moves"

STEP_WRAPPER = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
"""Code of the function in which torch wraps the `step` of every class of optimizers; it calls the hooks."""


def layers_of(optimizer: Any) -> list[Any]:
    """Return one optimizer and what it wraps, outermost first.

    The last one may hold several optimizers.
    """
    layers = [optimizer]
    while True:
        inside = _inside(layers[-1])
        if len(inside) != 1 or any(inside[0] is layer for layer in layers):
            return layers
        layers.append(inside[0])


def base_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that move the weights, without wrappers and containers.

    Args:
        optimizer: one, wrapped or not, or a list, tuple or mapping of them.
    """
    if (given := _given(optimizer)) is not None:
        return [mover for one in given for mover in base_optimizers(one)]
    last = layers_of(optimizer)[-1]
    inside = [one for one in _inside(last) if one is not last]
    return [mover for one in inside for mover in base_optimizers(one)] if len(inside) > 1 else [last]


def every_layer(optimizer: Any) -> Iterator[Any]:
    """Yield all given optimizers and all that they wrap."""
    for one in [optimizer] if (given := _given(optimizer)) is None else given:
        layers = layers_of(one)
        yield from layers
        inside = [inner for inner in _inside(layers[-1]) if inner is not layers[-1]]
        for inner in inside if len(inside) > 1 else []:
            yield from every_layer(inner)


def base_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the first of the base optimizers."""
    return base_optimizers(optimizer)[0]


def parameters_of(optimizer: Any) -> list[nn.Parameter]:
    """Return the parameters of an optimizer; groups may be added during training."""
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def unmoved(model: nn.Module, movers: Sequence[Any]) -> str:
    """Return a sentence on parameters that require a gradient and are in no optimizer.

    The sentence is empty if there are none. Before training it is not known whether they will have a gradient; `check_all_moved` refuses
    a step in which one of them has.
    """
    mine = {id(p) for mover in movers for p in parameters_of(mover)}
    left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in mine]
    if not left:
        return ""
    return (
        f"{_counted(left)} that require a gradient and are in no optimizer that the audit was given. A step in which one of them has a "
        f"gradient is not kept: {WAYS_OUT}"
    )


def _counted(names: Sequence[str]) -> str:
    parameters = "1 parameter" if len(names) == 1 else f"{len(names)} parameters"
    return f"the model has {parameters} (first {plain_name(names[0])!r})"


def check_all_moved(parameters: Sequence[tuple[str, nn.Parameter]], movers: Sequence[Any]) -> None:
    """Refuse a step if a parameter with a gradient is in no optimizer.

    An optimizer that the audit does not know may move it, so that the update would be only a part of what the client sends.

    Raises:
        SnapshotError: counts such parameters, names the first and says what to do.
    """
    mine = {id(p) for mover in movers for p in parameters_of(mover)}
    left = [name for name, p in parameters if id(p) not in mine and p.requires_grad and _has_gradient(p)]
    if left:
        raise SnapshotError(
            f"{_counted(left)} that have a gradient and are in no optimizer that the audit was given; {WAYS_OUT}"
        )


def _has_gradient(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and bool(own_part(parameter.grad).any())


def _given(optimizer: Any) -> list[Any] | None:
    """Return the optimizers in a list, tuple or mapping; None for a single optimizer."""
    if isinstance(optimizer, Mapping):
        return list(optimizer.values())
    return list(optimizer) if isinstance(optimizer, list | tuple) else None


def _inside(optimizer: Any) -> list[Any]:
    """Return the optimizers in an optimizer's attributes that move its parameters.

    Together they move exactly the same parameters. So a wrapper is recognized by what it does (SAM's `base_optimizer`, Lookahead), and so
    is a container (Muon for matrices, AdamW for the rest). `ZeroRedundancyOptimizer` is no wrapper: its inner optimizer moves only a share
    of the parameters.
    """
    attributes = vars(optimizer) if hasattr(optimizer, "__dict__") else {}
    known = next((attributes[name] for name in WRAPPERS if name in attributes), None)
    if known is not None and _given(known) is None:
        return [known]
    found = {id(one): one for value in attributes.values() for one in _optimizers_in(value)}
    inner = [id(p) for one in found.values() for p in parameters_of(one)]
    outer = {id(p) for p in parameters_of(optimizer)} or set(inner)
    return list(found.values()) if inner and len(set(inner)) == len(inner) and set(inner) == outer else []


def _optimizers_in(value: Any) -> Sequence[Any]:
    """Return the optimizers, wrapped or not, in the value of an attribute."""
    entries = [value] if (given := _given(value)) is None else given
    return [one for one in entries if isinstance(getattr(one, "param_groups", None), list) and hasattr(one, "step")]


def may_nest(optimizer: Any) -> bool:
    """Return whether an optimizer's `step` may call that of a parent class.

    If it does, all hooks are called a second time.
    """
    return sum("step" in vars(kind) for kind in type(optimizer).__mro__ if kind is not torch.optim.Optimizer) > 1


def steps_on_the_stack(optimizer: Any) -> int:
    """Return how many calls of an optimizer's `step` are running in this thread."""
    running, frame = 0, sys._getframe(1)
    while frame.f_back is not None:
        running += frame.f_code is STEP_WRAPPER and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return running


def nested(optimizer: Any) -> bool:
    """Return whether the hooks run for a step inside another step."""
    return may_nest(optimizer) and steps_on_the_stack(optimizer) > 1


class Rounds:
    """A counter of the steps of several optimizers of one model, in rounds.

    A round is one step of the audit. It ends when every optimizer has stepped. If one of them steps less often, the steps of the others
    in between belong to the same round. A forward pass before all have stepped begins the round again (`restart`), so a round ends with
    the last step of each.
    """

    def __init__(self, movers: Sequence[torch.optim.Optimizer]) -> None:
        """Prepare; nothing is hooked before `install`."""
        self._movers = list(movers)
        self._stepped: set[int] = set()
        self.over = len(self._movers) == 1
        """Whether the last step of an optimizer ended a round."""

    def install(self) -> list[Any]:
        """Set the hooks that are needed, before all other hooks after a step.

        Returns:
            Their handles.
        """
        if len(self._movers) == 1 and not may_nest(self._movers[0]):
            return []
        return [first(mover._optimizer_step_post_hooks, after_step(mover, self._count)) for mover in self._movers]

    def restart(self) -> None:
        """Begin the round again, without the steps made so far."""
        self._stepped.clear()

    @entry
    def _count(self, optimizer: Any, *_arguments: Any) -> None:
        self.over = False
        if nested(optimizer):
            return
        self._stepped.add(id(optimizer))
        if all(id(mover) in self._stepped for mover in self._movers):
            self.over = True
            self._stepped.clear()

    def _fail(self, _error: Exception) -> None:
        """Count every step as a round from now on.

        Then the recorder sees incomplete steps, and does not keep them.
        """
        self.over = True


def before_step(mover: Any, hook: Callable[..., Any]) -> Any:
    """Set a hook before an optimizer's step; return its handle.

    A method that the user's class overrides is the user's code, and is not called.
    """
    return torch.optim.Optimizer.register_step_pre_hook(mover, hook)


def after_step(mover: Any, hook: Callable[..., Any]) -> Any:
    """Set a hook after an optimizer's step, as `before_step` does; return its handle."""
    return torch.optim.Optimizer.register_step_post_hook(mover, hook)


def first(hooks: Any, handle: Any) -> Any:
    """Move a newly set hook before all others; return its handle."""
    hooks.move_to_end(handle.id, last=False)
    return handle
