"""A first step of Adam: its movement, and guesses that are compared with it.

Letters: w weight, eta learning rate, u = (w - weight after) / eta without weight decay, s standard deviation of u's rounding error,
f(g) = g / (|g| + eps) the movement that a gradient g causes.

A guess of the batch gives a gradient g for every entry. It is right if f(g) agrees with u within a few s in nearly all entries. This test is
exact for any size of g: for large gradients only the sign is tested, for small ones the value. (Own derivation.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from leakaudit.algorithms.gradient_estimate import as_gradient, first_step_movement, group_number, invert_adam
from leakaudit.client.observation import Observation
from leakaudit.client.optimizer import ParameterGroup

TURNS = 6
"""Gauss-Newton iterations of `known_rows`. Our choice: later ones change nothing in float32."""

BEYOND = 4.0
"""Distance between movement and prediction, in standard deviations, up to which an entry agrees.
Our choice: rounding is uniform within 1.8 standard deviations, and the float32 sums of a simulation add to it."""

NEAR = 0.05
"""Largest distance between movement and prediction at which an entry counts for the clipping factor. Our choice."""

SAMPLED = 20_000
"""Entries of a parameter that give the clipping factor. Our choice: its error is then far below that of one entry."""

SIMULATED = 1e-5
"""Relative error of a simulated gradient in float32. Our choice: sums of a backward pass have errors of 1e-7 to 1e-6."""

INPUT_ERROR = 1e-6
"""Error of an entry of a gradient that float32 sums leave, relative to the root mean square of its row.
Our choice: inputs that are computed in a batch of another shape differ by 3e-7."""

WELL_KNOWN = 0.3
"""Largest relative error of an estimated entry that counts for the clipping factor. Our choice."""

CANCELLED = 1e-6
"""Error of an entry that is a sum of cancelling terms, relative to the root mean square of its matrix. Our choice, for float32 sums."""

RIDGE = 1e-12
"""Share of the largest normal-equation entry that keeps a regression solvable. Our choice."""


@dataclass(frozen=True)
class AdamStep:
    """The observed first step of Adam of one client."""

    seen: Observation
    """The observation as it was sent: a difference of weights after one Adam step from zero moments."""

    @classmethod
    def of(cls, seen: Observation) -> AdamStep | None:
        """Return the step behind an observation, or None.

        None if it is of another kind, or if a declared defence changed it.
        """
        raw = seen.sent or seen
        if "adam_step" not in raw.memo:
            raw.memo["adam_step"] = cls._of(raw)
        found: AdamStep | None = raw.memo["adam_step"]
        return found

    @classmethod
    def _of(cls, raw: Observation) -> AdamStep | None:
        optimizer = raw.facts.optimizer
        known = optimizer is not None and optimizer.kind == "adam" and optimizer.fresh and not raw.facts.defenses
        return cls(raw) if known and raw.facts.local_steps == 1 else None

    @cached_property
    def _weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.seen.model.named_parameters()}

    @cached_property
    def _moved(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {}

    @cached_property
    def estimate(self) -> Observation:
        """The observation with the estimated gradient and the error of every entry."""
        return as_gradient(self.seen)[0]

    def moved(self, name: str) -> tuple[Tensor, Tensor]:
        """Return u and its standard deviation s for one parameter, float32."""
        if name not in self._moved:
            moved, off = first_step_movement(self.seen, name, self._weights[name])
            self._moved[name] = (moved.float(), off.float())
        return self._moved[name]

    def eps(self, name: str) -> float:
        """Return Adam's eps for a parameter."""
        return group_number(self.group(name), "eps")

    def group(self, name: str) -> ParameterGroup:
        """Return the parameter group of a shared parameter.

        Raises:
            KeyError: the optimizer does not move it.
        """
        optimizer = self.seen.facts.optimizer
        found = None if optimizer is None else optimizer.group_of(name)
        if found is None:
            raise KeyError(name)
        return found

    def predicted(self, name: str, gradient: Tensor) -> Tensor:
        """Return f(g) for a gradient, float64.

        The weight decay of Adam is added to the gradient first.
        """
        g = gradient.double()
        group, optimizer = self.group(name), self.seen.facts.optimizer
        if optimizer is not None and optimizer.algorithm == "Adam" and group_number(group, "weight_decay"):
            sign = -1.0 if group.options.get("maximize") else 1.0
            g = g + sign * group_number(group, "weight_decay") * self._weights[name].double()
        return g / (g.abs() + self.eps(name))

    def disagreement(self, name: str, gradient: Tensor) -> float:
        """Return the share of entries in which a gradient disagrees with the step.

        Args:
            name: of the parameter.
            gradient: a guess, of the parameter's shape.
        """
        moved, error = self.moved(name)
        expected = self.predicted(name, gradient)
        size = gradient.double().abs()
        off = SIMULATED * size + CANCELLED * size.square().mean().sqrt()
        simulated = off * self.eps(name) / (size + self.eps(name)).square()
        return float(((moved - expected).abs() > BEYOND * error + simulated).double().mean())

    def sampled(self, name: str, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
        """Return u, its error, the gradient and eps at some entries of a parameter.

        The gradient is the loss's, without weight decay.
        """
        stride = max(1, gradient.numel() // SAMPLED)
        moved, error = (part.flatten()[::stride].double() for part in self.moved(name))
        return moved, error, gradient.flatten()[::stride].double(), self.eps(name)

    def rows_that_moved(self, name: str, above: float) -> Tensor:
        """Return (V,) booleans: the rows of a table that moved by more than rounding.

        Args:
            name: of the table (V, D).
            above: root mean square of u / s above which a row moved.
        """
        moved, error = self.moved(name)
        return (moved / error).square().mean(dim=1).sqrt() > above


def known_rows(moved: Tensor, error: Tensor, eps: float, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient with rows in a known space that explains a movement best.

    It minimises sum ((u - f(c Q)) / s)^2 over the coefficients c of each row, by Gauss-Newton. One row has D equations for R unknown
    numbers, so its error is far below that of the single entries.

    Args:
        moved: (F, D) float64, u.
        error: (F, D) float64, s.
        eps: of Adam.
        basis: (R, D) float64, orthonormal rows Q.

    Returns:
        (F, D) float64 gradient, and (F,) float64: the standard deviation of its entries, root mean square over a row.
    """
    gradient, spread = invert_adam(moved, error, eps)
    factor = scale = torch.zeros(0)
    for turn in range(TURNS):
        if turn:
            slope = eps / (gradient.abs() + eps).square()
            step = (moved - gradient / (gradient.abs() + eps)) / slope
            largest = gradient.abs() + eps
            gradient, spread = gradient + step.clamp(-largest, largest), error / slope
        floor = INPUT_ERROR * gradient.square().mean(dim=1, keepdim=True).sqrt()
        weight = (spread.square() + floor.square()).reciprocal()
        scale = weight.amax(dim=1, keepdim=True)
        weight = weight / scale
        normal = torch.einsum("rd,fd,sd->frs", basis, weight, basis)
        level = RIDGE * normal.diagonal(dim1=1, dim2=2).amax(dim=1)
        factor = torch.linalg.cholesky(normal + level[:, None, None] * torch.eye(len(basis), dtype=normal.dtype))
        right = torch.einsum("rd,fd->fr", basis, weight * gradient)
        gradient = torch.cholesky_solve(right[..., None], factor)[..., 0] @ basis
    inverse = torch.cholesky_inverse(factor).diagonal(dim1=1, dim2=2).sum(1)
    return gradient, (inverse / moved.shape[1] / scale[:, 0]).sqrt()


def step_disagreement(step: AdamStep, gradients: Mapping[str, Tensor]) -> float:
    """Return the median share of entries in which a guess disagrees with the step.

    Args:
        step: the observed step.
        gradients: parameter name -> simulated gradient of a guess; the median is over them. Parameters that the optimizer does not move are
            left out.

    Returns:
        From 0 to 1; 1 if nothing can be compared.
    """
    moved = {name: g for name, g in gradients.items() if name in step.estimate.error}
    factor = clipping_factor(step, moved)
    if not moved or factor <= 0:
        return 1.0  # the guess points away from the step
    return float(torch.tensor([step.disagreement(name, factor * g) for name, g in moved.items()]).median())


def clipping_factor(step: AdamStep, gradients: Mapping[str, Tensor]) -> float:
    """Return the factor c for which c times a guess's gradients fit the step.

    A client that clips, or divides its loss, scales all gradients by one factor. It begins as the median ratio of estimated and simulated
    entries, which ignores the entries in which a guess is wrong. Gauss-Newton on the movement then removes the bias of the estimate.

    Args:
        step: the observed step.
        gradients: parameter name -> simulated gradient.

    Returns:
        The factor; 0 or less if the guess points away from the step.
    """
    factor = _rough_factor(gradients, step.estimate)
    samples = [step.sampled(name, gradient) for name, gradient in gradients.items()]
    for _ in range(TURNS if factor > 0 else 0):
        up = down = 0.0
        for moved, error, g, eps in samples:
            size = factor * g.abs()
            left = moved - factor * g / (size + eps)
            slope = g * eps / (size + eps).square()
            weight = torch.where(left.abs() < NEAR, error.square().reciprocal(), 0.0)
            up += float((weight * slope * left).sum())
            down += float((weight * slope * slope).sum())
        change = up / down if down else 0.0
        factor += min(max(change, -factor / 2), factor)
    return factor


def _rough_factor(gradients: Mapping[str, Tensor], estimate: Observation) -> float:
    """Return the median over parameters of the median ratio of well-known entries."""
    ratios = []
    for name, gradient in gradients.items():
        known = (estimate.error[name] < WELL_KNOWN * estimate.update[name].abs()) & (gradient != 0)
        if bool(known.any()):
            ratios.append(float((estimate.update[name][known].double() / gradient[known].double()).median()))
    return float(torch.tensor(ratios).median()) if ratios else 0.0
