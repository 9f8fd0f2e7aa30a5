"""Estimates of pruned entries from the rank of an update.

An update of few tokens is the sum of as many products x_t d_t^T, so its rank is low. GRAB (Sec. 5.5.2) ignores the pruned
entries. But we know that they are small and that the matrix has a low rank, and this determines most of them: see
docs/methods/matching.md (`fill`). `span.subspace` does the same if the rank is not known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leakaudit.algorithms.span.subspace import FIRST_SHRINKAGE

TURNS = 30
"""Number of turns. Our choice: twice as many turns with a slower decay improve cosines by less than 0.01."""

DECAY = 0.85
"""Factor on the shrinkage in each turn. Our choice: the shrinkage ends at a hundredth of its first value."""


def completed(matrix: Tensor, rank: int, smallest: float) -> Tensor:
    """Return the low-rank matrix that agrees best with the kept entries.

    The magnitude of a missing entry is at most that of the smallest kept entry.

    The method is Soft-impute (Mazumder, Hastie and Tibshirani, JMLR 2010, Algorithm 1). Each turn is one subspace iteration
    that starts from the singular vectors of the turn before, so it costs two products with `rank` columns.

    A rank above half of the smaller side determines almost nothing. The matrix is then returned unchanged, and also if it is zero.

    Args:
        matrix: (rows, columns), zero where an entry is missing.
        rank: number of tokens.
        smallest: smallest magnitude of a kept entry in the whole update.
    """
    kept = matrix != 0
    if 2 * rank > min(matrix.shape) or not bool(kept.any()):
        return matrix
    drawn = torch.randn(matrix.shape[1], rank, generator=torch.Generator().manual_seed(0)).to(matrix)
    filled, right, shrinkage = matrix, torch.linalg.qr(drawn).Q, 0.0
    for turn in range(TURNS):
        left, values, right = _strongest(filled, right)
        shrinkage = shrinkage * DECAY if turn else FIRST_SHRINKAGE * float(values[0])
        low = (left * (values - shrinkage).clamp_min(0)) @ right.T
        filled = torch.where(kept, matrix, low.clamp(-smallest, smallest))
    left, values, right = _strongest(filled, right)
    return (left * values) @ right.T


def _strongest(matrix: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return singular vectors and values after one subspace iteration.

    The iteration starts from `right`, (columns, r), and comes nearer to the r strongest singular vectors. The results are
    (rows, r), (r,) and (columns, r).
    """
    basis = torch.linalg.qr(matrix @ right).Q
    turned, values, vectors = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
    return basis @ turned, values, vectors.T
