"""`lamp-l1l2`: LAMP with TAG's distance."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from leakaudit.attacks.embedding_rows import word_embedding
from leakaudit.attacks.lamp import Lamp
from leakaudit.attacks.matching_attack import check_knobs, match
from leakaudit.attacks.matching_objective import Objective
from leakaudit.attacks.reconstruction import Reconstruction
from leakaudit.budget import Budget
from leakaudit.registry import attack
from leakaudit.snapshot import Observation


@attack("lamp-l1l2")
@dataclass(frozen=True)
class LampL1L2(Lamp):
    """`lamp-cos` with sum_i ||G_i - g_i(x)||_2^2 + alpha ||G_i - g_i(x)||_1 in the place of the cosine.

    The weights of regulariser and prior belong to the size of that sum, so they are relative to the observed update's: alpha_reg and
    alpha_lm are multiplied by the distance of a zero gradient, ||G||_2^2 + alpha ||G||_1.
    """

    alpha: float = 0.01
    """Weight of the L1 term (App. D)."""
    length_weight: float = 1.0
    """alpha_reg, relative to the distance of a zero gradient."""
    prior_weight: float = 0.2
    """alpha_lm, likewise."""

    def __post_init__(self) -> None:
        """Refuse knobs that leave nothing to do, and a metric that is a cosine's."""
        super().__post_init__()
        check_knobs(self, not_negative=("alpha",))
        if self.whitened:
            raise ValueError("whitened is `lamp-cos`'s: a metric for cosines, and an L1 distance has none")

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Match gradients until no token changes, the steps are used up or the budget is."""
        matched = [update for name, update in seen.update.items() if name != word_embedding(seen)]
        size = sum(float(update.square().sum()) + self.alpha * float(update.abs().sum()) for update in matched)
        recipe = self.recipe(
            seen,
            Objective("l2", l1=self.alpha),
            length_weight=self.length_weight * size,
            prior_weight=self.prior_weight * size,
        )
        return match(seen, recipe, rng, budget)
