"""Factors between an observed update and the recomputed one, and their reasons."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from scipy import optimize

from leakaudit.audit.accuracy import Accuracy
from leakaudit.audit.comparison import UpdateComparison
from leakaudit.client.step import ClientStep

FACTOR_TOLERANCE = 1e-3
"""Largest relative distance of a factor from a known one. Our choice."""


def why_scaled(step: ClientStep, found: UpdateComparison, k: float, rounding: float) -> str:
    """Return the usual reason for a factor `k`; empty if no usual reason fits.

    Args:
        step: the step with its number of micro-batches and processes.
        found: the comparison with the expected update.
        k: the factor.
        rounding: relative error of `k`, from the rounding of the gradient that it multiplied.
    """
    windows, processes = len(step.truth.micro_batches), step.recipe.processes
    norm = found.seen_norm
    round_norm = float(f"{norm:.1g}")
    named = [
        (k, windows, "the number of micro-batches"),
        (k, 1 / windows, "one over the number of micro-batches"),
        (k, processes, "the number of processes"),
        (k, 1 / processes, "one over the number of processes"),
    ]
    for value, known, name in named:
        if known != 1 and abs(value - known) <= FACTOR_TOLERANCE * known:
            return f"the factor is {name}"
    exponent = math.log2(1 / k)
    if step.recipe.autocast == "fp16" and exponent >= 1 and abs(exponent - round(exponent)) <= FACTOR_TOLERANCE:
        return f"one over 2^{round(exponent)}, as of a GradScaler that the audit was not told of"
    # Both the factor and the gradient are rounded.
    if k < 1 and abs(norm - round_norm) <= max(FACTOR_TOLERANCE, 2 * rounding) * round_norm:
        return f"as if clipped to a norm of {round_norm:g}"
    return ""


def refined_factors(
    guess: float, compare: Callable[[float], UpdateComparison], accuracy: Accuracy
) -> Iterator[tuple[float, UpdateComparison]]:
    """Yield better and better factors of a gradient before its defences.

    A defence that jumps (a level, a rounded number) hides most of a wrong factor, so that dividing by what is left converges slowly. The
    last factor is the one whose update differs least.

    Args:
        guess: of the factor.
        compare: compares the observed update with the expected one for a factor.
        accuracy: how exactly the step can be computed again.

    Yields:
        A factor and its comparison; at most three.
    """
    factor, again = guess, None
    for _ in range(2):
        if not 0 < factor < math.inf:
            return
        again = compare(factor)
        yield factor, again
        factor *= again.scale
    if again is not None and again.error <= accuracy.largest and factor > 0:
        room = 1 + accuracy.largest
        bounds, precision = (factor / room, factor * room), factor * accuracy.tight

        def error(k: float) -> float:
            return compare(k).error

        found = optimize.minimize_scalar(error, bounds=bounds, method="bounded", options={"xatol": precision})
        yield float(found.x), compare(float(found.x))
