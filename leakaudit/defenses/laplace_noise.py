"""`laplace-noise`: independent Laplace noise on every entry of the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leakaudit.plugins import AdditiveNoise, Update, defense


@defense("laplace-noise")
@dataclass(frozen=True)
class LaplaceNoise(AdditiveNoise):
    """Add Laplace noise to every entry of the update.

    The client sends g + Laplace(b) with the standard deviation sqrt(2) b = scale * RMS(g) over all entries. With equal `scale`, this
    noise and that of `gaussian-noise` have equal variance.
    """

    gaussian: ClassVar[bool] = False
    label: ClassVar[str] = "Laplace noise"
    meaning: ClassVar[str] = "Adds independent Laplace noise to every entry of the update."
    source: ClassVar[str] = "Zhu et al. 2019 (Deep Leakage from Gradients), Sec. 5.1: Gaussian and Laplacian noise"
    protects: ClassVar[str] = "Blurs every entry of the update for everybody who sees it."
    cost: ClassVar[str] = "Slower and worse training, growing with the scale."

    def changed(self, update: Update, rng: torch.Generator) -> Update:
        """Return the update with noise, drawn in the order of its names."""
        level = (self.sigma or 0.0) / 2**0.5

        def noise(like: Tensor) -> Tensor:
            # The difference of two exponential variables of mean b is Laplace(b). This avoids the logarithm of a drawn 0.
            one = torch.empty(like.shape, device=rng.device).exponential_(generator=rng)
            two = torch.empty(like.shape, device=rng.device).exponential_(generator=rng)
            drawn: Tensor = level * (one - two)
            return drawn.to(like.device)

        return {name: tensor + noise(tensor) for name, tensor in update.items()}
