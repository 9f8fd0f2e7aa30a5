"""Bounds of the difference of two leak rates, for `compare` and the gate.

Each bound is one-sided. The steps of the two audits are either the same batches, so that they make pairs, or two samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from leakaudit.results.bounds import lower_bound, sign_test, upper_bound

PAIRED = "square-and-add over pairs, Clopper-Pearson bounds"
"""How the difference is bounded where the batches are the same."""

TWO_SAMPLES = "square-and-add over two samples, Clopper-Pearson bounds"
"""How the difference is bounded where they are not."""

_MOST_STEPS = 1_000_000
"""Largest number of further steps that is tried. Our choice: no audit has more."""


def difference_of_rates(base: tuple[int, int], new: tuple[int, int], confidence: float = 0.95) -> tuple[float, float]:
    """Bound the difference new - base of two independent rates.

    The bounds of both rates are combined by the square-and-add rule. Source: Newcombe 1998, method 10; Zou and Donner 2008 for any pair of
    bounds. We use Clopper-Pearson bounds, so the interval errs on the wide side.

    Args:
        base: leaks and steps.
        new: leaks and steps.
        confidence: of each one-sided bound.

    >>> lower, upper = difference_of_rates((0, 20), (20, 20))
    >>> lower > 0.8, upper
    (True, 1.0)
    """
    (k0, n0), (k1, n1) = base, new
    return _square_and_add((k1, n1), (k0, n0), 0.0, confidence)


def difference_of_pairs(opened: int, stopped: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Bound the difference new - base of two rates over the same batches.

    The difference is that of two shares of the pairs: those that leaked only in the new audit, and those that leaked only in the first one. Their
    bounds are combined by the square-and-add rule with the correlation of two cells of a multinomial count. Source: Zou and Donner 2008,
    section 2. If the exact sign test does not reject "no difference", the interval is widened to hold 0, so that the two never disagree.

    Args:
        opened: pairs that leaked only in the new audit.
        stopped: pairs that leaked only in the first audit.
        n: pairs, at least 1.
        confidence: of each one-sided bound.

    >>> lower, upper = difference_of_pairs(0, 0, 59)
    >>> round(lower, 3), round(upper, 3)
    (-0.05, 0.05)
    """
    odds = (opened * stopped) / ((n - opened) * (n - stopped)) if opened and stopped else 0.0
    lower, upper = _square_and_add((opened, n), (stopped, n), -math.sqrt(odds), confidence)
    if opened > stopped and sign_test(opened, stopped) > 1 - confidence:
        lower = min(lower, 0.0)
    if stopped > opened and sign_test(stopped, opened) > 1 - confidence:
        upper = max(upper, 0.0)
    return lower, upper


def _square_and_add(
    more: tuple[int, int], less: tuple[int, int], correlation: float, confidence: float
) -> tuple[float, float]:
    """Bound the difference of two shares from the bounds of each."""
    (k1, n1), (k0, n0) = more, less
    p1, p0 = k1 / n1, k0 / n0
    l1, u1 = lower_bound(k1, n1, confidence), upper_bound(k1, n1, confidence)
    l0, u0 = lower_bound(k0, n0, confidence), upper_bound(k0, n0, confidence)

    def slack(one: float, other: float) -> float:
        return math.sqrt(one * one + other * other - 2 * correlation * one * other)

    difference = p1 - p0
    return max(-1.0, difference - slack(p1 - l1, u0 - p0)), min(1.0, difference + slack(u1 - p1, p0 - l0))


def more_steps(upper: Callable[[int], float], margin: float) -> int | None:
    """Return the fewest further clean steps that bring a bound down to a margin.

    Args:
        upper: number of further steps -> the upper bound of the difference; it falls as the number grows.
        margin: what the bound must not exceed, above 0.

    Returns:
        The number; None if the search passes a million.

    >>> more_steps(lambda more: difference_of_pairs(0, 0, 12 + more)[1], 0.05)
    47
    """
    low, high = 0, 1
    while upper(high) > margin:
        low, high = high, high * 2
        if high > _MOST_STEPS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if upper(middle) <= margin else (middle, high)
    return high
