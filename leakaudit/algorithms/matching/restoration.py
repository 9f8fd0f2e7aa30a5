"""Restoration of a damaged update, and weights for its cosines.

Pruned entries are filled in, and noise is removed.

Letters: K parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from leakaudit.algorithms.matching.low_rank_completion import completed
from leakaudit.algorithms.matching.objective import Objective
from leakaudit.algorithms.matching.singular_value_shrinkage import denoised
from leakaudit.algorithms.span.subspace import smallest_kept

TINY = 1e-30
"""Keeps quotients finite."""

HARM = 2.0
"""Cosines get different weights if part of an update's power is noise or was pruned. The effect grows with this share, times
this factor, and is complete from a half on, which noise as large as the update gives. Our choice: with less damage, equal
weights did better on training sentences; see docs/decisions/matching.md."""


def _powers(parts: Sequence[Tensor]) -> Tensor:
    """Return (K,) float64 the squared norms of some gradients."""
    return torch.stack([part.double().square().sum() for part in parts])


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """Return part / whole, and zero where the whole is zero."""
    return torch.where(whole > 0, part / whole.clamp_min(TINY), 0.0)


class Restored(NamedTuple):
    """An update after restoration, and the damage that was found."""

    matrices: list[Tensor]
    power: Tensor
    """(K,) |G|^2 of every parameter after restoration, vectors last."""
    sure: Tensor
    """(K,) the expected squared cosine of each parameter's update with the update before noise."""
    noise: float
    """Share of the observed update's power that was noise."""
    pruned: float
    """Share of the update's power that was pruned and has been filled in."""


def restore(
    objective: Objective,
    matrices: list[Tensor],
    vectors: Sequence[Tensor],
    update: Mapping[str, Tensor],
    tokens: int,
    sigmas: Sequence[float],
) -> Restored:
    """Fill in pruned entries and remove noise, if the objective says so.

    Args:
        objective: says so by `filled` and `sigma`.
        matrices: observed.
        vectors: observed; they have no rank and stay as they are.
        update: the whole update; its smallest entry bounds what was pruned.
        tokens: the rank of matrices without noise or pruning.
        sigmas: standard deviation of the noise on each matrix, then on each vector.
    """
    power = observed = _powers([*matrices, *vectors])
    if objective.filled:
        smallest = smallest_kept(update)
        matrices = [completed(matrix, tokens, smallest) for matrix in matrices]
        power = _powers([*matrices, *vectors])
    entries = torch.tensor([part.numel() for part in (*matrices, *vectors)]).to(power)
    noise, left = torch.tensor(sigmas).to(power).square() * entries, power
    if objective.sigma and not objective.masked:
        levels = zip(matrices, sigmas, strict=False)  # vectors have no rank
        without = [denoised(matrix, tokens, sigma) if sigma else matrix for matrix, sigma in levels]
        if any(
            bool(matrix.any()) for matrix in without
        ):  # else no singular value is above noise: the noisy update is the best guess
            matrices, left = without, _powers([*without, *vectors])
    clean = (power - noise).clamp_min(0.0)  # expected |G|^2
    # Noise adds to <G, G> but not to <G, g>; shrinkage makes both equal. In both cases cos^2 is the smaller over the larger.
    sure = _ratio(torch.minimum(clean, left), torch.maximum(clean, left))
    shares = (float(harm.clamp_min(0.0).sum() / power.sum().clamp_min(TINY)) for harm in (noise, power - observed))
    return Restored(matrices, left, sure, *shares)


def weights_of(restored: Restored, groups: Tensor) -> Tensor:
    """Return (groups,) the weight of each group's cosine in the mean.

    The weights add up to 1, unless no parameter has an update.

    Args:
        restored: the update that is compared.
        groups: (K, groups) 1 if a parameter belongs to a group, else 0.
    """
    power, sure = restored.power, restored.sure
    if not bool((power * sure).any()):  # all is noise, so no parameter is better than another
        sure = torch.ones_like(sure)
    by_group = power @ groups
    believed = _ratio((power * sure) @ groups, by_group) ** min(1.0, HARM * restored.noise)
    counted = (by_group > 0) * (believed * by_group.sqrt() ** min(1.0, HARM * restored.pruned))
    return counted / counted.sum().clamp_min(TINY)
