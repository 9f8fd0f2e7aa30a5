"""`lamp-l1l2`: LAMP with TAG's distance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from leakaudit.algorithms.matching.lamp import PRESETS, Lamp, Preset, Settings
from leakaudit.algorithms.matching.objective import Objective
from leakaudit.algorithms.matching.options import check_knobs
from leakaudit.models.structure import word_embedding
from leakaudit.plugins import Budget, Observation, Reconstruction, attack

LENGTH_WEIGHT, PRIOR_WEIGHT = 25.0, 60.0
"""alpha_reg and alpha_lm of LAMP_L2+L1 (App. D).
Our own presets use the values for the cosine instead, relative to the observed update."""


@attack("lamp-l1l2")
@dataclass(frozen=True)
class LampL1L2(Lamp):
    """LAMP by TAG's distance: L2 norms plus alpha times L1 norms.

    The distance is sum_i ||G_i - g_i(x)||_2 + alpha ||G_i - g_i(x)||_1. `released` and our own presets square the L2
    norms.
    The right weights of the regulariser and the prior depend on the size of that sum. So in our presets alpha_reg and
    alpha_lm are multiplied by the distance of a zero gradient, ||G||_2^2 + alpha ||G||_1.
    """

    alpha: float = 0.01
    """Weight of the L1 term (App. D)."""

    label: ClassVar[str] = "LAMP, L1 + L2"
    meaning: ClassVar[str] = (
        "Searches for inputs whose gradient is near the observed one by the L2 and L1 distances, and asks a language model for the order of the words."
    )
    presets: ClassVar[Mapping[Preset, Settings]] = {
        **PRESETS,
        "paper": replace(PRESETS["paper"], length_weight=LENGTH_WEIGHT, prior_weight=PRIOR_WEIGHT),
        "released": replace(PRESETS["released"], length_weight=LENGTH_WEIGHT, prior_weight=PRIOR_WEIGHT),
        "large": replace(PRESETS["large"], length_weight=LENGTH_WEIGHT, prior_weight=PRIOR_WEIGHT),
    }

    def __post_init__(self) -> None:
        """Refuse options that are out of range, and `whitened`, which needs cosines."""
        super().__post_init__()
        check_knobs(self, not_negative=("alpha",))
        if self.whitened:
            raise ValueError("whitened is `lamp-cos`'s: a metric for cosines, and an L1 distance has none")

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Match gradients until no token changes, or the steps or the budget are used up."""
        unit = self._size(seen) if self.settings().relative else 1.0
        return self.attack(seen, Objective("l2", l1=self.alpha), rng, budget, unit=unit)

    def _size(self, seen: Observation) -> float:
        """Return ||G||_2^2 + alpha ||G||_1, without the word embedding."""
        matched = [update for name, update in seen.update.items() if name != word_embedding(seen.model)]
        return sum(float(update.square().sum()) + self.alpha * float(update.abs().sum()) for update in matched)
