"""The check of what an optimizer does to the gradients inside its own step.

The recorder copies the gradients that an optimizer is given. If the optimizer clips them or adds noise in its step, the weights move by
other gradients, and the client sends those. torch's own optimizers do neither. For every other optimizer this module checks whether
the gradients changed in the step, whether the weights moved along them, and whether the step drew random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.capture.observing.calls import random_states
from leakaudit.capture.observing.entry_sample import EntrySample
from leakaudit.capture.observing.optimizers import parameters_of
from leakaudit.errors import SnapshotError

SAME = 1e-4
"""Relative error up to which entries count as a combination of gradients and weights. Our choice: rounding of float32 leaves 1e-6, and
noise that is weaker than 1e-4 of the gradient protects nobody."""

FEW = 8
"""Entries below which a parameter is left out. Our choice: a fit of two numbers to eight entries leaves most of any noise."""

ROUNDING = 4.0
"""Units of rounding that a computation in the tensors' own precision may leave in an entry. Our choice."""

WHAT_TO_DO = "declare what it does with `shipped_defense`, or change the gradients before the optimizer steps, where the audit sees it"


@dataclass
class OptimizerStep:
    """One step of an optimizer: the gradients that it was given, and its effect.

    The step is noted when the gradients are copied, and checked after it is made.
    """

    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]
    gradients: EntrySample
    weights: EntrySample
    random: dict[str, Tensor]
    last: bool = True
    """Whether no other hook of the optimizer was called after the copy."""
    evaluations: int = 0
    """How often the optimizer has evaluated its closure."""
    copy_after_step: bool = field(default=False, init=False)
    """Whether the gradients after the step are the update, because a declared defence changed them in the step."""

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, *, last: bool = True, alone: bool = False) -> OptimizerStep:
        """Remember a few entries of the gradients and weights, and the random state.

        Args:
            optimizer: the one that is about to step.
            last: whether no other hook of it is called after this.
            alone: whether it is the only optimizer. If it is, and is one of torch's own, nothing needs to be remembered.
        """
        # The entries of a sparse gradient are at other positions than those of the weights.
        parameters = [p for p in parameters_of(optimizer) if p.grad is None or not p.grad.is_sparse]
        if alone and last and _of_torch(optimizer):
            parameters = []
        gradients = EntrySample.of(p.grad for p in parameters)
        return cls(optimizer, parameters, gradients, EntrySample.of(parameters), random_states(parameters), last)

    @property
    def trusted(self) -> bool:
        """Whether only torch's own code runs between the copy and the new weights."""
        return self.last and _of_torch(self.optimizer)

    @property
    def now(self) -> list[Tensor | None]:
        """The gradients as they are now."""
        return [p.grad for p in self.parameters]

    def evaluated(self) -> None:
        """Count an evaluation of the closure, which may draw random numbers for dropout."""
        self.evaluations += 1
        self.random = random_states(self.parameters)

    def check(self, *, declared: bool) -> str:
        """Return a sentence on what the check cannot find out about the finished step.

        The sentence is empty if the check finds out everything.

        Args:
            declared: whether the run declares a defence. If so, gradients that the step changed in place are the update
                (`copy_after_step`).

        Raises:
            SnapshotError: other gradients than the copied ones moved the weights, or may have.
        """
        if self.trusted:
            return ""
        changed = self.gradients.changed(self.now)
        if changed and not self.last:
            raise SnapshotError(
                f"a hook that was set after the audit's changed the gradients of {self._count(changed)} before {self.name} stepped; set "
                "it before the forward pass"
            )
        if _of_torch(self.optimizer):
            return ""
        emptied = bool(changed) and all(_is_empty(self.now[number]) for number in changed)
        now = self._gradients_now()
        other = bool(changed) and not emptied and not self._combined(now, SAME)
        scratch = other and self.evaluations <= 1 and self._rescaled(now)
        if other and not scratch:
            if self.evaluations > 1:
                raise SnapshotError(
                    f"{self.name} evaluated its closure {self.evaluations} times and moved the weights by a later gradient than the first"
                )
            if not declared:
                raise SnapshotError(
                    f"{self.name} changes the gradients of {self._count(changed)} inside its step, so it does not move the weights by "
                    f"those that it is given; {WHAT_TO_DO}"
                )
            self.copy_after_step = True
        return self._check_movement(emptied=emptied)

    def _rescaled(self, now: Sequence[Tensor | None]) -> bool:
        """Return whether the step only scaled each entry, by a factor above zero.

        An optimizer that divides the gradients by its second moments where they stand does so (schedule-free AdamW), after it has added the
        weight decay, if its options have one. Noise turns the signs of the smallest entries.
        """
        decays = {0.0, *(float(group.get("weight_decay") or 0.0) for group in self.optimizer.param_groups)}
        rows = [
            (after, before, weights)
            for after, before, weights in zip(now, self.gradients.entries, self.weights.entries, strict=True)
            if after is not None and before is not None and weights is not None and after.shape == weights.shape
        ]
        return bool(rows) and all(any(_same_signs(*row, decay) for decay in decays) for row in rows)

    def _check_movement(self, *, emptied: bool) -> str:
        """Compare the weights' movement with the gradients; return what stays unknown.

        The optimizer's rule is unknown, so a movement along other directions proves nothing by itself.
        """
        along = self._moved_along()
        if along:
            return ""
        if along is False and not self._keeps_state():
            raise SnapshotError(
                f"{self.name} keeps no state and does not move the weights along the gradients that it is given: it changes copies of them "
                "inside its step, or follows a rule that the audit does not know. Change the gradients before the optimizer steps, where "
                "the audit sees it"
            )
        if self._drew() and not self.copy_after_step:
            raise SnapshotError(
                f"{self.name} draws random numbers in its step and may add noise to what it moves the weights by; add noise to the "
                "gradients before the optimizer steps, where the audit sees it"
            )
        found = "empties the gradients in its step" if emptied else "is no optimizer of torch"
        return f"{self.name} {found}: a change that it makes to copies of them would not be seen"

    @property
    def name(self) -> str:
        """Name of the optimizer's class."""
        return type(self.optimizer).__name__

    def _count(self, changed: Sequence[int]) -> str:
        return f"{len(changed)} of {len(self.parameters)} parameters"

    def _keeps_state(self) -> bool:
        """Return whether the optimizer keeps a tensor of several entries (momentum)."""
        state: Any = self.optimizer.state
        kept = (value for p in self.parameters if p in state for value in _values(state[p]))
        return any(isinstance(value, Tensor) and value.numel() > 1 for value in kept)

    def _drew(self) -> bool:
        now = random_states(self.parameters)
        return any(not torch.equal(state, now[name]) for name, state in self.random.items())

    def _gradients_now(self) -> list[Tensor | None]:
        return list(EntrySample.of(self.now).entries)

    def _moved_along(self) -> bool | None:
        """Return whether the weights moved along the gradients and themselves.

        None means that the weights hardly moved, or that rounding hides their movement.
        """
        gradients = self._gradients_now() if self.copy_after_step else list(self.gradients.entries)
        moved = [
            None if before is None or after is None or gradient is None else before.double() - after.double()
            for before, after, gradient in zip(
                self.weights.entries, EntrySample.of(self.parameters).entries, gradients, strict=True
            )
        ]
        step = math.hypot(*(float(one.norm()) for one in moved if one is not None))
        rounding = self._rounding()
        if step <= 10 * rounding:
            return None
        return self._combined(moved, SAME + rounding / step, gradients)

    def _rounding(self) -> float:
        """Return the length of the rounding error of all remembered weights."""
        lengths = [
            ROUNDING * torch.finfo(w.dtype).eps * float(w.double().norm())
            for w in self.weights.entries
            if w is not None and w.numel()
        ]
        return math.hypot(*lengths)

    def _combined(
        self, found: Sequence[Tensor | None], tolerance: float, gradients: Sequence[Tensor | None] | None = None
    ) -> bool:
        """Return whether entries are linear combinations of the gradient and the weights.

        Each parameter's entries must be a multiple of its gradient plus a multiple of its weights. Clipping, unscaling, a learning rate
        and weight decay lead to such entries; noise does not.

        Args:
            found: entries of each parameter.
            tolerance: relative error that is allowed.
            gradients: entries of the gradients; None for those that were copied.
        """
        gradients = self.gradients.entries if gradients is None else gradients
        rows = [
            (y, g, w)
            for y, g, w in zip(found, gradients, self.weights.entries, strict=True)
            if y is not None and g is not None and w is not None and y.shape == g.shape == w.shape
        ]
        precision = max((torch.finfo(g.dtype).eps for _, g, _ in rows), default=0.0)
        lengths = [_lengths(*row) for row in rows]
        left, whole = (math.hypot(*(pair[part] for pair in lengths)) for part in range(2))
        return left <= max(tolerance, ROUNDING * precision) * whole


def _lengths(y: Tensor, g: Tensor, w: Tensor) -> tuple[float, float]:
    """Return the length of y without its components along w and g, and that of y.

    The first length is 0 for fewer than `FEW` entries, because two factors explain so few entries too easily.

    Args:
        y: (N,) entries of one parameter, as are `g` and `w`.
        g: (N,) of its gradient.
        w: (N,) of its weights.
    """
    y, g, w = (part.double().cpu() for part in (y, g, w))
    left = _without(_without(y, w), _without(g, w))
    return float(left.norm()) if len(y) >= FEW else 0.0, float(y.norm())


def _same_signs(after: Tensor, before: Tensor, weights: Tensor, decay: float) -> bool:
    """Return whether entries kept their signs, apart from a weight decay.

    Args:
        after: (N,) entries of one gradient after a step.
        before: (N,) the same entries before it.
        weights: (N,) of the parameter before it.
        decay: factor of the weights that the step added.
    """
    rounding = ROUNDING * torch.finfo(after.dtype).eps
    after, before, weights = after.double(), before.double(), decay * weights.double()
    rest = after - weights
    return bool(((rest * before >= 0) | (rest.abs() <= rounding * (after.abs() + weights.abs()))).all())


def _without(vector: Tensor, other: Tensor) -> Tensor:
    """Return a vector without its component along another one."""
    length = float(other.square().sum())
    return vector - (float(vector @ other) / length) * other if length else vector


def _of_torch(optimizer: Any) -> bool:
    """Return whether the `step` of an optimizer is torch's own, inherited or not.

    Such a step may change gradients in place, as SGD with Nesterov's momentum and fused optimizers with a scale do.
    """
    return str(getattr(getattr(type(optimizer), "step", None), "__module__", "")).split(".")[0] == "torch"


def _is_empty(gradient: Tensor | None) -> bool:
    return gradient is None or not bool(EntrySample.of([gradient]).entries[0].any())  # type: ignore[union-attr]


def _values(state: Any) -> list[Any]:
    return list(state.values()) if isinstance(state, dict) else [state]
