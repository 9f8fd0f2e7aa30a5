"""Directions in which the inputs of all groups but one vanish.

Along such a direction an update shows only the gradients of that group. `attribution` groups inputs by token and by
position.
"""

from __future__ import annotations

import torch
from torch import Tensor

WHOLE = 1e-6
"""Largest difference between 1 and the leverage of a group that can be read alone.
Measured; see docs/decisions/span_constants.md."""


def whitening(coordinates: Tensor) -> Tensor:
    """Return W (R, R) with W W^T = M^-1, where M is the sum of z z^T.

    Args:
        coordinates: (N, R) float64 of full column rank; its rows are the z.
    """
    values, vectors = torch.linalg.eigh(coordinates.T @ coordinates)
    white: Tensor = vectors * values.clamp_min(1e-14 * float(values[-1])).rsqrt()
    return white


def isolate(coordinates: Tensor, white: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each group of vectors a direction in which all other groups vanish.

    With M the sum of z z^T over all vectors z and Z the rows of one group, such a direction exists if and only if the
    largest eigenvalue of Z M^-1 Z^T, the group's leverage, is 1. The direction is M^-1 Z^T v for the eigenvector v.

    Args:
        coordinates: (N, R) float64 of full column rank.
        white: (R, R), their `whitening`.
        owner: (N,) int64 group of each row, 0 to K - 1.

    Returns:
        Directions (R, K), scaled so that the longest of a group's own vectors has length 1 along its direction, and
        leverages (K,).
    """
    whitened = coordinates @ white
    directions, leverages = [], []
    for group in range(int(owner.max()) + 1):
        rows = whitened[owner == group]
        spread, mixing = torch.linalg.eigh(rows @ rows.T)
        own = mixing[:, spread > min(1.0 - WHOLE, float(spread[-1]) - 1e-12)]
        # If several directions qualify, take the one whose weights are nearest to equal for all members.
        weights = own @ own.sum(0)
        if float(weights.abs().max()) < 1e-9:
            weights = own[:, -1]
        direction = white @ (rows.T @ weights)
        along = coordinates[owner == group] @ direction
        directions.append(direction / along[along.abs().argmax()])
        leverages.append(spread[-1])
    return torch.stack(directions, dim=1), torch.stack(leverages)
