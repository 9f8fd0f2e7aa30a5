"""Finds out what an optimizer does to the gradients inside its own step.

The recorder copies the gradients that an optimizer is given. An optimizer that clips them or adds noise in its step moves the weights
by others, and those are what the client sends. torch's own optimizers are known not to do that. For any other
optimizer this module checks whether the gradients are changed afterwards, whether the weights moved along them, and whether random
numbers were drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.capture.optimizers import parameters_of
from leakaudit.capture.witness import Witness
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
class Handed:
    """What an optimizer was given, and what its step made of it.

    It is taken when the gradients are copied.
    """

    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]
    gradients: Witness
    weights: Witness
    random: dict[str, Tensor]
    last: bool = True
    """Whether no other hook of the optimizer came after the copy."""
    evaluations: int = 0
    """How often it has evaluated its closure."""
    retake: bool = field(default=False, init=False)
    """Whether the gradients after the step are the update, because a declared defence changed them in place."""

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, *, last: bool = True, alone: bool = False) -> Handed:
        """Remember a few entries of the gradients and weights, and the random state.

        Args:
            optimizer: about to step.
            last: whether no other hook of it comes after this.
            alone: whether it is the only one. Of torch's own nothing has to be remembered then.
        """
        # Entries of sparse gradients are not at the places of those of the weights.
        parameters = [p for p in parameters_of(optimizer) if p.grad is None or not p.grad.is_sparse]
        if alone and last and _of_torch(optimizer):
            parameters = []
        gradients = Witness.of(p.grad for p in parameters)
        return cls(optimizer, parameters, gradients, Witness.of(parameters), random_states(parameters), last)

    @property
    def trusted(self) -> bool:
        """Whether only torch's own code comes between the copy and the weights."""
        return self.last and _of_torch(self.optimizer)

    @property
    def now(self) -> list[Tensor | None]:
        """Gradients as they are now."""
        return [p.grad for p in self.parameters]

    def evaluated(self) -> None:
        """Count an evaluation of the closure, which may draw random numbers for dropout."""
        self.evaluations += 1
        self.random = random_states(self.parameters)

    def check(self, *, declared: bool) -> str:
        """Return what cannot be known of the step that was just made.

        The text is empty if nothing is left open.

        Args:
            declared: whether the run declares a defence. Gradients that the step changed in place are then the update (`retake`).

        Raises:
            SnapshotError: the weights were moved by something else than the gradients that were copied.
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
        if changed and not emptied and not self._combined(self._gradients_now(), SAME):
            if self.evaluations > 1:
                raise SnapshotError(
                    f"{self.name} evaluated its closure {self.evaluations} times and moved the weights by a later gradient than the first"
                )
            if not declared:
                raise SnapshotError(
                    f"{self.name} changes the gradients of {self._count(changed)} inside its step, so it does not move the weights by "
                    f"those that it is given; {WHAT_TO_DO}"
                )
            self.retake = True
        return self._check_movement(emptied=emptied)

    def _check_movement(self, *, emptied: bool) -> str:
        """Compare the movement of the weights with the gradients.

        The rule of an unknown optimizer sets a limit to what this shows.
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
        if self._drew() and not self.retake:
            raise SnapshotError(
                f"{self.name} draws random numbers in its step and may add noise to what it moves the weights by; add noise to the "
                "gradients before the optimizer steps, where the audit sees it"
            )
        found = "empties the gradients in its step" if emptied else "is no optimizer of torch"
        return f"{self.name} {found}: a change that it makes to copies of them would not be seen"

    @property
    def name(self) -> str:
        """Class of the optimizer."""
        return type(self.optimizer).__name__

    def _count(self, changed: Sequence[int]) -> str:
        return f"{len(changed)} of {len(self.parameters)} parameters"

    def _keeps_state(self) -> bool:
        """Return whether the optimizer keeps a tensor as large as a parameter.

        A momentum is one.
        """
        state: Any = self.optimizer.state
        kept = (value for p in self.parameters if p in state for value in _values(state[p]))
        return any(isinstance(value, Tensor) and value.numel() > 1 for value in kept)

    def _drew(self) -> bool:
        now = random_states(self.parameters)
        return any(not torch.equal(state, now[name]) for name, state in self.random.items())

    def _gradients_now(self) -> list[Tensor | None]:
        return list(Witness.of(self.now).entries)

    def _moved_along(self) -> bool | None:
        """Return whether the weights moved along the gradients and themselves.

        None means that they hardly moved, or that rounding hides it.
        """
        gradients = self._gradients_now() if self.retake else list(self.gradients.entries)
        moved = [
            None if before is None or after is None or gradient is None else before.double() - after.double()
            for before, after, gradient in zip(
                self.weights.entries, Witness.of(self.parameters).entries, gradients, strict=True
            )
        ]
        step = math.hypot(*(float(one.norm()) for one in moved if one is not None))
        rounding = self._rounding()
        if step <= 10 * rounding:
            return None
        return self._combined(moved, SAME + rounding / step, gradients)

    def _rounding(self) -> float:
        """Return the length of what rounding the weights can leave.

        It is over all remembered entries.
        """
        lengths = [
            ROUNDING * torch.finfo(w.dtype).eps * float(w.double().norm())
            for w in self.weights.entries
            if w is not None and w.numel()
        ]
        return math.hypot(*lengths)

    def _combined(
        self, found: Sequence[Tensor | None], tolerance: float, gradients: Sequence[Tensor | None] | None = None
    ) -> bool:
        """Return whether entries combine the gradient and the weights.

        Each parameter's entries have to be a multiple of its gradient plus a multiple of its weights.

        That is what clipping, unscaling, a learning rate and weight decay make of a gradient, and what noise does not.

        Args:
            found: entries of each parameter.
            tolerance: relative error that is allowed.
            gradients: entries of the gradients; those that were copied where none are given.
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
    """Return the lengths of y without its parts along w and g, and of y.

    All three are (entries,).

    With fewer than `FEW` entries two numbers explain anything, and nothing is left.
    """
    y, g, w = (part.double().cpu() for part in (y, g, w))
    left = _without(_without(y, w), _without(g, w))
    return float(left.norm()) if len(y) >= FEW else 0.0, float(y.norm())


def _without(vector: Tensor, other: Tensor) -> Tensor:
    """Return a vector without its part along another one."""
    length = float(other.square().sum())
    return vector - (float(vector @ other) / length) * other if length else vector


def _of_torch(optimizer: Any) -> bool:
    """Return whether the `step` of an optimizer is torch's own.

    A subclass that inherits it counts as torch's.

    It may change gradients by itself, as SGD with Nesterov's momentum and fused optimizers with a scale do.
    """
    return str(getattr(getattr(type(optimizer), "step", None), "__module__", "")).split(".")[0] == "torch"


def _is_empty(gradient: Tensor | None) -> bool:
    return gradient is None or not bool(Witness.of([gradient]).entries[0].any())  # type: ignore[union-attr]


def _values(state: Any) -> list[Any]:
    return list(state.values()) if isinstance(state, dict) else [state]


def random_states(parameters: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the states of torch's default generators; draw nothing.

    They are those of the CPU and of the device of the tensors.
    """
    states = {"cpu": torch.get_rng_state()}
    device = next((p.device for p in parameters), torch.device("cpu"))
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states
