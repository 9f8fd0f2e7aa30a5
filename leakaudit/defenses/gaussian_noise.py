"""`gaussian-noise`: independent Gaussian noise on every entry of the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from leakaudit.plugins import AdditiveNoise, Update, defense


@defense("gaussian-noise")
@dataclass(frozen=True)
class GaussianNoise(AdditiveNoise):
    """Add Gaussian noise to every entry of the update.

    The client sends g + N(0, sigma^2), with sigma = scale * RMS(g) over all entries. The papers give sigma itself (LAMP, Table 5: 0.001
    to 0.01); here this is the knob `sigma`. An absolute sigma says little, because gradients differ by orders of magnitude between
    models and head initialisations. So `scale` is relative to the update. This is not differential privacy: nothing bounds what one
    sequence contributes.
    """

    label: ClassVar[str] = "Gaussian noise"
    meaning: ClassVar[str] = "Adds independent Gaussian noise to every entry of the update."
    source: ClassVar[str] = "LAMP (Balunovic et al. 2022, Sec. 5, Table 5); Zhu et al. 2019"
    protects: ClassVar[str] = "Blurs every entry of the update for everybody who sees it."
    cost: ClassVar[str] = "Slower and worse training, growing with the scale."

    def changed(self, update: Update, rng: torch.Generator) -> Update:
        """Return the update with noise, drawn in the order of its names."""
        level = self.sigma or 0.0
        return {
            name: tensor + level * torch.randn(tensor.shape, generator=rng, device=rng.device).to(tensor.device)
            for name, tensor in update.items()
        }
