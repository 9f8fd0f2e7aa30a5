"""Lower bounds on epsilon from one training run with many canaries.

Each of m canaries was put into the run or left out by its own fair coin. An attacker who sees the run guesses r of the coins and abstains on the
rest; v guesses are right. The bound of one run is limited: with r guesses, all right, it is at most -ln((1 - confidence)^(-1 / r) - 1) at delta = 0. A
secret from many values (`leakaudit.results.epsilon_bounds`) can give a far larger bound. Neighbours are data sets with and without one canary.

Only the standard library.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from leakaudit.results.bounds import at_least
from leakaudit.results.gaussian_dp import false_hits_of_mu

_HALVINGS = 60
"""Bisections of an interval. Our choice: the result is then exact to the last digits of a float."""

_LARGEST = 700.0
"""Largest epsilon or mu that is tried: e^700 is near the largest float."""


@dataclass(frozen=True)
class Coins:
    """Guesses of one run.

    Conditions: the coins are fair and independent of each other and of everything else; how the attacker guesses was fixed before the coins
    were looked at.
    """

    canaries: int
    """m: number of coins."""
    guesses: int
    """r: coins that the attacker guessed, 1 to m."""
    right: int
    """v: right guesses, 0 to r."""

    def __post_init__(self) -> None:
        """Refuse counts that cannot be."""
        if not 0 <= self.right <= self.guesses <= self.canaries or self.guesses < 1:
            raise ValueError(
                "right guesses lie within 0..guesses and guesses within 1..canaries, got "
                f"{self.right}, {self.guesses} and {self.canaries}"
            )


def one_run_p_value(coins: Coins, epsilon: float, delta: float = 0.0) -> float:
    """Bound the probability of so many right guesses or more under a claim.

    p = beta + 2 m delta max_i (P(W >= v - i) - beta) / i, with W ~ Binomial(r, e^epsilon / (1 + e^epsilon)), beta = P(W >= v) and i from 1 to
    v. Source: Steinke, Nasr and Jagielski 2023 (arXiv 2305.08846), the main theorem, for an attacker who may abstain.

    Args:
        coins: the guesses.
        epsilon: of the claim, 0 or more.
        delta: of the claim, in [0, 1).

    Returns:
        At most 1.

    Raises:
        ValueError: an argument is out of its range.
    """
    if not epsilon >= 0 or not 0 <= delta < 1:
        raise ValueError(f"epsilon is at least 0 and delta in [0, 1), got {epsilon} and {delta}")
    rate = 1.0 / (1.0 + math.exp(-epsilon))
    r, v = coins.guesses, coins.right
    beta = at_least(v, r, rate)
    if delta == 0:
        return beta
    return min(1.0, beta + 2 * coins.canaries * delta * _steepest(r, v, rate))


def _steepest(n: int, v: int, rate: float) -> float:
    """Return max_i P(v - i <= W < v) / i for W ~ Binomial(n, rate), i from 1 to v."""
    if v == 0 or rate >= 1.0:
        return 0.0
    here = v - 1
    log_choose = math.lgamma(n + 1) - math.lgamma(here + 1) - math.lgamma(n - here + 1)
    term = math.exp(log_choose + here * math.log(rate) + (n - here) * math.log1p(-rate))
    total, best = 0.0, 0.0
    for i in range(1, v + 1):
        total += term
        best = max(best, total / i)
        term *= (v - i) / (n - v + i + 1) * (1 - rate) / rate  # P(W = j - 1) from P(W = j), j = v - i
    return best


def one_run_epsilon(coins: Coins, delta: float = 0.0, *, confidence: float = 0.95) -> float:
    """Bound epsilon from below by one run's guesses.

    It is the largest epsilon whose p-value (`one_run_p_value`) is at most 1 - confidence; 0 if there is none.

    Raises:
        ValueError: an argument is out of its range.

    >>> round(one_run_epsilon(Coins(200, 200, 200)), 2)
    4.19
    """
    return _largest(lambda epsilon: one_run_p_value(coins, epsilon, delta) <= 1 - confidence)


def one_run_mu(coins: Coins, *, confidence: float = 0.95) -> float:
    """Bound mu of Gaussian differential privacy from below by one run's guesses.

    With alpha = 1 - confidence begin with r_v = alpha v / m and h_v = alpha (r - v) / m. For i = v - 1 down to 0: h_i = max(h_(i+1),
    Phi(Phi^-1(r_(i+1)) - mu)), and r_i = r_(i+1) + i / (r - i) (h_i - h_(i+1)). The claim is contradicted if r_0 + h_0 > r / m. Source:
    Mahloujifar, Melis and Chaudhuri 2024 (arXiv 2410.22235), the recursion on r and h, for the trade-off curve of a Gaussian. For a Gaussian
    mechanism it is usually tighter than `one_run_epsilon`. It bounds mu of a run that is mu-GDP as a whole, such as steps without sampling. DP-SGD with Poisson sampling is
    so only approximately (the limit of many steps, Bu et al. 2020, arXiv 1911.11607): there a contradicted mu alone does not contradict an epsilon.

    Raises:
        ValueError: the confidence does not lie between 0 and 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"the confidence lies between 0 and 1, got {confidence}")
    return _largest(lambda mu: _contradicts(coins, mu, 1 - confidence))


def _contradicts(coins: Coins, mu: float, alpha: float) -> bool:
    """Return whether so many right guesses contradict mu-GDP at level alpha."""
    m, r, v = coins.canaries, coins.guesses, coins.right
    right, wrong = alpha * v / m, alpha * (r - v) / m
    for i in range(v - 1, -1, -1):
        more = max(wrong, false_hits_of_mu(mu, right))
        if more == wrong:
            break
        right, wrong = min(1.0, right + i / (r - i) * (more - wrong)), more
    return right + wrong > r / m


def _largest(contradicted: Callable[[float], bool]) -> float:
    """Return the largest number that is contradicted; 0 if none is.

    With a number every smaller one is contradicted, too.
    """
    if not contradicted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while contradicted(high):
        low, high = high, 2 * high
        if high > _LARGEST:
            return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if contradicted(middle) else (low, middle)
    return low
