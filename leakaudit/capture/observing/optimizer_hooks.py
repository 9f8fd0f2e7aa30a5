"""Hooks on the base optimizers, before and after each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from leakaudit.capture.observing.optimizer_step import OptimizerStep
from leakaudit.capture.observing.optimizers import Rounds, after_step, before_step, first, steps_on_the_stack


class OptimizerHooks:
    """Hooks that call the recorder last before an optimizer's step and first after it.

    So the recorder sees what other hooks do to the gradients, and what the step itself did.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        before: Callable[[Any, Any, Any], Any],
        after: Callable[[Any, Any, Any], None],
    ) -> None:
        """Prepare; nothing is hooked before `install`.

        Args:
            optimizers: the base optimizers.
            before: entry that is called before each step, as torch calls a step's pre-hook.
            after: entry that is called after each step, as torch calls a step's post-hook.
        """
        self._optimizers = list(optimizers)
        self._before = before
        self._after = after
        self._handles: list[Any] = []
        self.rounds = Rounds(self._optimizers)

    @property
    def installed(self) -> bool:
        """Whether the hooks are set."""
        return bool(self._handles)

    def install(self) -> None:
        """Set the hooks."""
        self._handles = [before_step(one, self._before) for one in self._optimizers]
        for one in self._optimizers:
            self._handles.append(first(one._optimizer_step_post_hooks, after_step(one, self._after)))
        self._handles += self.rounds.install()

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def base_of(self, optimizer: Any) -> Any:
        """Return the base optimizer that calls a hook.

        A wrapper may pass itself to a hook, and may not show its base optimizer.
        """
        return self._optimizers[0] if len(self._optimizers) == 1 else optimizer

    def is_last(self, optimizer: Any) -> bool:
        """Return whether no other hook is called between ours and an optimizer's step."""
        return bool(next(reversed(optimizer._optimizer_step_pre_hooks.values())) == self._before)

    def step_of(self, optimizer: torch.optim.Optimizer) -> OptimizerStep:
        """Note what a base optimizer is given for the step that it is about to make."""
        return OptimizerStep.of(optimizer, last=self.is_last(optimizer), alone=len(self._optimizers) == 1)

    def come_last(self, *, after_step: bool = False) -> None:
        """Move our pre-step hook behind the hooks that were set after it.

        Args:
            after_step: whether this is called after a step. Otherwise a running step may be calling the hooks at this moment, and a
                dictionary must not change while it is iterated over.
        """
        for optimizer, handle in zip(self._optimizers, self._handles, strict=False):
            hooks: Any = optimizer._optimizer_step_pre_hooks
            if next(reversed(hooks), None) == handle.id or handle.id not in hooks:
                continue
            if after_step or (isinstance(optimizer, torch.optim.Optimizer) and not steps_on_the_stack(optimizer)):
                hooks.move_to_end(handle.id)


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the closure among the arguments of a step; None without one."""
    return kwargs.get("closure") or next((a for a in args[1:] if callable(a)), None)


def replaced_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], observed: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a step with another closure."""
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": observed}
    closure = closure_of(args, kwargs)
    return tuple(observed if a is closure else a for a in args), kwargs
