"""A metric for cosines in which weak tokens count: what the strong ones leave of a distance is otherwise too flat to find them by.

A weight's update G is a sum over tokens, and few of them make up most of it: a cosine of 0.99 says nothing about the others. Its singular
values s_i and vectors u_i, v_i tell which directions are strong, without naming a token. So gradients are compared as U g V, with

    U = (G G^T)^(-1/4),   V = (G^T G)^(-1/4),

up to a factor, and no singular value taken for smaller than FLOOR s_1. U G V has all its larger singular values alike, and a token that lies
outside of what G spans counts most. (Own. Shampoo, Gupta et al., ICML 2018, preconditions updates by the same two factors.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FLOOR = 0.1
"""Singular value, relative to the largest, below which a direction counts like one of which the update has nothing. Our choice: of the words
of 16 training sentences (CoLA, `fast`, steps of 0.6) 79, 87 and 76 % came out in their places at 0.05, 0.1 and 0.2, which is little more than chance."""


class Side(NamedTuple):
    """U^2 or V^2 of one weight matrix."""

    directions: Tensor
    """(r, size) orthonormal rows."""
    discounts: Tensor
    """(r,) in [0, 1): what a direction counts less than those that the update does not have."""

    def of(self, rows: Tensor) -> Tensor:
        """Return (..., size) the square applied to rows of that shape."""
        return (rows - (rows @ self.directions.T * self.discounts) @ self.directions) / FLOOR


class Metric(NamedTuple):
    """Both sides of one weight matrix."""

    outputs: Side
    """U^2."""
    inputs: Side
    """V^2."""


def metric_of(basis: Tensor, inside: Tensor) -> Metric:
    """Return the metric that an update G, not zero, gives its weight matrix.

    Args:
        basis: (out, r) with orthonormal columns.
        inside: (r, in): G is the product of both, or nearly so.
    """
    left, values, right = torch.linalg.svd(inside.double(), full_matrices=False)
    strong = values > FLOOR * values[0]
    discounts = (1 - FLOOR * values[0] / values[strong]).to(inside)
    return Metric(
        Side((basis @ left[:, strong].to(inside)).T, discounts),
        Side(right[strong].to(inside), discounts),
    )
