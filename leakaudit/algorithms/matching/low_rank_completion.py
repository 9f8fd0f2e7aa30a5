"""Estimates of pruned entries from the rank of an update.

An update of few tokens is the sum of as many products x_t d_t^T, so its rank is low. A mask (GRAB, Sec. 5.5.2) leaves
the removed entries out. But they are known to be small and the matrix to have a low rank, which determines most of
them: see docs/methods/matching.md (`fill`). `span.subspace` does the same where the rank is not known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leakaudit.algorithms.span.subspace import FIRST_SHRINKAGE

TURNS = 30
"""Turns of filling in. Our choice: twice as many, with a slower decay, improve cosines by less than 0.01."""

DECAY = 0.85
"""Factor on the shrinkage each turn. Our choice: it ends at a hundredth of its start."""


def completed(matrix: Tensor, rank: int, smallest: float) -> Tensor:
    """Return the low-rank matrix that agrees best with the kept entries.

    Missing entries are known to be below all that were kept.

    Soft-impute (Mazumder, Hastie and Tibshirani, JMLR 2010, Algorithm 1) with the singular vectors of the turn
    before as the start of a subspace iteration: a turn costs two products with `rank` columns.

    A rank of more than half of the smaller side says next to nothing; the matrix is then returned unchanged.

    Args:
        matrix: (rows, columns), zero where an entry is missing.
        rank: number of tokens.
        smallest: smallest magnitude that was kept anywhere.
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
    """Return one subspace iteration's singular vectors and values.

    (rows, r), (r,) and (columns, r); they are nearer to the largest than `right`, (columns, r), was.
    """
    basis = torch.linalg.qr(matrix @ right).Q
    turned, values, vectors = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
    return basis @ turned, values, vectors.T
