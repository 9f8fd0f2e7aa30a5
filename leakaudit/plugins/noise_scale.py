"""Additive noise whose size is absolute, or relative to the update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from leakaudit.client.observation import Update, root_mean_square
from leakaudit.client.step import ClientStep
from leakaudit.plugins.defense_protocol import Defense


@dataclass(frozen=True)
class AdditiveNoise(Defense):
    """Independent noise of mean 0 on every entry of the update."""

    scale: float = 1.0
    """Standard deviation of the noise divided by the root mean square of the whole update; 0 adds no noise. Our choice of 1: as much noise
    as signal."""
    sigma: float | None = None
    """Standard deviation of the noise in the units of the update, as papers give it. If it is set, `scale` is ignored."""

    identity: ClassVar[Mapping[str, Any]] = {"scale": 0.0}
    on_update = True

    def __post_init__(self) -> None:
        """Refuse negative noise."""
        if self.scale < 0:
            raise ValueError(f"scale must be 0 or more, got {self.scale}")
        if self.sigma is not None and not 0 <= self.sigma < math.inf:
            raise ValueError(f"sigma must be 0 or more and finite, got {self.sigma}")

    def is_identity(self) -> bool:
        """Return whether no noise is added."""
        return (self.scale if self.sigma is None else self.sigma) == 0

    def prepared(self, clean: Update, unit: float) -> Self:
        """Return the same noise with `sigma` computed from the clean update."""
        return replace(self, sigma=self.scale * root_mean_square(clean)) if self.sigma is None else self

    def settled(self, step: ClientStep, sent: Update) -> Self:
        """Return the same noise with `sigma` filled in."""
        return self if self.is_identity() else replace(self, sigma=self._level(sent))

    def added_noise(self, step: ClientStep, clean: Update) -> float:
        """Return `sigma`, or `scale` times the root mean square of `clean`."""
        return float(self.prepared(clean, 1.0).sigma or 0.0)

    def without_noise(self) -> Self:
        """Return no noise at all."""
        return replace(self, scale=0.0, sigma=None)

    def noise(self, sent: Update, before: float = 0.0) -> float:
        """Return the standard deviation of all noise on `sent`.

        The variances of independent noises add up.
        """
        return math.hypot(before, self._level(sent))

    def _level(self, sent: Update) -> float:
        """Return `sigma`, computed from `scale` if it is None.

        RMS(sent)^2 = RMS(clean)^2 (1 + scale^2), and sigma is scale times RMS(clean).
        """
        if self.sigma is not None:
            return self.sigma
        return self.scale / math.hypot(1.0, self.scale) * root_mean_square(sent)
