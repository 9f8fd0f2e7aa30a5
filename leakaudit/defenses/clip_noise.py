"""`clip-noise`: clip the whole update, and add Gaussian noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from leakaudit.client.local_steps import delta_divisor
from leakaudit.plugins import ClientStep, Defense, Update, defense, root_mean_square


@defense("clip-noise")
@dataclass(frozen=True)
class ClipNoise(Defense):
    """Cut the whole update to a norm, and add Gaussian noise to it.

    The client sends d min(1, C / |d|) + N(0, sigma^2), with d the gradient, or the difference of all trained weights. Both numbers are in
    the units of d, as protocols state them. The update that attacks see of a difference is d over the learning rates of the local steps.
    This is what Flower's `LocalDpMod` does. How private a sigma is depends on the number of updates that are sent; the accountant of the
    protocol computes that, not this audit.
    """

    bound: float = 1.0
    """C: largest L2 norm of the whole update; infinity clips nothing. Our choice of 1: as in examples of the literature."""
    sigma: float = 0.0
    """Standard deviation of the noise on each entry that is sent."""
    unit: float | None = None
    """The update's unit in the units of the difference: the sum of the learning rates. None takes the step's."""

    label: ClassVar[str] = "clipping and noise"
    meaning: ClassVar[str] = "Cuts the whole update to a norm and adds Gaussian noise."
    identity: ClassVar[Mapping[str, Any]] = {"bound": math.inf, "sigma": 0.0}
    resized: ClassVar[bool] = True
    on_update = True
    source: ClassVar[str] = (
        "McMahan et al. 2018, Algorithm 1 (clipping of a user's update); Flower's LocalDpMod (noise at the client)"
    )
    protects: ClassVar[str] = "Bounds what one client contributes, and blurs every weight that it sends."
    cost: ClassVar[str] = "Slower and worse training, growing with the noise over the norm."

    def __post_init__(self) -> None:
        """Refuse knobs that describe no such defence."""
        if not self.bound > 0:
            raise ValueError(f"bound must be above 0, got {self.bound}")
        if not 0 <= self.sigma < math.inf:
            raise ValueError(f"sigma must be 0 or more and finite, got {self.sigma}")
        if self.unit is not None and not 0 < self.unit < math.inf:
            raise ValueError(f"unit must be above 0 and finite, got {self.unit}")

    @property
    def message_multiplier(self) -> float | None:
        """Sigma over the bound; None without a bound."""
        return None if self.bound == math.inf else self.sigma / self.bound

    def prepared(self, clean: Update, unit: float) -> Self:
        """Return the defence with the unit of the update filled in."""
        return replace(self, unit=unit) if self.unit is None else self

    def changed(self, update: Update, rng: torch.Generator) -> Update:
        """Return the clipped update with noise, drawn in the order of its names."""
        unit = self.unit or 1.0
        sigma = self.sigma / unit
        return {
            name: tensor + sigma * torch.randn(tensor.shape, generator=rng, device=rng.device).to(tensor.device)
            for name, tensor in self._clipped(update, unit).items()
        }

    def settled(self, step: ClientStep, sent: Update) -> Self:
        """Return the defence with the step's unit filled in."""
        return self if self.is_identity() else replace(self, unit=self._unit(step))

    def added_noise(self, step: ClientStep, clean: Update) -> float:
        """Return sigma in the units of the update."""
        return self.sigma / self._unit(step)

    def without_noise(self) -> Self:
        """Return the defence that only clips."""
        return replace(self, sigma=0.0)

    def noise(self, sent: Update, before: float = 0.0) -> float:
        """Return the standard deviation of all noise on `sent`.

        Clipping may make earlier noise smaller, so the result is an upper bound. Without a unit it is all of `sent`.
        """
        if self.sigma and self.unit is None:
            return root_mean_square(sent)
        return math.hypot(before, self.sigma / (self.unit or 1.0))

    def expected(self, step: ClientStep, recomputed: Update, observed: Update, tolerance: float) -> Update:
        """Return the clipped update."""
        return recomputed if self.is_identity() else self._clipped(recomputed, self._unit(step))

    def _clipped(self, update: Update, unit: float) -> dict[str, Tensor]:
        norm = float(torch.stack([g.double().norm() for g in update.values()]).norm()) * unit
        factor = min(1.0, self.bound / norm) if norm else 1.0
        return {name: factor * g for name, g in update.items()}

    def _unit(self, step: ClientStep) -> float:
        if self.unit is not None:
            return self.unit
        return delta_divisor(step.facts) if step.facts.view == "delta" else 1.0
