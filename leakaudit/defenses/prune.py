"""`prune`: send only the largest entries of the update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from leakaudit.client import ClientStep
from leakaudit.defenses.protocol import Defense
from leakaudit.registry import defense
from leakaudit.snapshot import Observation


@defense("prune")
@dataclass(frozen=True)
class Prune(Defense):
    """Set the smallest entries by magnitude to zero, counted over the whole update as one vector.

    One vector, because that is how the papers state it: a percentage of the elements of the gradient vector (LAMP, App. C.2,
    followed by GRAB, Sec. 5.5.2), the small ones first (Zhu et al. 2019, in GRAB, Sec. 2). A share per parameter would keep
    more of layers with small gradients. Note what counts: most rows of a shared word embedding are zero anyway, and they
    are the first to be pruned, so with a large vocabulary a share of one half may change nothing at all.
    """

    share: float = 0.9
    """Share of entries set to zero, 0 to below 1; 0 leaves the update alone. GRAB, Table 7, tries 0.75 to 0.99."""

    identity: ClassVar[Mapping[str, Any]] = {"share": 0.0}
    zeroed: ClassVar[bool] = True
    source: ClassVar[str] = (
        "LAMP (Balunovic et al. 2022, App. C.2), GRAB (Feng et al. 2024, Sec. 5.5.2), Zhu et al. 2019"
    )
    protects: ClassVar[str] = "Hides small entries; whoever sees the update sees which ones are missing."
    cost: ClassVar[str] = "Worse training at high shares; the traffic shrinks with the share."

    def __post_init__(self) -> None:
        """Refuse a share that is none or leaves nothing."""
        if not 0 <= self.share < 1:
            raise ValueError(f"share must be at least 0 and below 1, got {self.share}")

    def __call__(self, step: ClientStep, seen: Observation, rng: torch.Generator) -> Observation:
        """Return the update with its smallest entries zeroed; entries equal to the last pruned one go, too.

        Declares `share`.
        """
        magnitudes = torch.cat([tensor.abs().flatten() for tensor in seen.update.values()])  # (entries,)
        pruned = math.floor(self.share * len(magnitudes))
        if pruned == 0:
            return seen
        threshold = magnitudes.kthvalue(pruned).values
        kept = {name: tensor * (tensor.abs() > threshold) for name, tensor in seen.update.items()}
        return seen.under(self.declared(), kept)

    def expected(
        self,
        step: ClientStep,
        recomputed: Mapping[str, Tensor],
        observed: Mapping[str, Tensor],
        tolerance: float,
    ) -> Mapping[str, Tensor]:
        """Return the recomputed entries where an entry was sent, and zero elsewhere: which ones were zeroed is seen, not checked."""
        return {name: gradient * (observed[name] != 0) for name, gradient in recomputed.items()}
