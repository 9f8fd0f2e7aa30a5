"""`lamp-cos`: LAMP with the cosine distance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from leakaudit.algorithms.matching.lamp import COSINE_PRESETS, Lamp, Preset, Settings
from leakaudit.algorithms.matching.objective import Objective
from leakaudit.plugins import Budget, Observation, Reads, Reconstruction, attack


@attack("lamp-cos")
@dataclass(frozen=True)
class LampCos(Lamp):
    """LAMP by the cosine: Adam on embeddings alternates with new token orders.

    Steps on the embeddings x minimise L_rec = 1 - mean_i cos(G_i, g_i(x)) + alpha_reg (mean |x_t| - mean
    |e_v|)^2. Every `round_every` steps the search tries random orders and takes the best one if it lowers L_rec +
    alpha_lm L_lm, where L_lm is the prior's mean negative log-likelihood. A cosine does not depend on the update's
    length, so clipping changes nothing. Declared noise is removed and pruned entries are filled in as far as the rank
    allows, and each cosine is weighted by its expected reliability. These three additions are not in the paper.
    """

    label: ClassVar[str] = "LAMP, cosine"
    meaning: ClassVar[str] = (
        "Searches for inputs whose gradient has the observed direction, and asks a language model for the order of the words."
    )
    reads: ClassVar[Reads] = "direction"
    presets: ClassVar[Mapping[Preset, Settings]] = COSINE_PRESETS

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Match gradients until no token changes, or the steps or the budget are used up."""
        return self.attack(seen, Objective("cosine"), rng, budget)
