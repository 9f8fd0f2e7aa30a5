"""`dlg`: gradient matching by the L2 distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from leakaudit.algorithms.matching.objective import Objective
from leakaudit.algorithms.matching.plain import PlainMatching
from leakaudit.algorithms.matching.run import reconstruct_by_matching
from leakaudit.plugins import Budget, Observation, Reconstruction, attack


@attack("dlg")
@dataclass(frozen=True)
class Dlg(PlainMatching):
    """A search for embeddings x and soft labels y whose gradient is the observed G.

    It minimises sum_i ||G_i - g_i(x, y)||_2^2 over the shared parameters i, then takes the nearest tokens. The
    published attack runs L-BFGS. The LAMP paper compares itself with a version that runs Adam with TAG's loss and
    learning rate at alpha = 0. `preset=paper` is that version as printed, which does not square the norms;
    `preset=released` is what its published code runs, which does. Everything else is as in `tag`.
    """

    label: ClassVar[str] = "DLG"
    meaning: ClassVar[str] = "Searches for inputs whose gradient is near the observed one, by the L2 distance."
    source: ClassVar[str] = "DLG (Zhu et al. 2019) as in LAMP (Balunovic et al. 2022), Sec. 5 and App. D"

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Match gradients until nothing improves, or the steps or the budget are used up."""
        return reconstruct_by_matching(seen, self.recipe(Objective("l2")), rng, budget)
