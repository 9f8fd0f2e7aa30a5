"""Gradients of one process, before they are summed with those of others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from leakaudit.capture.boundary import entry
from leakaudit.capture.recording.live_model import LiveModel


class LocalGradients:
    """Hooks that copy each gradient when this process has added its share to it."""

    def __init__(
        self,
        model: LiveModel,
        target: Callable[[], dict[str, Tensor] | None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Prepare; nothing is hooked before `open`.

        Args:
            model: the live model.
            target: returns the dictionary for the copies, by parameter name; None while no step is recorded.
            failed: called with whatever is raised in a hook.
        """
        self._model = model
        self._target = target
        self._fail = failed
        self._handles: list[Any] = []

    def open(self) -> None:
        """Set a hook on every trained parameter."""
        for name, parameter in self._model.trained():
            hook = parameter.register_post_accumulate_grad_hook(functools.partial(self._added, name))
            self._handles.append(hook)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @entry
    def _added(self, name: str, parameter: Tensor) -> None:
        target = self._target()
        if target is not None and parameter.grad is not None:
            target[name] = parameter.grad.detach().clone()
