"""`gaussian-noise`: independent normal noise on every entry of the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from leakaudit.client import ClientStep
from leakaudit.defenses.relative_noise import check_scale, sigma_of
from leakaudit.registry import defense
from leakaudit.snapshot import DeclaredDefense, Observation


@defense("gaussian-noise")
@dataclass(frozen=True)
class GaussianNoise:
    """Send g + N(0, sigma^2) instead of g, with sigma = scale * RMS(g) over all entries of the update.

    The papers give sigma itself (LAMP, Table 5: 0.001 to 0.01). Gradients differ by orders of magnitude between models and
    head initialisations, so an absolute sigma means nothing by itself; relative to the update it does. This is no
    differential privacy: nothing bounds what one sequence contributes.
    """

    scale: float = 1.0
    """Noise standard deviation divided by the root mean square of the whole update; 0 leaves the update alone. Our choice of
    1: as much noise as signal."""

    source: ClassVar[str] = "LAMP (Balunovic et al. 2022, Sec. 5, Table 5); Zhu et al. 2019"
    protects: ClassVar[str] = "Blurs every entry of the update for everybody who sees it."
    cost: ClassVar[str] = "Slower and worse training, growing with the scale."

    def __post_init__(self) -> None:
        """Refuse negative noise."""
        check_scale(self.scale)

    def __call__(self, step: ClientStep, seen: Observation, rng: torch.Generator) -> Observation:
        """Return the update with noise, drawn by `rng` in the order of the update's names.

        Declares `scale` and `sigma`, the latter in the update's units.
        """
        if self.scale == 0:
            return seen
        sigma = sigma_of(seen.update, self.scale)
        noisy = {
            name: tensor + sigma * torch.randn(tensor.shape, generator=rng, device=rng.device).to(tensor.device)
            for name, tensor in seen.update.items()
        }
        return seen.under(
            DeclaredDefense(name="gaussian-noise", parameters={"scale": self.scale, "sigma": sigma}), noisy
        )
