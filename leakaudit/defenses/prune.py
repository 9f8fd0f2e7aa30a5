"""`prune`: send only some entries of the update, the largest or random ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from leakaudit.plugins import ClientStep, Defense, Update, defense

Choice = Literal["magnitude", "random"]


@defense("prune")
@dataclass(frozen=True)
class Prune(Defense):
    """Set a share of all entries to zero: the smallest, or random ones.

    `choose=magnitude` is gradient pruning as DLG proposed it as a defence (Zhu et al. 2019). LAMP "zeroes out a percentage of elements in
    the gradient vector" (App. C.2) and does not say which elements. Its authors' code draws them at random, and so does GRAB
    (Sec. 5.5.2). So `choose=random` is what LAMP's Table 8 and GRAB's Table 7 measure.

    The whole update counts as one vector, as in LAMP. A share per parameter would keep more entries of layers with small
    gradients. With `choose=magnitude` the zero rows of a shared word embedding are pruned first. So with a large vocabulary, a share of
    one half may change nothing at all.
    """

    share: float = 0.9
    """Share of the entries that are set to zero, from 0 to below 1; 0 does nothing. GRAB, Table 7, tries 0.75 to 0.99."""
    choose: Choice = "magnitude"
    """Which entries are set to zero: the smallest, or each with probability `share`."""

    label: ClassVar[str] = "pruning"
    meaning: ClassVar[str] = "Sends only the largest entries of the update, or random ones, and zero for the others."
    identity: ClassVar[Mapping[str, Any]] = {"share": 0.0}
    zeroed: ClassVar[bool] = True
    on_update = True
    source: ClassVar[str] = (
        "Zhu et al. 2019 (magnitude); LAMP (Balunovic et al. 2022, App. C.2), GRAB (Feng et al. 2024, Sec. 5.5.2) (random)"
    )
    protects: ClassVar[str] = "Hides small or random entries; whoever sees the update sees which ones are missing."
    cost: ClassVar[str] = "Worse training at high shares; the traffic shrinks with the share."

    def __post_init__(self) -> None:
        """Refuse a share outside 0 to 1, and an unknown choice."""
        if not 0 <= self.share < 1:
            raise ValueError(f"share must be at least 0 and below 1, got {self.share}")
        if self.choose not in get_args(Choice):
            raise ValueError(f"choose must be one of {', '.join(get_args(Choice))}, got {self.choose!r}")

    def changed(self, update: Update, rng: torch.Generator) -> Update:
        """Return the update with entries set to zero.

        It is the update itself if the share is too small to prune an entry. With `choose=magnitude`, entries as large as the largest pruned
        one are pruned, too.
        """
        if self.choose == "random":
            return self._masked(update, rng)
        magnitudes = torch.cat([tensor.abs().flatten() for tensor in update.values()])  # (entries,)
        pruned = math.floor(self.share * len(magnitudes))
        if pruned == 0:
            return update
        threshold = magnitudes.kthvalue(pruned).values
        return {name: tensor * (tensor.abs() > threshold) for name, tensor in update.items()}

    def _masked(self, update: Update, rng: torch.Generator) -> dict[str, Tensor]:
        """Return the update with each entry set to zero with probability `share`."""
        return {
            name: tensor * (torch.rand(tensor.shape, generator=rng, device=rng.device) >= self.share).to(tensor)
            for name, tensor in update.items()
        }

    def expected(self, step: ClientStep, recomputed: Update, observed: Update, tolerance: float) -> Update:
        """Return the recomputed entries where an entry was sent, and zero elsewhere.

        The zeros of `observed` show which entries were pruned; this is not checked.
        """
        return {name: gradient * (observed[name] != 0) for name, gradient in recomputed.items()}
