"""What noise defences share: a standard deviation that is given relative to the update."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def check_scale(scale: float) -> None:
    """Refuse negative noise.

    Raises:
        ValueError: the scale is negative.
    """
    if scale < 0:
        raise ValueError(f"scale must be 0 or more, got {scale}")


def sigma_of(update: Mapping[str, Tensor], scale: float) -> float:
    """Return scale * RMS(g) over all entries of the update, in its units."""
    entries = sum(tensor.numel() for tensor in update.values())
    squares = sum(float(tensor.double().square().sum()) for tensor in update.values())
    mean = squares / entries
    return scale * float(mean**0.5)
