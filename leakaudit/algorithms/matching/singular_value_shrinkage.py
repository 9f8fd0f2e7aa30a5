"""Removal of noise from an update, by its rank.

An update of few tokens is the sum of as many products x_t d_t^T; noise is not. Noise hardly changes the cosine of a single
guess. But a search follows the derivatives G x_t and G^T d_t, and these are dominated by noise outside the span of every
text. Shrinking the singular values removes most of this noise: see docs/methods/matching.md (`denoise`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def denoised(matrix: Tensor, rank: int, sigma: float) -> Tensor:
    """Return the low-rank matrix that is expected to be nearest to the clean one.

    It has at most the given rank, and is zero if no singular value is above the noise.

    The singular values are shrunk so that the expected squared error is smallest (Gavish and Donoho, "Optimal Shrinkage of Singular
    Values", IEEE Trans. Inf. Theory 2017, Frobenius loss). With y in units of sigma sqrt(n), n the larger of the numbers of
    rows and columns, and beta <= 1 the ratio of the smaller to the larger,

        y -> sqrt((y^2 - beta - 1)^2 - 4 beta) / y    where y > 1 + sqrt(beta), else 0.

    Args:
        matrix: (rows, columns).
        rank: number of tokens.
        sigma: standard deviation of the noise on every entry, above 0.
    """
    short, long = sorted(matrix.shape)
    beta, unit = short / long, sigma * long**0.5
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    left, power, right = left[:, :rank], (values[:rank] / unit).square(), right[:rank]
    shrunk = ((power - beta - 1).square() - 4 * beta).clamp_min(0.0).sqrt() / power.sqrt().clamp_min(1e-300)
    kept = torch.where(power.sqrt() > 1 + beta**0.5, unit * shrunk, 0.0)
    found: Tensor = (left * kept) @ right
    return found.to(matrix)
