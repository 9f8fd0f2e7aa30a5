"""The interval of a mean over seeds and examples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CONFIDENCE = 0.95
"""Two-sided confidence of all intervals here."""

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Mean:
    """A mean and its interval."""

    value: float
    lower: float | None
    """Lower end of the 95 % interval; None if there are too few seeds for one."""
    upper: float | None


def mean_over_seeds(values: Values) -> Mean:
    """Return the mean of a table of seeds and examples with a 95 % interval.

    Seeds and examples are two crossed random effects: every seed is measured on the same examples. With d_si of variance
    a (seeds) + b (examples) + c (the rest), the mean over S seeds and n examples has the variance a/S + b/n + c/(S n). It is estimated
    by U + V with U = s_seed^2/S and V = s_example^2/n, from the sample variances of the means of each seed and of each example. The
    expectation of U + V is a/S + b/n + 2c/(S n), which is never too small. (Own derivation; Owen 2007, "The pigeonhole bootstrap", treats
    the bootstrap over both.)

    The interval is mean +- sqrt(t(S-1)^2 U + t(n-1)^2 V), with the t quantiles of each part's own degrees of freedom (Howe 1974: the
    half-widths of two independent parts add up as squares). One number of degrees of freedom for U + V (Satterthwaite 1946) covers only
    92 % with three seeds.

    Args:
        values: (S, n) one number for each seed and example. With n = 1 the numbers are those of whole models, and the interval covers the
            noise of the seeds only.

    Returns:
        The mean; without an interval if there are fewer than two seeds.

    >>> mean_over_seeds(np.array([[1.0, 3.0]]))
    Mean(value=2.0, lower=None, upper=None)
    """
    mean = float(values.mean())
    seeds, examples = values.shape
    if seeds < 2:
        return Mean(mean, None, None)
    of_seeds = float(values.mean(axis=1).var(ddof=1)) / seeds
    squares = _quantile(seeds - 1) ** 2 * of_seeds
    if examples > 1:
        of_examples = float(values.mean(axis=0).var(ddof=1)) / examples
        squares += _quantile(examples - 1) ** 2 * of_examples
    reach = math.sqrt(squares)
    return Mean(mean, mean - reach, mean + reach)


def is_above(one: Values, other: Values) -> bool:
    """Return whether the mean of `one` is above that of `other` beyond the noise.

    Both have an entry for each example, in the same order; the paired t interval of 95 % decides.
    """
    difference = one - other
    if len(difference) < 2:
        return False
    spread = float(difference.std(ddof=1)) / math.sqrt(len(difference))
    return float(difference.mean()) > _quantile(len(difference) - 1) * spread


def pseudo_values(whole: float, without: Callable[[], Values]) -> Values:
    """Return the jackknife's pseudo-values of a statistic of n examples.

    Pseudo-value i is n t - (n - 1) t_i, where t_i leaves example i out (Tukey 1958; Efron 1982, Chapter 2). Their mean estimates the
    statistic, and they can be paired by example like single measurements.

    Args:
        whole: the statistic of all examples.
        without: returns (n,) the statistic without each example.
    """
    left = without()
    n = len(left)
    return n * whole - (n - 1) * left


def _quantile(freedom: int) -> float:
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))
