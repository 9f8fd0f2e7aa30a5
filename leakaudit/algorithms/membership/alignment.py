"""How far an update points along a text's own gradient.

An update u of B texts is, up to a factor, the sum of their gradients g. For a text that was not in the round, g . u is not zero: all
gradients share directions. So the part of g that the gradients of the calibration texts explain (ridge regression) is taken out, and
what is left is compared with u:

    t(g) = (g . u - k' A C u) / sqrt(g . g + lambda - k' A k),   k = C g,   A = (C C' + lambda I)^-1,

with the calibration gradients as rows of C (M, P). With u normal of covariance C C' + lambda I, this is the likelihood-ratio test for a
text's gradient in u (own derivation). A calibration text is compared in the same way with the others, by the block inverse of C C' + lambda I.

Entries are divided by their root mean square over the calibration texts, so that a few layers with large gradients do not decide alone. An
optimizer such as Adam has divided its update already. How far the update is divided is read from it: the slope of log |u| over the
log root mean square is 1 for a sum of gradients and 0 for their signs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE = 1e-2
"""Ridge of the regression, as a share of the mean squared norm of the calibration gradients.
Chosen on training texts; see docs/decisions/membership.md."""

SMALLEST = 1e-3
"""Share of the median root mean square that is added to the scale of every entry.
Our choice: entries whose gradient vanishes in nearly all texts then do not dominate."""


@dataclass(frozen=True)
class Alignment:
    """The statistic t of calibration texts and candidates, one for each row."""

    calibration: Tensor
    """(M,) float64, each compared with the calibration texts other than itself."""
    candidates: Tensor
    """(N,) float64."""


def align(update: Tensor, calibration: Tensor, groups: Tensor, candidates: Tensor) -> Alignment:
    """Return t for every calibration text and candidate.

    Args:
        update: (P,) float32, u or an estimate of the gradient behind it.
        calibration: (M, P) float32 gradients of texts that were not in the round.
        groups: (M,) int64: rows of one text, which has several if its label is not known, share a number.
        candidates: (N, P) float32 gradients.
    """
    size = calibration.square().mean(dim=0).sqrt()  # (P,)
    scale = size + SMALLEST * size[size > 0].median() if bool(size.any()) else torch.ones_like(size)
    rows, others = calibration / scale, candidates / scale
    u = update / scale ** slope(update, scale)
    inner = (rows @ rows.T).double()  # (M, M)
    ridge = RIDGE * float(inner.diagonal().mean())
    inverse = torch.linalg.inv(inner + ridge * torch.eye(len(rows), dtype=inner.dtype))
    along = (rows @ u).double()  # (M,)
    shared = (others @ rows.T).double()  # (N, M)
    left = (others @ u).double() - shared @ (inverse @ along)
    free = others.square().sum(dim=1).double() + ridge - ((shared @ inverse) * shared).sum(dim=1)
    return Alignment(_left_out(inverse, along, groups), left / free.clamp_min(1e-300).sqrt())


def _left_out(inverse: Tensor, along: Tensor, groups: Tensor) -> Tensor:
    """Return (M,): t of each calibration row against the rows of other texts."""
    explained = inverse @ along
    found = torch.zeros_like(along)
    for group in groups.unique():
        own = torch.nonzero(groups == group)[:, 0]
        covariance = torch.linalg.inv(inverse[own][:, own])  # given the others
        found[own] = covariance @ explained[own] / covariance.diagonal().sqrt()
    return found


def slope(update: Tensor, scale: Tensor) -> float:
    """Return the slope of log |u| over log scale, within 0 and 1.

    Args:
        update: (P,); zeros are left out.
        scale: (P,) positive.

    >>> scale = torch.tensor([1.0, 2.0, 4.0])
    >>> round(slope(3 * scale, scale), 3), slope(torch.tensor([1.0, -1.0, 1.0]), scale)
    (1.0, 0.0)
    """
    moved = update != 0
    x, y = scale[moved].double().log(), update[moved].double().abs().log()
    x = x - x.mean()
    spread = float(x.square().sum())
    return min(1.0, max(0.0, float((x * y).sum()) / spread)) if spread > 0 else 0.0
