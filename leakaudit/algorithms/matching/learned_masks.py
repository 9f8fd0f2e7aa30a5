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
    """The mask entries of a candidate that are learned; the others stay as they are."""

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
            layout: of the model's masks; None where dropout is not modelled.
            openings: positions of opening tokens, for each sequence.
            device: of the result.
            places: learn masks of all tokens, or of opening tokens and of no token.
            weight: of `penalty`.
        """
        self._layout, self._device = layout, device
        self.weight = weight
        self.learned = self._chosen(openings, places).to(device)
        """(P,) one for mask entries that are learned, zero for the others."""

    def full(self, candidates: int) -> Tensor:
        """Return (N, P) masks at their mean, 1 - p.

        A pass with them is one without dropout.
        """
        rates = torch.zeros(0) if self._layout is None else self._layout.rates
        return (1 - rates).to(self._device).expand(candidates, -1).clone()

    def drawn(self, candidates: int, rng: torch.Generator) -> Tensor:
        """Return (N, P) masks as dropout draws them (GRAB, Algorithm 1, line 1)."""
        kept = self.full(candidates)
        return torch.bernoulli(kept.cpu(), generator=rng).to(kept)

    def penalty(self, masks: Tensor) -> Tensor:
        """Return (N,) float64 the penalty on learned masks.

        It is the weight times the mean of (m - (1 - p))^2 / (p (1 - p)) over learned entries m. The mean is 1 for masks
        as dropout draws them.

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
