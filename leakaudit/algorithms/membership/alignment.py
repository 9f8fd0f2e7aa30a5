"""How far an update points along a text's own gradient.

An update u of B texts is, up to a factor, the sum of their gradients g. For a text that was not in the round, g . u is not zero: all
gradients share directions. So the part of g that the gradients of the other texts explain (ridge regression) is taken out, and what is left
is compared with u:

    t(g) = (g . u - k' A C u) / sqrt(g . g + lambda - k' A k),   k = C g,   A = (C C' + lambda I)^-1,

with the gradients of the other texts as rows of C. It is the estimate of the text's share in u, divided by its standard error (generalised
least squares, own derivation). Members among the other texts take their own shares out of u. All t come from one inverse: that of the
matrix of all texts has the numbers that leave out one of them (block inverse).

Entries are divided by their root mean square over the texts, so that a few layers with large gradients do not decide alone. An
optimizer such as Adam has divided its update already. How far the update is divided is read from it: the slope of log |u| over the
log root mean square is 1 for a sum of gradients and 0 for their signs.
"""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-2
"""Ridge of the regression, as a share of the mean squared norm of the gradients.
Chosen on training texts; see docs/decisions/membership.md."""

SMALLEST = 1e-3
"""Share of the median root mean square that is added to the scale of every entry.
Our choice: entries whose gradient vanishes in nearly all texts then do not dominate."""


def align(update: Tensor, gradients: Tensor, groups: Tensor) -> Tensor:
    """Return (rows,) float64: t of every text, compared with all other texts.

    Args:
        update: (P,) float32, u or an estimate of the gradient behind it.
        gradients: (rows, P) float32, of candidates and of texts that were not in the round.
        groups: (rows,) int64: rows of one text, which has several if its label is not known, share a number.
    """
    size = gradients.square().mean(dim=0).sqrt()  # (P,)
    scale = size + SMALLEST * size[size > 0].median() if bool(size.any()) else torch.ones_like(size)
    rows = gradients / scale
    u = update / scale ** slope(update, scale)
    inner = (rows @ rows.T).double()  # (rows, rows)
    ridge = RIDGE * float(inner.diagonal().mean())
    inverse = torch.linalg.inv(inner + ridge * torch.eye(len(rows), dtype=inner.dtype))
    explained = inverse @ (rows @ u).double()
    found = torch.zeros_like(explained)
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
