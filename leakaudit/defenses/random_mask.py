"""`random-mask`: send each entry of the update with a probability."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from leakaudit.plugins import ClientStep, Defense, Update, defense, random_mask


@defense("random-mask")
@dataclass(frozen=True)
class RandomMask(Defense):
    """Set each entry to zero with probability `share`, and enlarge the others.

    An entry v is sent as v / (1 - share) with probability 1 - share and as zero otherwise, so that its mean is v (Konecny et al. 2016,
    Sec. 3, subsampling). `prune(choose=random)` draws the same mask and does not enlarge what is left.
    """

    share: float = 0.9
    """Probability with which an entry is set to zero, from 0 to below 1; 0 does nothing. Our choice: the default of `prune`."""
    rescale: bool = True
    """Whether what is left is divided by 1 - share. Without it, this is `prune(choose=random)`."""

    label: ClassVar[str] = "random mask"
    meaning: ClassVar[str] = "Sends each entry of the update with a fixed probability, and zero otherwise."
    identity: ClassVar[Mapping[str, Any]] = {"share": 0.0}
    zeroed: ClassVar[bool] = True
    on_update = True
    source: ClassVar[str] = (
        "Konecny et al. 2016 (Federated Learning: Strategies for Improving Communication Efficiency)"
    )
    protects: ClassVar[str] = "Hides random entries; whoever sees the update sees which ones are missing."
    cost: ClassVar[str] = "Noisier training at high shares; the traffic shrinks with the share."

    def __post_init__(self) -> None:
        """Refuse a share outside 0 to 1."""
        if not 0 <= self.share < 1:
            raise ValueError(f"share must be at least 0 and below 1, got {self.share}")

    @property
    def resized(self) -> bool:  # type: ignore[override]  # of the knobs, not of the class
        """Whether the entries that are sent are longer than those of the gradient."""
        return self.rescale and self.share > 0

    def changed(self, update: Update, rng: torch.Generator) -> Update:
        """Return the masked update. `rng` draws the mask in the order of the names."""
        return {name: self._factor * (g * random_mask(g, self.share, rng)) for name, g in update.items()}

    def expected(self, step: ClientStep, recomputed: Update, observed: Update, tolerance: float) -> Update:
        """Return the enlarged entries where an entry was sent, and zero elsewhere.

        The zeros of `observed` show which entries were dropped; this is not checked.
        """
        return {name: self._factor * (g * (observed[name] != 0)) for name, g in recomputed.items()}

    @property
    def _factor(self) -> float:
        return 1 / (1 - self.share) if self.rescale else 1.0
