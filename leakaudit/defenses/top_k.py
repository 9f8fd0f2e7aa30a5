"""`top-k`: send the largest entries of each tensor, and perhaps the others later."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from leakaudit.plugins import ClientStep, Defense, Update, defense, largest_entries


@defense("top-k")
@dataclass(frozen=True)
class TopK(Defense):
    """Send the largest entries of each tensor, at least one, and zero for the others.

    Of n entries ceil(share n) are sent. Without error feedback this is `prune(share=1 - share, per=layer)`. With it, training adds what
    was not sent to the next update (`leakaudit.plugins.error_feedback`): it is sent later, so that a window of steps hides less than its steps.
    """

    share: float = 0.01
    """Share of the entries that are sent, above 0 and at most 1; 1 does nothing. Usual: 0.001 to 0.1 (Lin et al. 2018 send 0.001)."""
    error_feedback: bool = False
    """Whether entries that were not sent are added to the next update. An audit of one step refuses it."""

    label: ClassVar[str] = "top-k"
    meaning: ClassVar[str] = "Sends only the largest entries of each tensor of the update."
    identity: ClassVar[Mapping[str, Any]] = {"share": 1.0}
    zeroed: ClassVar[bool] = True
    on_update = True
    source: ClassVar[str] = "Lin et al. 2018 (Deep Gradient Compression), Algorithm 1; Stich et al. 2018 (memory)"
    protects: ClassVar[str] = "Hides the small entries of a step; with error feedback they are sent later."
    cost: ClassVar[str] = (
        "Worse training at small shares, much less with error feedback; the traffic shrinks with the share."
    )

    def __post_init__(self) -> None:
        """Refuse a share outside 0 to 1."""
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, got {self.share}")

    def changed(self, update: Update, rng: torch.Generator) -> Update:
        """Return the largest entries of each tensor; the update itself if all are sent."""
        dropped = {name: g.numel() - math.ceil(self.share * g.numel()) for name, g in update.items()}
        if not any(dropped.values()):
            return update
        return {name: g * largest_entries([g], dropped[name])[0] for name, g in update.items()}

    def expected(self, step: ClientStep, recomputed: Update, observed: Update, tolerance: float) -> Update:
        """Return the recomputed entries where an entry was sent, and zero elsewhere.

        Which entries are the largest is not checked, because recomputed entries of nearly equal size may change places.

        Raises:
            SnapshotError: the defence has error feedback.
        """
        self.check_one_step()
        return {name: gradient * (observed[name] != 0) for name, gradient in recomputed.items()}
