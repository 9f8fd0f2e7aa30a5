"""Confidence bounds for rates and scores over audited client steps.

The unit of evidence is one client step, not one sentence, because the sentences of a batch tend to leak together.
Every bound here is one-sided. Two of them at 95 % are the two ends of a 90 % interval.

Only the standard library: the gate runs where neither numpy nor scipy is, which are 214 MB, and gives the same numbers everywhere. The tests
compare each bound with scipy's.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

MIN_STEPS_FOR_BOOTSTRAP = 30
"""Fewest steps for a bootstrap interval; with fewer steps the interval is too short. Our choice, as in garak and in most textbooks."""

MIN_STEPS_FOR_SIGN_TEST = 5
"""Fewest steps in which a defence made a difference. With fewer, the smallest possible p-value (1/16 for four) is above 5 %."""

_MOST_STEPS = 10_000_000
"""Largest number of steps that `steps_needed` tries. Our choice: no audit has more."""

_DIGITS = 12
"""Digits that a bound is rounded to. 1 - 0.95 exceeds 0.05 by a rounding error, and this error must not lift a bound above its limit."""

_RESAMPLES, _FEWEST_RESAMPLES, _DRAWS = 9_999, 1_999, 2_000_000
"""Bootstrap resamples: the default of scipy, and for more than 200 steps fewer, so that all of them draw two million values, in about 0.4 s. The
chance error of a bound still falls as the steps grow, because the width of the interval falls as well."""

_HALVINGS = 60
"""Bisections of an interval within 0 to 1; the result is exact to 1e-18."""

_EXACT = 2_000
"""Most steps whose binomial coefficients are counted as whole numbers; above it they come from the logarithm of the gamma function."""

_SMALLEST = 1e-16
"""Relative size of a term of a tail that can be left out: it changes no digit of the sum."""


@dataclass(frozen=True)
class Bounds:
    """One-sided bounds of a number from 0 to 1; None if the data gives no bound."""

    lower: float | None
    upper: float | None
    method: str
    """In words, for the report."""


@lru_cache(4096)
def upper_bound(k: int, n: int, confidence: float = 0.95) -> float:
    """Return the upper Clopper-Pearson bound of the leak rate: k leaks in n steps.

    It is the largest rate that is compatible with the counts: the p that solves P(Binomial(n, p) <= k) = 1 - confidence, which is the
    `confidence` quantile of Beta(k + 1, n - k). Source: Clopper and Pearson 1934; the beta form as in Brown, Cai and DasGupta 2001, section
    4.2.1.

    Args:
        k: steps that leaked.
        n: steps audited; with 0 steps the bound is 1.0.
        confidence: least share of audits in which the true rate lies at or below the bound.

    Returns:
        A rate from 0 to 1.

    Raises:
        ValueError: k is not within 0..n, or confidence not within 0..1.

    >>> round(upper_bound(0, 59), 4)
    0.0495
    >>> upper_bound(0, 0)
    1.0
    """
    _check(k, n, confidence)
    if k == n:
        return 1.0
    return round(_root(lambda rate: _at_most(k, n, rate) <= 1.0 - confidence), _DIGITS)


@lru_cache(4096)
def lower_bound(k: int, n: int, confidence: float = 0.95) -> float:
    """Return the lower Clopper-Pearson bound of the leak rate: k leaks in n steps.

    It is the `1 - confidence` quantile of Beta(k, n - k + 1); see `upper_bound`.

    >>> round(lower_bound(7, 60), 4)
    0.0561
    """
    _check(k, n, confidence)
    if k == 0:
        return 0.0
    return round(_root(lambda rate: at_least(k, n, rate) >= 1.0 - confidence), _DIGITS)


def _root(reached: Callable[[float], bool]) -> float:
    """Return the least rate from which on a condition holds."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def _at_most(k: int, n: int, rate: float) -> float:
    """Return P(Binomial(n, rate) <= k)."""
    return at_least(n - k, n, 1.0 - rate)


def at_least(k: int, n: int, rate: float) -> float:
    """Return P(Binomial(n, rate) >= k).

    The tail that lies beyond the mean is summed from its largest term on; each next term comes from the one before it. Only the first one
    needs logarithms.
    """
    if k <= 0 or rate >= 1.0:
        return 1.0
    if k > n or rate <= 0.0:
        return 0.0
    if k <= n * rate:  # the other tail lies beyond the mean
        return 1.0 - at_least(n - k + 1, n, 1.0 - rate)
    odds = rate / (1.0 - rate)
    term = math.exp(_log_choose(n, k) + k * math.log(rate) + (n - k) * math.log1p(-rate))
    total, share = 1.0, 1.0
    for i in range(k, n):
        share *= (n - i) / (i + 1) * odds
        total += share
        if share < _SMALLEST * total:
            break
    return term * total


@lru_cache(256)
def _log_choose(n: int, k: int) -> float:
    """Return the logarithm of the number of ways to choose k of n."""
    if n <= _EXACT:
        return math.log(math.comb(n, k))
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def mean_lower_bound(values: Sequence[float], confidence: float = 0.95) -> float:
    """Return a lower bound of the mean of numbers from 0 to 1.

    It holds for any number of them. Source: Hoeffding 1963, Theorem 2: mean - sqrt(log(1 / (1 - confidence)) / (2 n)), at least 0.

    >>> round(mean_lower_bound([1.0] * 10), 3)
    0.613
    """
    if not values:
        return 0.0
    slack = math.sqrt(-math.log(1.0 - confidence) / (2 * len(values)))
    return max(0.0, math.fsum(values) / len(values) - slack)


def steps_needed(k: int, max_rate: float, confidence: float = 0.95) -> int | None:
    """Return the smallest n at which k leaks in n steps bound the rate by `max_rate`.

    For k = 0 it is the least n with (1 - max_rate)^n <= 1 - confidence. Otherwise a bisection finds it, because
    `upper_bound` falls as n grows. If `max_rate` is 1 or more, k steps are enough.

    Args:
        k: steps that leaked.
        max_rate: the rate to stay at or below, above 0.
        confidence: of the one-sided bound.

    Returns:
        Number of steps, or None if the search passes ten million.

    Raises:
        ValueError: `max_rate` is not positive.

    >>> [steps_needed(k, 0.05) for k in (0, 1, 2)]
    [59, 93, 124]
    """
    if max_rate <= 0:
        raise ValueError(f"max_rate must be above 0, got {max_rate}: no number of steps proves that nothing ever leaks")
    if max_rate >= 1:
        return k
    low, high = k, max(k, 1)  # low is never enough, except possibly at the start
    while upper_bound(k, high, confidence) > max_rate:
        low, high = high, high * 2
        if high > _MOST_STEPS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if upper_bound(k, middle, confidence) <= max_rate:
            high = middle
        else:
            low = middle
    return high


def more_clean_steps(k: int, n: int, max_rate: float, confidence: float = 0.95) -> int | None:
    """Return how many more clean steps bring the upper bound down to `max_rate`.

    >>> more_clean_steps(0, 12, 0.05)
    47
    """
    needed = steps_needed(k, max_rate, confidence)
    return None if needed is None else max(0, needed - n)


def mean_bounds(values: Sequence[float], confidence: float = 0.95) -> Bounds | None:
    """Bound the mean of a score by a bootstrap over steps.

    Each value is the score of one step, so the bootstrap resamples whole steps. It is bias-corrected and accelerated (BCa);
    source: Efron 1987. The seed is fixed, so that the same results give the same verdict.

    If every step has the same score v (most often 0), the bootstrap interval is a single point. An exact bound replaces it. None of the
    n steps scored higher, so with `confidence` at most a share u = `upper_bound(0, n)` of all steps scores higher. No score exceeds 1,
    so the mean is at most v + (1 - v) u. In the same way it is at least v (1 - u).

    Args:
        values: one score from 0 to 1 for each step.
        confidence: of each one-sided bound.

    Returns:
        The bounds, or None for fewer than `MIN_STEPS_FOR_BOOTSTRAP` steps.
    """
    if len(values) < MIN_STEPS_FOR_BOOTSTRAP:
        return None
    if min(values) == max(values):
        value, share = values[0], upper_bound(0, len(values), confidence)
        return Bounds(value * (1 - share), value + (1 - value) * share, "same score in every step: exact bound")
    lower, upper = _bootstrap(values, confidence)
    return Bounds(max(0.0, lower), min(1.0, upper), "bootstrap over steps (BCa)")


def _bootstrap(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Return the lower and the upper BCa bound of the mean.

    Source: Efron 1987, equation 2.3; the acceleration is that of equation 4.4, which for a mean is a sixth of the skewness of the values over
    the root of their number.
    """
    n, normal = len(values), NormalDist()
    mean = math.fsum(values) / n
    draw, times = random.Random(0), max(_FEWEST_RESAMPLES, min(_RESAMPLES, _DRAWS // n))
    drawn = sorted(math.fsum(draw.choices(values, k=n)) / n for _ in range(times))
    below = (sum(one < mean for one in drawn) + sum(one <= mean for one in drawn)) / (2 * times)
    bias = normal.inv_cdf(min(max(below, 1 / (2 * times)), 1 - 1 / (2 * times)))
    cubes, squares = (math.fsum((value - mean) ** power for value in values) for power in (3, 2))
    acceleration = cubes / (6 * squares**1.5)

    def bound(share: float) -> float:
        shift = bias + normal.inv_cdf(share)
        adjusted = normal.cdf(bias + shift / (1 - acceleration * shift))
        return _between(drawn, adjusted)

    return bound(1.0 - confidence), bound(confidence)


def _between(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of ordered numbers, with straight lines between them."""
    place = share * (len(ordered) - 1)
    low = min(int(place), len(ordered) - 2)
    return ordered[low] + (place - low) * (ordered[low + 1] - ordered[low])


def quantile_bounds(values: Sequence[float], quantile: float = 0.95, confidence: float = 0.95) -> Bounds | None:
    """Bound a quantile of a score over steps by order statistics.

    The number of values at or below the true quantile is Binomial(n, quantile),
    which gives bounds that hold for every distribution. A bootstrap of the 95th percentile can never exceed the largest observed value,
    so its interval is far too short for the n of an audit. Source: Conover 1999, section 3.2, "confidence interval for a quantile".

    Args:
        values: one score from 0 to 1 for each step.
        quantile: 0.95 for the 95th percentile.
        confidence: of each one-sided bound.

    Returns:
        The bounds, or None for fewer than `MIN_STEPS_FOR_BOOTSTRAP` steps. `upper` is None if even the largest value is not a
        bound: for the 95th percentile at 95 % with fewer than 59 steps.
    """
    if len(values) < MIN_STEPS_FOR_BOOTSTRAP:
        return None
    n, ordered = len(values), sorted(values)
    # the i-th smallest is at most the quantile with probability P(Binomial >= i), and at least it with P(Binomial < i)
    lower = [i for i in range(1, n + 1) if at_least(i, n, quantile) >= confidence]
    upper = [i for i in range(1, n + 1) if _at_most(i - 1, n, quantile) >= confidence]
    return Bounds(
        lower=ordered[lower[-1] - 1] if lower else 0.0,
        upper=ordered[upper[0] - 1] if upper else None,
        method="order statistics (exact)",
    )


def percentile(values: Sequence[float], quantile: float = 0.95) -> float:
    """Return the least value that a share `quantile` of the values does not exceed.

    There is no interpolation: the result is one of the values.

    >>> percentile([0.1, 0.2, 0.3], 0.5)
    0.2
    """
    if not values:
        raise ValueError("no values: the percentile of nothing is not 0")
    place = math.ceil(round(quantile * len(values), _DIGITS))  # rounded: 0.95 * 20 is 19, and not a little more
    return sorted(values)[max(place, 1) - 1]


def sign_test(stopped: int, opened: int) -> float:
    """Return the p-value of the exact one-sided sign test for a defence.

    A small value shows that the defence stops leaks. Only finished steps may be counted: the defence did not stop a search that ran out
    of time. With fewer than
    `MIN_STEPS_FOR_SIGN_TEST` steps the p-value should not be shown.

    If the defence has no effect, a step that leaks in only one of the two cases is equally likely to be of either kind, so `stopped` is
    Binomial(stopped + opened, 1/2). Source: McNemar 1947 in its exact form.

    Args:
        stopped: steps that leaked only without the defence.
        opened: steps that leaked only with the defence.

    Returns:
        The p-value; 1.0 if no step made a difference.

    >>> sign_test(5, 0)
    0.03125
    """
    total = stopped + opened
    as_extreme = sum(math.comb(total, i) for i in range(stopped, total + 1))
    return float(as_extreme / 2**total)


def _check(k: int, n: int, confidence: float) -> None:
    if not 0 <= k <= n:
        raise ValueError(f"k must lie within 0..n, got {k} of {n}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
