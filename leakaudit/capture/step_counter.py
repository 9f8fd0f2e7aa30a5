"""A counter of optimizer steps, by hooks on the optimizers.

It is for frameworks that do not announce their steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from leakaudit.capture.observing.optimizers import after_step, base_optimizers
from leakaudit.capture.rounds.run import RoundRun
from leakaudit.capture.run import AuditRun


@dataclass
class StepCounter:
    """The number of the next optimizer step, and the hooks that count."""

    number: int = 0
    """Number of the step that begins, counted from 0."""
    _hooks: list[Any] = field(default_factory=list, init=False)

    def begin(self, optimizer: Any, number: int, stepped: Callable[..., None]) -> None:
        """Set a hook on each optimizer.

        Args:
            optimizer: the optimizer, a wrapper around it, or a list of several.
            number: of the step that begins.
            stepped: called after each optimizer has moved the weights, but not for steps that a `GradScaler` skips.
        """
        self.number = number
        self._hooks = [after_step(mover, stepped) for mover in base_optimizers(optimizer)]

    def count(self, run: AuditRun | RoundRun | None) -> bool:
        """Count a step once all optimizers that share the model have stepped.

        Args:
            run: the audited run, which knows whether all optimizers have stepped. None if the audit is off; then every call counts a step.

        Returns:
            Whether the step is over.
        """
        over = run is None or run.recorder.rounds.over
        self.number += over
        return over

    def remove(self) -> None:
        """Remove the hooks; a second call changes nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
