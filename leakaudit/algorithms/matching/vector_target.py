"""The observed gradients of vectors (biases and gains), side by side.

Letters: N candidates, P entries of all vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leakaudit.algorithms.matching.candidate_gradients import Pairs


class VectorTarget:
    """The observed gradients of all vectors, compared in one product."""

    def __init__(self, parts: Sequence[Tensor], device: torch.device, *, kept_only: bool) -> None:
        """Put the vectors side by side.

        Args:
            parts: observed gradients, (size,) each.
            device: of the update, which may have no vectors.
            kept_only: compare only the entries where the observed gradient is not zero.
        """
        self.flat = torch.cat(list(parts)) if parts else torch.zeros(0, device=device)
        """(P,): all vectors side by side."""
        self._sizes = [len(part) for part in parts]
        owner = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(self._sizes, dtype=torch.long))
        self._owner = owner.to(device)
        """(P,) the number of the vector that an entry belongs to."""
        self._kept_only = kept_only

    def flattened(self, pairs: Pairs) -> Tensor:
        """Return (N, P) the candidates' vectors side by side.

        Entries that are not compared are zero.
        """
        if not pairs.vectors:
            return self.flat.new_zeros(len(pairs.inputs[0]), 0)
        return self._compared(torch.cat(pairs.vectors, dim=1).detach())

    def statistics(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return <G, g> and |g|^2 of each vector, (N, vectors) float64 each."""
        return self._by_owner(flat * self.flat), self._by_owner(flat.square())

    def l1(self, flat: Tensor, scale: Tensor) -> Tensor:
        """Return (N,) the L1 distances, float64, of candidates times (N,) a scale."""
        return (scale[:, None].float() * flat - self.flat).abs().sum(dim=1, dtype=torch.float64)

    def l1_by_scale(self, flat: Tensor, scale: Tensor) -> Tensor:
        """Return (N,) the derivatives of the L1 distances by the scale, float64."""
        return ((scale[:, None].float() * flat - self.flat).sign() * flat).sum(dim=1, dtype=torch.float64)

    def derivatives(self, flat: Tensor, a: Tensor, b: Tensor, scale: Tensor, l1: float) -> list[Tensor]:
        """Return the derivatives by each vector, (N, size) each.

        Args:
            flat: (N, P) the candidates.
            a: (N, vectors) derivatives by <G, g>.
            b: (N, vectors) twice the derivatives by |g|^2.
            scale: (N,) factor on every candidate.
            l1: weight of the L1 distance.
        """
        found = a[:, self._owner] * self.flat + b[:, self._owner] * flat  # (N, P)
        if l1:
            size = scale[:, None].float()
            found = found + l1 * size * (size * flat - self.flat).sign()
        return list(self._compared(found).split(self._sizes, dim=1))

    def _compared(self, entries: Tensor) -> Tensor:
        return entries * (self.flat != 0) if self._kept_only else entries

    def _by_owner(self, entries: Tensor) -> Tensor:
        """Return (N, vectors) sums of (N, P) entries over each vector, float64."""
        sums = torch.zeros(len(entries), len(self._sizes), dtype=torch.float64, device=entries.device)
        return sums.index_add_(1, self._owner, entries.double())
