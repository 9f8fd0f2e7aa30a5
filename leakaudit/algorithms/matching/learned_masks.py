"""Which dropout masks a search learns, their start values and their penalty.

Letters: N candidates, P entries of dropout masks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor

from leakaudit.algorithms.matching.dropout_masks import MaskLayout

MaskPlaces = Literal["all", "opening"]


class LearnedMasks:
    """The choice of mask entries that a search learns; others stay fixed."""

    def __init__(
        self,
        layout: MaskLayout | None,
        openings: Sequence[Collection[int]],
        device: torch.device,
        *,
        places: MaskPlaces,
        weight: float,
    ) -> None:
        """Choose the entries.

        Args:
            layout: layout of the model's masks; None if dropout is not modelled.
            openings: positions of the opening tokens of each sequence.
            device: device of the masks.
            places: `all` to learn all masks; `opening` to learn those of opening tokens and those that belong to no token. If
                there are no such masks, all are learned.
            weight: weight of `penalty`.
        """
        self._layout, self._device = layout, device
        self.weight = weight
        self.learned = self._chosen(openings, places).to(device)
        """(P,) 1 for mask entries that are learned, else 0."""

    def full(self, candidates: int) -> Tensor:
        """Return (N, P) masks at their mean, 1 - p.

        A pass with these masks equals a pass without dropout.
        """
        rates = torch.zeros(0) if self._layout is None else self._layout.rates
        return (1 - rates).to(self._device).expand(candidates, -1).clone()

    def drawn(self, candidates: int, rng: torch.Generator) -> Tensor:
        """Return (N, P) masks as dropout draws them (GRAB, Algorithm 1, line 1)."""
        kept = self.full(candidates)
        return torch.bernoulli(kept.cpu(), generator=rng).to(kept)

    def penalty(self, masks: Tensor) -> Tensor:
        """Return (N,) float64 the penalty on learned masks.

        It is the weight times the mean of (m - (1 - p))^2 / (p (1 - p)) over learned entries m. For masks that dropout
        draws, the expected mean is 1.

        Args:
            masks: (N, P).
        """
        if self._layout is None or not masks.shape[1]:
            return masks.new_zeros(len(masks), dtype=torch.float64)
        rates = self._layout.rates.to(masks)
        off = (masks - (1 - rates)).square() / (rates * (1 - rates)) * self.learned
        return self.weight * (off.sum(dim=1) / self.learned.sum()).double()

    def _chosen(self, openings: Sequence[Collection[int]], places: MaskPlaces) -> Tensor:
        if self._layout is None:
            return torch.zeros(0)
        chosen = self._layout.of_places(openings)
        everything = places == "all" or not bool(chosen.any())  # a decoder has no token before a text
        return torch.ones(self._layout.entries) if everything else chosen.float()
