"""A metric for cosines that gives weak tokens more weight.

A weight's update G is a sum over tokens, and a few of them make up most of it. So a cosine of 0.99 says nothing about the
others. The singular values s_i and vectors l_i, r_i of G tell which directions are strong, without naming a token. So
gradients are compared as U g V, with

    U = (G G^T)^(-1/4),   V = (G^T G)^(-1/4),

up to a factor. Singular values below a floor are replaced by the floor; under noise, the floor is at least the largest
singular value of the noise itself. All singular values of U G V that were above the floor are equal, and a token outside of
the span of G has the most weight. (Own.
Shampoo, Gupta et al., ICML 2018, preconditions updates by the same two factors.)
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

FLOOR = 0.1
"""Smallest singular value, relative to the largest, that counts as it is; smaller ones and absent directions count as
this. Chosen on training sentences (0.05 and 0.2 do about as well); see docs/decisions/matching.md. Under noise the
floor is at least the largest singular value of the noise itself, sigma (sqrt(out) + sqrt(in))."""


class Metric(NamedTuple):
    """Eigenvalues of U^2 and V^2, which are equal; the strongest is 1."""

    absent: float
    """The eigenvalue of all directions that the update lacks."""
    present: Tensor
    """(r,) the eigenvalues of the directions that it has."""


def metric_of(values: Tensor, noise: float) -> Metric:
    """Return the metric that an update gives its weight matrix.

    Args:
        values: (r,) singular values, the largest first and not zero.
        noise: largest singular value that noise is expected to have in this matrix; if it is larger than the update's,
            all directions count alike.
    """
    largest = float(values[0])
    floor = min(max(FLOOR * largest, noise), largest)
    return Metric(largest / floor, largest / values.clamp_min(floor))
