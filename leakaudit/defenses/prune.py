"""`prune`: send only some entries of the update, the largest or random ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from leakaudit.plugins import ClientStep, Defense, Update, defense, largest_entries, random_mask

Choice = Literal["magnitude", "random"]
Per = Literal["update", "layer"]


@defense("prune")
@dataclass(frozen=True)
class Prune(Defense):
    """Set a share of all entries to zero: the smallest, or random ones.

    `choose=magnitude` is gradient pruning as DLG proposed it as a defence (Zhu et al. 2019). LAMP "zeroes out a percentage of elements in
    the gradient vector" (App. C.2) and does not say which elements. Its authors' code draws them at random, and so does GRAB
    (Sec. 5.5.2). So `choose=random` is what LAMP's Table 8 and GRAB's Table 7 measure.

    With `per=update` the whole update counts as one vector, as in LAMP. With `per=layer` each tensor loses the same share, as in deep
    gradient compression (Lin et al. 2018, Algorithm 1), so that more entries of layers with small gradients are kept; `top-k` is the
    same with the share that is kept. With `choose=magnitude` the zero rows of a shared word embedding are pruned first. So with a large vocabulary, a share of
    one half may change nothing at all.
    """

    share: float = 0.9
    """Share of the entries that are set to zero, from 0 to below 1; 0 does nothing. GRAB, Table 7, tries 0.75 to 0.99."""
    choose: Choice = "magnitude"
    """Which entries are set to zero: the smallest, or each with probability `share`."""
    per: Per = "update"
    """Whether the smallest entries are those of the whole update, or of each tensor. Random entries are the same with both."""

    label: ClassVar[str] = "pruning"
    meaning: ClassVar[str] = "Sends only the largest entries of the update, or random ones, and zero for the others."
    identity: ClassVar[Mapping[str, Any]] = {"share": 0.0}
    zeroed: ClassVar[bool] = True
    on_update = True
    source: ClassVar[str] = (
        "Zhu et al. 2019 (magnitude); LAMP (Balunovic et al. 2022, App. C.2), GRAB (Feng et al. 2024, Sec. 5.5.2) (random); Lin et al. 2018 (per layer)"
    )
    protects: ClassVar[str] = "Hides small or random entries; whoever sees the update sees which ones are missing."
    cost: ClassVar[str] = "Worse training at high shares; the traffic shrinks with the share."

    def __post_init__(self) -> None:
        """Refuse a share outside 0 to 1, and unknown words."""
        if not 0 <= self.share < 1:
            raise ValueError(f"share must be at least 0 and below 1, got {self.share}")
        if self.choose not in get_args(Choice):
            raise ValueError(f"choose must be one of {', '.join(get_args(Choice))}, got {self.choose!r}")
        if self.per not in get_args(Per):
            raise ValueError(f"per must be one of {', '.join(get_args(Per))}, got {self.per!r}")

    def changed(self, update: Update, rng: torch.Generator) -> Update:
        """Return the update with entries set to zero.

        It is the update itself if the share is too small to prune an entry. `rng` draws random entries in the order of the names.
        """
        if self.choose == "random":
            return {name: g * random_mask(g, self.share, rng) for name, g in update.items()}
        groups = [[name] for name in update] if self.per == "layer" else [list(update)]
        pruned: dict[str, Tensor] = {}
        for names in groups:
            dropped = math.floor(self.share * sum(update[name].numel() for name in names))
            if dropped:
                kept = largest_entries([update[name] for name in names], dropped)
                pruned |= {name: update[name] * mask for name, mask in zip(names, kept, strict=True)}
        return {name: pruned.get(name, g) for name, g in update.items()} if pruned else update

    def expected(self, step: ClientStep, recomputed: Update, observed: Update, tolerance: float) -> Update:
        """Return the recomputed entries where an entry was sent, and zero elsewhere.

        The zeros of `observed` show which entries were pruned; this is not checked.
        """
        return {name: gradient * (observed[name] != 0) for name, gradient in recomputed.items()}
