"""The subspace that the attention inputs of a step span, read off the update of the layers that see them.

For a linear layer y = W x the update is sum_i dy_i x_i^T: its row space is the span of the inputs x_i of all real tokens,
as long as there are fewer distinct inputs than the hidden size D. Query, key and value read the same inputs, so their
updates are stacked (Petrov et al., DAGER, NeurIPS 2024, Sec. 4.1 use one of them; stacking is ours: a token that hardly
asks may still be asked).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.anatomy import Anatomy

FLOAT32_FLOOR = 3e-7
"""Singular values below this share of the largest are rounding. Measured: 2e-8 to 5e-8 on updates summed in float32 over 15
to 250 tokens (six-layer BERT encoder, D = 384, texts of a train split); set an order of magnitude above."""

FULL_RANK_MARGIN = 4
"""Directions that must stay empty for the span to say anything. Our choice: fewer leave no gap to see."""


@dataclass(frozen=True)
class Basis:
    """An orthonormal basis of the span."""

    vectors: Tensor
    """(R, D) float64, orthonormal rows."""
    gap: float
    """Ratio between the last singular value kept and the first one left out; large means the rank is sure."""
    noisy: bool
    """No rounding floor was found below the kept values: the update was damaged (noise, rounding, pruning)."""

    @property
    def rank(self) -> int:
        """Number R of directions."""
        return int(self.vectors.shape[0])


def stacked_update(update: Mapping[str, Tensor], anatomy: Anatomy) -> Tensor:
    """Return (F, D) float64: the updates of all layers that read the attention input, each at norm 1, by output feature."""
    rows = []
    for projection in anatomy.projections:
        if projection.weight in update:
            gradient = projection.by_output(update[projection.weight]).double()
            norm = gradient.norm()
            if norm > 0:
                rows.append(gradient / norm)
    if not rows:
        return torch.zeros(0, anatomy.hidden, dtype=torch.float64)
    return torch.cat(rows)


def span_of(stacked: Tensor) -> Basis:
    """Find the row space of a stacked update; the rank is where the singular values fall off a cliff.

    Singular values come from the D x D Gram matrix in float64: squares down to 1e-16 of the largest are resolved, which is
    1e-8 in singular values and below what float32 sums leave.

    Args:
        stacked: (F, D) float64.
    """
    values, vectors = torch.linalg.eigh(stacked.T @ stacked)
    singular = values.flip(0).clamp_min(0).sqrt()
    vectors = vectors.flip(1).T  # (D, D) rows by falling singular value
    floor = singular[0] * FLOAT32_FLOOR
    clean = int((singular > floor).sum())
    if clean <= len(singular) - FULL_RANK_MARGIN:
        rank = _sharpest_fall(singular, clean)
        return Basis(vectors[:rank], gap=float(singular[rank - 1] / singular[rank].clamp_min(1e-300)), noisy=False)
    # Damaged: noise fills every direction. Keep what stands out of the bulk of the noise.
    rank = _above_noise(singular, stacked.shape)
    return Basis(
        vectors[:rank], gap=float(singular[rank - 1] / singular[rank]) if rank < len(singular) else 1.0, noisy=True
    )


def _sharpest_fall(singular: Tensor, clean: int) -> int:
    """Return the rank at the largest ratio of neighbours around the rounding floor.

    The floor alone may cut a weak true direction or keep a strong rounding one; within a factor of 30 of it the largest
    fall decides. 30 is our choice: rounding values differ by less among each other.
    """
    low = int((singular > 30 * FLOAT32_FLOOR * singular[0]).sum())
    high = int((singular > FLOAT32_FLOOR / 10 * singular[0]).sum())
    candidates = range(max(1, min(low, clean)), min(len(singular) - 1, max(high, clean)) + 1)
    falls = {rank: float(singular[rank - 1] / singular[rank].clamp_min(1e-300)) for rank in candidates}
    return max(falls, key=lambda rank: falls[rank])


def _above_noise(singular: Tensor, shape: torch.Size) -> int:
    """Return how many singular values exceed what noise alone explains.

    The optimal hard threshold for unknown noise is omega(beta) times the median singular value, omega from the polynomial
    0.56 b^3 - 0.95 b^2 + 1.82 b + 1.43 (Gavish and Donoho, IEEE Trans. Inf. Theory 2014, Eq. 5).
    """
    short, long = sorted(shape)
    beta = short / long
    omega = 0.56 * beta**3 - 0.95 * beta**2 + 1.82 * beta + 1.43
    return max(1, int((singular > omega * singular.median()).sum()))
