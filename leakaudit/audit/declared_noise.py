"""How an update with declared noise compares with the recomputed one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from leakaudit.audit.comparison import Update, UpdateComparison
from leakaudit.client.noise_level import NoiseLevel

NOISE_TOLERANCE = 0.1
"""Largest relative error of a residual's standard deviation.

The error is relative to the standard deviation of the declared noise. Our choice.
"""


STANDARD_ERRORS = 5.0
"""Largest distance of a noised update's projection from 1, in standard errors.

The update is projected on the recomputed update. By chance, the projection is further away in one of two million steps. The update of
another batch has a projection below 1, with any noise.
"""

SAME_DIRECTION = 0.2
"""Smallest cosine of two updates that may have the same direction. Our choice.

Other dropout masks may turn an update further: at rate 0.1 the cosine was -0.07 to 0.15 in a BERT of random weights with two layers (20
batches of two texts). So a step whose masks are lost is a mismatch only if its cosine is below the negative of this number.
"""


def same_direction(found: UpdateComparison, sigma: float) -> bool:
    """Return whether the two updates may have the same direction, given the noise."""
    if not sigma:
        return found.cosine >= SAME_DIRECTION
    return found.scale + STANDARD_ERRORS * sigma / found.norm >= SAME_DIRECTION


def opposite_direction(found: UpdateComparison, sigma: float) -> bool:
    """Return whether the two updates certainly have opposite directions."""
    if not sigma:
        return found.cosine <= -SAME_DIRECTION
    return found.scale + STANDARD_ERRORS * sigma / found.norm <= -SAME_DIRECTION


def clipping_hint(found: UpdateComparison, sigma: float) -> str:
    """Return a hint if a factor before the declared noise would explain the update.

    Another batch may explain the update as well. Empty if such a factor would not explain it.
    """
    if not sigma or found.scale <= STANDARD_ERRORS * sigma / found.norm:
        return ""
    left = found.scaled_difference.std
    if not any(abs(left - level) <= NOISE_TOLERANCE * level for level in (sigma, found.scale * sigma)):
        return ""
    return (
        f"; the declared noise would fit if the gradient was multiplied by {found.scale:.2g} before the noise, or if this is another "
        "batch: give `max_grad_norm` if the loop clips"
    )


def is_noise(found: UpdateComparison, sigma: float, tolerance: float) -> bool:
    """Return whether the difference is independent noise of `sigma`.

    The difference must be as large as declared and unrelated to the update. The projection of independent noise on the update g has the
    standard deviation sigma / |g| in units of g. Without the second condition, noise far larger than the signal would hide the update of
    another batch.

    Args:
        found: the observed and the recomputed update.
        sigma: declared standard deviation.
        tolerance: relative error of the recomputation itself.
    """
    if abs(found.difference.std - sigma) > NOISE_TOLERANCE * sigma:
        return False
    return abs(found.scale - 1) <= tolerance + STANDARD_ERRORS * sigma / found.norm


def root_mean_square_level(levels: NoiseLevel, found: Update) -> float:
    """Return the standard deviation of the noise over all entries of an update."""
    if levels.is_even:
        return levels.largest
    entries = sum(tensor.numel() for tensor in found.values())
    total = sum(tensor.numel() * levels.of(name) ** 2 for name, tensor in found.items())
    return math.sqrt(total / max(1, entries))


def fits_levels(found: UpdateComparison, levels: NoiseLevel, tolerance: float) -> bool:
    """Return whether the difference is noise of each parameter's own level.

    Parameters without noise have to be equal up to `tolerance`, relative to the whole update.

    Args:
        found: the observed and the recomputed update.
        levels: declared for its parameters.
        tolerance: relative error of the recomputation itself.
    """
    if levels.is_even:
        return is_noise(found, levels.largest, tolerance)
    for level in set(levels.by_parameter.values()):
        own = {name: tensor for name, tensor in found.own.items() if levels.of(name) == level}
        part = UpdateComparison.of(found.seen, own)
        if level == 0.0 and part.difference.norm > tolerance * found.norm:
            return False
        if level > 0.0 and part.norm > 0.0 and not is_noise(part, level, tolerance):
            return False
    return True


def noise_is_changed(noisy: Sequence[bool]) -> bool:
    """Return whether a defence without noise was applied after one with noise.

    Args:
        noisy: whether each declared defence adds noise, in the order in which they apply.
    """
    return any(noisy) and not all(noisy[noisy.index(True) :])
