"""Confidence bounds for rates and scores over audited client steps.

The unit of evidence is one client step, not one sentence, because the sentences of a batch tend to leak together.
Every bound here is one-sided. Two of them at 95 % are the two ends of a 90 % interval.

Functions import scipy when they are called, so that a program that only reads a policy does not wait for it. The two bounds that
every verdict needs use `scipy.special` alone: `scipy.stats.binomtest` gives the same numbers to nine digits and takes four times as long to
import.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MIN_STEPS_FOR_BOOTSTRAP = 30
"""Fewest steps for a bootstrap interval; with fewer steps the interval is too short. Our choice, as in garak and in most textbooks."""

MIN_STEPS_FOR_SIGN_TEST = 5
"""Fewest steps in which a defence made a difference. With fewer, the smallest possible p-value (1/16 for four) is above 5 %."""

_MOST_STEPS = 10_000_000
"""Largest number of steps that `steps_needed` tries. Our choice: no audit has more."""

_DIGITS = 12
"""Digits that a bound is rounded to. 1 - 0.95 exceeds 0.05 by a rounding error, and this error must not lift a bound above its limit."""

_RESAMPLES = 9_999
"""Bootstrap resamples; scipy's own default."""


@dataclass(frozen=True)
class Bounds:
    """One-sided bounds of a number from 0 to 1; None if the data gives no bound."""

    lower: float | None
    upper: float | None
    method: str
    """In words, for the report."""


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
    from scipy.special import betaincinv

    return round(float(betaincinv(k + 1, n - k, confidence)), _DIGITS)


def lower_bound(k: int, n: int, confidence: float = 0.95) -> float:
    """Return the lower Clopper-Pearson bound of the leak rate: k leaks in n steps.

    It is the `1 - confidence` quantile of Beta(k, n - k + 1); see `upper_bound`.

    >>> round(lower_bound(7, 60), 4)
    0.0561
    """
    _check(k, n, confidence)
    if k == 0:
        return 0.0
    from scipy.special import betaincinv

    return round(float(betaincinv(k, n - k + 1, 1.0 - confidence)), _DIGITS)


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
    source: Efron 1987, as in `scipy.stats.bootstrap`. The seed is fixed, so that the same results give the same verdict.

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
    lower, upper = _bootstrap(values, confidence, "greater")[0], _bootstrap(values, confidence, "less")[1]
    return Bounds(max(0.0, lower), min(1.0, upper), "bootstrap over steps (BCa)")


def _bootstrap(
    values: Sequence[float], confidence: float, alternative: Literal["less", "greater"]
) -> tuple[float, float]:
    """Return both ends of the one-sided BCa interval of the mean."""
    import numpy as np
    from scipy.stats import bootstrap

    def mean(drawn: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
        return np.asarray(drawn.mean(axis=axis))

    found = bootstrap(
        (np.asarray(values, dtype=np.float64),),  # (n,)
        mean,
        n_resamples=_RESAMPLES,
        batch=500,  # memory: 500 x n numbers at once
        confidence_level=confidence,
        alternative=alternative,
        method="BCa",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)


def quantile_bounds(values: Sequence[float], quantile: float = 0.95, confidence: float = 0.95) -> Bounds | None:
    """Bound a quantile of a score over steps by order statistics.

    The bounds are those of `scipy.stats.quantile_test`. The number of values at or below the true quantile is Binomial(n, quantile),
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
    import numpy as np
    from scipy.stats import quantile_test

    above: Any = quantile_test(values, p=quantile, alternative="greater").confidence_interval(confidence)
    below: Any = quantile_test(values, p=quantile, alternative="less").confidence_interval(confidence)  # stubs: a float
    return Bounds(
        lower=0.0 if np.isnan(above.low) else float(above.low),
        upper=None if np.isnan(below.high) else float(below.high),
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
    import numpy as np

    return float(np.quantile(values, quantile, method="inverted_cdf"))


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
