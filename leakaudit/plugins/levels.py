"""Rounding to evenly spaced levels, at random or to the nearest one."""

from __future__ import annotations

import torch
from torch import Tensor


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


def drawn(tensor: Tensor, rng: torch.Generator) -> Tensor:
    """Return numbers from 0 to 1, one for each entry, on the tensor's device."""
    return torch.rand(tensor.shape, generator=rng, device=rng.device).to(tensor.device)


def possible_level(gradient: Tensor, observed: Tensor, level: Tensor, error: Tensor, *, nearest: bool) -> Tensor:
    """Return for each entry the possible level that is nearest to the observed one.

    Args:
        gradient: the entries before rounding.
        observed: what was sent, of the same shape.
        level: (), distance of two levels; above 0.
        error: how far an entry of `gradient` may be off, of the same shape.
        nearest: whether entries are rounded to the nearest level, and not at random.
    """
    low, high = (gradient - error) / level, (gradient + error) / level
    below, above = ((low + 0.5).floor(), (high + 0.5).floor()) if nearest else (low.floor(), high.ceil())
    sent: Tensor = (observed / level).round().clamp(below, above) * level
    return sent
