"""`laplace-noise`: independent Laplace noise on every entry of the update."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from leakaudit.plugins import AdditiveNoise, ClientStep, Observation, defense


@defense("laplace-noise")
@dataclass(frozen=True)
class LaplaceNoise(AdditiveNoise):
    """Add Laplace noise to every entry of the update.

    The client sends g + Laplace(b) with the standard deviation sqrt(2) b = scale * RMS(g) over all entries. With equal `scale`, this
    noise and that of `gaussian-noise` have equal variance.
    """

    label: ClassVar[str] = "Laplace noise"
    meaning: ClassVar[str] = "Adds independent Laplace noise to every entry of the update."
    source: ClassVar[str] = "Zhu et al. 2019 (Deep Leakage from Gradients), Sec. 5.1: Gaussian and Laplacian noise"
    protects: ClassVar[str] = "Blurs every entry of the update for everybody who sees it."
    cost: ClassVar[str] = "Slower and worse training, growing with the scale."

    def __call__(self, step: ClientStep, seen: Observation, rng: torch.Generator) -> Observation:
        """Return the update with noise.

        `rng` draws it in the order of the update's names.
        The result declares `scale` and `sigma`, the noise's standard deviation in the update's units.
        """
        if self.is_identity():
            return seen
        sigma = self.added_noise(step, seen.update)

        def noise(like: Tensor) -> Tensor:
            # The difference of two exponential variables of mean b is Laplace(b). This avoids the logarithm of a drawn 0.
            one = torch.empty(like.shape, device=rng.device).exponential_(generator=rng)
            two = torch.empty(like.shape, device=rng.device).exponential_(generator=rng)
            drawn: Tensor = (sigma / 2**0.5) * (one - two)
            return drawn.to(like.device)

        noisy = {name: tensor + noise(tensor) for name, tensor in seen.update.items()}
        return seen.under(replace(self, sigma=sigma).declared(), noisy)
