"""Bounds and tests that hold however often somebody looks at them.

A nightly audit looks at its leak rate every morning. A bound for one look (`leakaudit.results.bounds`) is wrong for many: with thirty looks at
95 % confidence the chance that one of them misleads is far above 5 %. Everything here holds at all looks together.

The assumption is that a step leaks with the same probability as the step before it, whatever happened earlier. This is so for steps with
fresh randomness under one set of comparability keys.

Only the standard library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

PRIOR = (0.25, 10.0)
"""Beta prior of the confidence sequence. It is narrow near small rates: 69 clean steps bound the rate by 5 % at 95 % confidence, against 59 for a
bound that is looked at once, and 116 for the prior (0.5, 0.5)."""

_HALVINGS = 60
"""Bisections of an interval within 0 to 1; the result is exact to 1e-18."""


@dataclass(frozen=True)
class Interval:
    """Rates that the data does not contradict."""

    lower: float
    upper: float


def confidence_sequence(k: int, n: int, *, confidence: float = 0.95, prior: tuple[float, float] = PRIOR) -> Interval:
    """Bound a leak rate by k leaks in n steps, at every look.

    The interval holds the rates p with B(a + k, b + n - k) / B(a, b) < p^k (1 - p)^(n - k) / (1 - confidence), where (a, b) is the prior.
    The left side is the probability of the data under a mixture of rates, so its ratio to the probability under the true rate exceeds
    1 / (1 - confidence) at any look with probability 1 - confidence at most (Ville 1939). Source: Robbins 1970, section 3; the
    beta-binomial form as in Howard, Ramdas, McAuliffe and Sekhon 2021.

    Args:
        k: steps that leaked.
        n: all steps so far.
        confidence: least probability that the true rate lies in the interval at all looks.
        prior: the two parameters of the Beta distribution, chosen before the first look.

    Raises:
        ValueError: k is not within 0..n, or another argument is out of its range.

    >>> interval = confidence_sequence(0, 69)
    >>> interval.lower, interval.upper <= 0.05
    (0.0, True)
    """
    _check(k, n, confidence, prior)
    limit = -math.log1p(-confidence)
    mixture = log_mixture(k, n, prior)

    def contradicted(rate: float) -> bool:
        return mixture - _log_likelihood(k, n, rate) >= limit

    seen = k / n if n else 0.0
    lower = 0.0 if k == 0 else _edge(seen, 0.0, contradicted)
    upper = 1.0 if k == n else _edge(seen, 1.0, contradicted)
    return Interval(lower, upper)


def clean_steps_for(
    max_rate: float,
    *,
    so_far: tuple[int, int] = (0, 0),
    confidence: float = 0.95,
    prior: tuple[float, float] = PRIOR,
) -> int | None:
    """Return how many more clean steps bound the rate by `max_rate` at every look.

    None if a million steps do not.

    Args:
        max_rate: the limit.
        so_far: leaks and steps that were seen already.
        confidence: of the confidence sequence.
        prior: of the confidence sequence.

    >>> clean_steps_for(0.05), clean_steps_for(0.01), clean_steps_for(0.05, so_far=(0, 60))
    (69, 391, 9)
    """
    k, n = so_far

    def enough(more: int) -> bool:
        return confidence_sequence(k, n + more, confidence=confidence, prior=prior).upper <= max_rate

    if enough(0):
        return 0
    low, high = 0, 1
    while not enough(high):
        low, high = high, high * 2
        if high > 1_000_000:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def log_e_worse(
    base: tuple[int, int], new: tuple[int, int], *, margin: float = 0.0, prior: tuple[float, float] = PRIOR
) -> float:
    """Return the logarithm of an e-value against "not worse than the baseline".

    The hypothesis is that the new rate is at most the baseline's rate plus `margin`; both rates are unknown. The e-value is the probability
    of both counts under independent Beta mixtures, divided by their largest probability under the hypothesis. Its expectation under the
    hypothesis is at most 1 at every look, so it exceeds 1 / alpha with probability alpha at most. Source: Wasserman, Ramdas and
    Balakrishnan 2020, "Universal inference", section 8, with mixtures as the predictions. The new rate's mixture has the prior (0.5, 0.5),
    because a defence that fails leaks at any rate.

    Args:
        base: leaks and steps of the baseline.
        new: leaks and steps since then.
        margin: how much higher the new rate may be.
        prior: of the baseline's rate.

    >>> log_e_worse((0, 200), (20, 20)) > 20, log_e_worse((0, 200), (0, 20)) < 0
    (True, True)
    """
    mixture = log_mixture(*base, prior) + log_mixture(*new, (0.5, 0.5))
    return mixture - _log_best_not_worse(base, new, margin)


def log_e_change(
    base: tuple[int, int],
    nights: Sequence[tuple[int, int]],
    *,
    margin: float = 0.0,
    prior: tuple[float, float] = PRIOR,
) -> float:
    """Return the logarithm of an e-value against "no night is worse".

    A change may have come in any night, so this is the mean of the e-values that begin in night 1, 2 and so on, with the weights
    1 / (j (j + 1)), which sum to 1 at most. A later night has its own weight whatever the number of nights, so nights may be added for ever.
    Source: Shin, Ramdas and Rinaldo 2023, "E-detectors", section 2, with weights that sum to 1 instead of a sum.

    Args:
        base: leaks and steps of the baseline.
        nights: leaks and steps of each night since then, in order; their fresh steps only.
        margin: how much higher a night's rate may be.
        prior: of the baseline's rate.

    Returns:
        The logarithm; that of 0 nights is 0.
    """
    if not nights:
        return 0.0
    terms, leaks, steps = [], 0, 0
    for number in range(len(nights), 0, -1):
        leaks, steps = leaks + nights[number - 1][0], steps + nights[number - 1][1]
        terms.append(log_e_worse(base, (leaks, steps), margin=margin, prior=prior) - math.log(number * (number + 1)))
    # what is left of the weights, 1 / (n + 1), bets on nights to come and has the value 1
    return _log_sum([*terms, -math.log(len(nights) + 1)])


def log_mixture(k: int, n: int, prior: tuple[float, float]) -> float:
    """Return the log-probability of an order of k leaks in n steps.

    The rate has a Beta prior.
    """
    a, b = prior
    return _log_beta(a + k, b + n - k) - _log_beta(a, b)


def _log_best_not_worse(base: tuple[int, int], new: tuple[int, int], margin: float) -> float:
    """Return the largest log-likelihood of rates with new <= base + margin."""
    (k0, n0), (k1, n1) = base, new
    rate0 = k0 / n0 if n0 else 1.0
    rate1 = k1 / n1 if n1 else 0.0
    if rate1 <= rate0 + margin:
        return _log_likelihood(k0, n0, rate0 if n0 else 0.0) + _log_likelihood(k1, n1, rate1)

    def at(rate: float) -> float:
        return _log_likelihood(k0, n0, rate) + _log_likelihood(k1, n1, min(1.0, rate + margin))

    # at the best point the two rates differ by the margin exactly; the sum is concave in the rate
    low, high = max(0.0, rate0), max(0.0, min(1.0, rate1 - margin))
    for _ in range(_HALVINGS):
        third = (high - low) / 3
        if at(low + third) < at(high - third):
            low += third
        else:
            high -= third
    # The ends are compared, too: a likelihood of 0 at an end makes a plateau of -inf.
    return max(at(low), at(high), at((low + high) / 2))


def _edge(inside: float, outside: float, contradicted: Callable[[float], bool]) -> float:
    """Return the point where a set of rates ends, seen from a rate within it."""
    if not contradicted(outside):
        return outside
    for _ in range(_HALVINGS):
        middle = (inside + outside) / 2
        if contradicted(middle):
            outside = middle
        else:
            inside = middle
    return outside


def _log_likelihood(k: int, n: int, rate: float) -> float:
    leaks = 0.0 if k == 0 else -math.inf if rate <= 0 else k * math.log(rate)
    clean = 0.0 if k == n else -math.inf if rate >= 1 else (n - k) * math.log1p(-rate)
    return leaks + clean


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _log_sum(terms: Sequence[float]) -> float:
    largest = max(terms)
    return largest + math.log(math.fsum(math.exp(term - largest) for term in terms))


def _check(k: int, n: int, confidence: float, prior: tuple[float, float]) -> None:
    if not 0 <= k <= n:
        raise ValueError(f"k must lie within 0..n, got {k} of {n}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    if not min(prior) > 0:
        raise ValueError(f"both parameters of the prior must be above 0, got {prior}")
