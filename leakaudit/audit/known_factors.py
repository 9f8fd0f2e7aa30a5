"""The usual reasons why an update is a multiple of the recomputed one."""

from __future__ import annotations

import math

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
