"""Gaussian differential privacy: mu, epsilon and delta of one Gaussian release.

A mechanism has mu-GDP if telling two neighbouring data sets apart from its output is at least as hard as telling N(0, 1) from N(mu, 1) by one
draw. One release of a sum with sensitivity C and Gaussian noise of standard deviation sigma * C has mu = 1 / sigma. Source: Dong, Roth and Su
2022, "Gaussian differential privacy" (arXiv 1905.02383). With Poisson sampling a step is not mu-GDP with a smaller mu; see `leakaudit.audit.accounting` for
its epsilon.

Only the standard library.
"""

from __future__ import annotations

import math
from statistics import NormalDist

_NORMAL = NormalDist()

_HALVINGS = 80
"""Bisections of an interval. Our choice: the result is then exact to the last digits of a float."""

_FAR = -30.0
"""Below this the tail of the normal distribution comes from its asymptotic series, because erfc becomes 0 at -38."""


def delta_of_mu(mu: float, epsilon: float) -> float:
    """Return the least delta at which mu-GDP gives (epsilon, delta)-DP.

    delta = Phi(-epsilon / mu + mu / 2) - e^epsilon Phi(-epsilon / mu - mu / 2). Source: Dong, Roth and Su 2022, Corollary 2.13.

    Args:
        mu: 0 or more; 0 is a mechanism that tells nothing.
        epsilon: 0 or more.

    Raises:
        ValueError: an argument is negative or not finite.

    >>> round(delta_of_mu(1.0, 0.0), 4)
    0.3829
    """
    _check_amount("mu", mu)
    _check_amount("epsilon", epsilon)
    if mu == 0:
        return 0.0
    first = math.exp(_log_cdf(-epsilon / mu + mu / 2))
    second = epsilon + _log_cdf(-epsilon / mu - mu / 2)
    return max(0.0, first - math.exp(min(second, 0.0)))


def epsilon_of_mu(mu: float, delta: float) -> float:
    """Return the epsilon of mu-GDP at a delta.

    It solves `delta_of_mu(mu, epsilon) = delta`; 0 if epsilon = 0 has this delta or a smaller one. A lower bound of mu gives a lower bound of
    epsilon only for a mechanism that is one Gaussian release, without sampling.

    Args:
        mu: 0 or more.
        delta: in (0, 1).

    Raises:
        ValueError: an argument is out of its range.

    >>> round(epsilon_of_mu(1.0, 1e-5), 3)
    4.377
    """
    _check_delta(delta, least=math.ulp(0.0))
    if delta_of_mu(mu, 0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while delta_of_mu(mu, high) > delta:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of_mu(mu, middle) > delta else (low, middle)
    return low


def mu_of_rates(hits: float, false_hits: float) -> float:
    """Return the mu at which the best test has these two rates.

    mu = Phi^-1(hits) - Phi^-1(false_hits). Under a smaller mu no test has both rates. Source: Dong, Roth and Su 2022, equation 6.

    Args:
        hits: share of true positives, or a lower bound of it, 0 to 1.
        false_hits: share of false positives, or an upper bound of it, 0 to 1.

    Returns:
        At least 0; infinity if hits is above 0 and false_hits is 0, or hits is 1 and false_hits below 1.

    >>> mu_of_rates(0.5, 0.5)
    0.0
    """
    if hits <= false_hits:
        return 0.0
    if hits >= 1.0 or false_hits <= 0.0:
        return math.inf
    return _NORMAL.inv_cdf(hits) - _NORMAL.inv_cdf(false_hits)


def hits_of_mu(mu: float, false_hits: float) -> float:
    """Return the largest true positive rate that mu-GDP allows a test.

    It is Phi(Phi^-1(false_hits) + mu), at the false positive rate `false_hits`. Source: Dong, Roth and Su 2022,
    Definition 2.6.

    >>> f"{hits_of_mu(1.0, 1e-6):.1e}"
    '8.7e-05'
    """
    _check_amount("mu", mu)
    if not 0 <= false_hits <= 1:
        raise ValueError(f"a share lies within 0 to 1, got {false_hits}")
    if false_hits in (0.0, 1.0):
        return false_hits
    return math.exp(_log_cdf(_NORMAL.inv_cdf(false_hits) + mu))


def false_hits_of_mu(mu: float, hits: float) -> float:
    """Return the least false positive rate at which mu-GDP allows these hits.

    It is Phi(Phi^-1(hits) - mu), the inverse of `hits_of_mu`.

    >>> round(false_hits_of_mu(1.0, 0.5), 4)
    0.1587
    """
    _check_amount("mu", mu)
    if not 0 <= hits <= 1:
        raise ValueError(f"a share lies within 0 to 1, got {hits}")
    if hits in (0.0, 1.0):
        return hits
    return math.exp(_log_cdf(_NORMAL.inv_cdf(hits) - mu))


def _log_cdf(x: float) -> float:
    """Return the logarithm of the normal distribution function, exact in the tail."""
    if x > _FAR:
        return math.log(0.5 * math.erfc(-x / math.sqrt(2.0)))
    series = 1 - 1 / x**2 + 3 / x**4  # Abramowitz and Stegun 26.2.12; the next term is below 2e-8
    return -x * x / 2 - math.log(-x * math.sqrt(2 * math.pi)) + math.log(series)


def _check_amount(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is a finite number of 0 or more, got {value}")


def _check_delta(delta: float, least: float = 0.0) -> None:
    if not least <= delta < 1:
        raise ValueError(f"delta lies between 0 and 1, got {delta}")
