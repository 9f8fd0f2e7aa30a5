"""What defences share that compress an update: levels and kept entries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from leakaudit.client.observation import Update
from leakaudit.plugins.entry_uncertainty import uncertainties


def at_levels(tensor: Tensor, level: Tensor, chance: Tensor | float) -> Tensor:
    """Return every entry rounded down after a shift, as a multiple of a level.

    With a shift that is drawn from 0 to 1, an entry becomes one of its two neighbours and keeps its value on average. With a shift of a
    half it becomes the nearest one.

    Args:
        tensor: of any shape.
        level: (), distance of two levels, in the units of the tensor; above 0.
        chance: the shift in levels, of the tensor's shape or one for all.
    """
    rounded: Tensor = (tensor / level + chance).floor() * level
    return rounded


def uniform_draws(tensor: Tensor, rng: torch.Generator) -> Tensor:
    """Return numbers from 0 to 1, one for each entry, on the tensor's device."""
    return torch.rand(tensor.shape, generator=rng, device=rng.device).to(tensor.device)


def possible_levels(
    recomputed: Update,
    observed: Update,
    tolerance: float,
    level_of: Callable[[Tensor], Tensor],
    *,
    nearest: bool = False,
    most: float = math.inf,
) -> dict[str, Tensor]:
    """Return for each entry the possible level that is nearest to the observed one.

    Args:
        recomputed: parameter name -> update before rounding, recomputed from the batch.
        observed: parameter name -> update as it was sent.
        tolerance: largest relative error of `recomputed`.
        level_of: returns the distance of two levels of a tensor, (); a tensor without one (0) is not rounded.
        nearest: whether entries are rounded to the nearest level, and not at random.
        most: number of levels on each side of zero.
    """
    off = uncertainties(recomputed, tolerance)

    def rounded(name: str, gradient: Tensor) -> Tensor:
        level = level_of(gradient)
        if not bool(level > 0):
            return gradient
        low, high = (gradient - off[name]) / level, (gradient + off[name]) / level
        below, above = ((low + 0.5).floor(), (high + 0.5).floor()) if nearest else (low.floor(), high.ceil())
        sent: Tensor = (observed[name] / level).round().clamp(below, above).clamp(-most, most) * level
        return sent

    return {name: rounded(name, gradient) for name, gradient in recomputed.items()}


def largest_entries(tensors: Sequence[Tensor], dropped: int) -> list[Tensor]:
    """Return which entries stay if the smallest ones of several tensors are dropped.

    Of entries of equal size, the first ones stay.

    Args:
        tensors: their entries count as one vector.
        dropped: number of dropped entries, from 0 to all of them.

    Returns:
        A tensor of booleans for each tensor, of its shape.
    """
    sizes = torch.cat([tensor.abs().flatten() for tensor in tensors])  # (entries,)
    if dropped == 0:
        kept = torch.ones_like(sizes, dtype=torch.bool)
    else:
        threshold = sizes.kthvalue(dropped).values
        kept = sizes > threshold
        left = len(sizes) - dropped - int(kept.sum())
        kept[(sizes == threshold).nonzero().flatten()[:left]] = True
    parts = kept.split([tensor.numel() for tensor in tensors])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def random_mask(tensor: Tensor, share: float, rng: torch.Generator) -> Tensor:
    """Return which entries stay if each is dropped with a probability.

    Args:
        tensor: of any shape.
        share: the probability.
        rng: source of one number for each entry.
    """
    return uniform_draws(tensor, rng) >= share
