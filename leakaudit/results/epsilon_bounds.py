"""Lower bounds on epsilon from what attacks recovered.

A bound here can contradict a claimed epsilon. It never confirms one: a better attack might recover more. A bound is about what the
attacker sees in one trial: about one step if it sees one step, and about the whole run only if it sees the run.

Only the standard library; the counts are bounded by Clopper and Pearson (`leakaudit.results.bounds`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from leakaudit.results.bounds import lower_bound, upper_bound
from leakaudit.results.gaussian_dp import hits_of_mu, mu_of_rates

Neighbours = Literal["add-remove", "replace-one"]
"""Which data sets epsilon compares: with and without one record, or with one record exchanged."""

DELTA = 1e-5
"""Delta if none is given; that of Abadi et al. 2016 (arXiv 1607.00133). A delta has to be far below 1 over the number of records."""


@dataclass(frozen=True)
class Secrets:
    """Trials in which an attack looked for a secret, and how many it recovered.

    Conditions of every bound from them: each secret is drawn uniformly and independently of everything else; the set of values and the rule
    of guessing were fixed before; the record is in the data of each trial for certain; the trials have independent noise.
    """

    recovered: int
    """k: trials in which the secret was one of the guesses."""
    trials: int
    """n: all trials, 1 or more."""
    values: int
    """M: number of values from which the secret is drawn, 2 or more."""
    guesses: int = 1
    """L: largest number of guesses of one trial, 1 to M - 1."""

    def __post_init__(self) -> None:
        """Refuse counts that cannot be."""
        if not 0 <= self.recovered <= self.trials or self.trials < 1:
            raise ValueError(f"the secrets recovered lie within 0..trials, got {self.recovered} of {self.trials}")
        if not 1 <= self.guesses < self.values:
            raise ValueError(
                f"guesses are at least 1 and fewer than the values, got {self.guesses} guesses of {self.values} values"
            )

    @property
    def chance(self) -> float:
        """Probability L / M with which an attacker who sees nothing recovers a secret."""
        return self.guesses / self.values

    def least_rate(self, confidence: float = 0.95) -> float:
        """Return the Clopper-Pearson lower bound of the probability of recovery."""
        return lower_bound(self.recovered, self.trials, confidence)


def secret_epsilon(
    secrets: Secrets, delta: float = DELTA, *, confidence: float = 0.95, neighbours: Neighbours = "add-remove"
) -> float:
    """Bound epsilon from below by the secrets that an attack recovered.

    Own derivation. Let p be the probability that the secret is among the L guesses, and P_0 the distribution of the guesses without the
    record. For add-remove, (epsilon, delta)-DP gives p <= e^epsilon L / M + delta, because under P_0 the guesses are independent of the secret.
    The complement gives 1 - L / M <= e^epsilon (1 - p) + delta. For replace-one, sum P_s(s in G, t not in G) <= e^epsilon
    P_t(s in G, t not in G) + delta over all pairs of values s and t: p (M - L + L e^epsilon) <= L e^epsilon + (M - 1) delta, so that
    p <= L e^epsilon / (L e^epsilon + M - L) + delta. Each is solved for epsilon, with the Clopper-Pearson lower bound of k of n in place of p.

    Args:
        secrets: the counts; their class names the conditions.
        delta: of the claim, in [0, 1).
        confidence: least probability that the bound is at or below the true epsilon.
        neighbours: which data sets the claim compares.

    Returns:
        Epsilon, 0 or more; 0 if nothing is bounded.

    Raises:
        ValueError: an argument is out of its range.

    >>> round(secret_epsilon(Secrets(1, 20, 10**6)), 2)
    7.84
    """
    _check(delta, confidence)
    rate, chance = secrets.least_rate(confidence), secrets.chance
    more = rate - delta
    if more <= chance:
        return 0.0
    if neighbours == "replace-one":
        return math.log(more / (1 - more) * (1 - chance) / chance)
    fewer = 1 - chance - delta
    complement = math.log(fewer / (1 - rate)) if fewer > 0 and rate < 1 else 0.0
    return max(0.0, math.log(more / chance), complement)


def most_recovered(epsilon: float, delta: float, values: int, guesses: int = 1) -> float:
    """Return the largest probability of recovery that (epsilon, delta)-DP allows.

    e^epsilon L / M + delta, at most 1, for add-remove neighbours; see `secret_epsilon`.

    Raises:
        ValueError: an argument is out of its range.

    >>> f"{most_recovered(8.0, 1e-5, 10**6):.1e}"
    '3.0e-03'
    """
    _check(delta, 0.5)
    if not 0 <= epsilon < math.inf:
        raise ValueError(f"epsilon is a finite number of 0 or more, got {epsilon}")
    chance = Secrets(0, 1, values, guesses).chance
    return min(1.0, math.exp(min(epsilon + math.log(chance), 0.0)) + delta)


def most_recovered_gaussian(noise_multiplier: float, values: int, guesses: int = 1) -> float:
    """Return the largest probability of recovery from one Gaussian release.

    Phi(Phi^-1(L / M) + 1 / noise_multiplier), for add-remove neighbours: no test with a false positive rate of L / M has a larger true positive rate. Source:
    Hayes, Mahloujifar and Balle 2023 (arXiv 2302.07225), with Dong, Roth and Su 2022, Definition 2.6.

    Args:
        noise_multiplier: standard deviation of the noise over the clipping bound, above 0.
        values: M.
        guesses: L.

    Raises:
        ValueError: an argument is out of its range.

    >>> f"{most_recovered_gaussian(0.5, 10**6):.1e}"
    '2.9e-03'
    """
    if not noise_multiplier > 0:
        raise ValueError(f"the noise multiplier is above 0, got {noise_multiplier}")
    return hits_of_mu(1.0 / noise_multiplier, Secrets(0, 1, values, guesses).chance)


def secret_mu(secrets: Secrets, *, confidence: float = 0.95) -> float:
    """Bound mu of a Gaussian release from below by the secrets recovered.

    mu >= Phi^-1(p) - Phi^-1(L / M), the inverse of `most_recovered_gaussian`. It assumes that the release has Gaussian noise.

    Raises:
        ValueError: the confidence does not lie between 0 and 1.

    >>> round(secret_mu(Secrets(1, 20, 10**6)), 2)
    1.95
    """
    return mu_of_rates(secrets.least_rate(confidence), secrets.chance)


@dataclass(frozen=True)
class Detections:
    """Outcomes of one test in trials with and without a record.

    Conditions: the threshold was fixed before the trials were looked at; the trials have independent noise.
    """

    hits: int
    """Trials with the record in which the test said so."""
    with_record: int
    false_hits: int
    """Trials without the record in which the test said that it is there."""
    without_record: int

    def __post_init__(self) -> None:
        """Refuse counts that cannot be."""
        for k, n in ((self.hits, self.with_record), (self.false_hits, self.without_record)):
            if not 0 <= k <= n or n < 1:
                raise ValueError(f"hits lie within 0..trials, got {k} of {n}")

    def rates(self, confidence: float = 0.95) -> tuple[float, float]:
        """Bound the true positive rate from below and the false one from above.

        Each bound has half of the error, so both hold together with the confidence (Bonferroni).
        """
        each = (1 + confidence) / 2
        return lower_bound(self.hits, self.with_record, each), upper_bound(self.false_hits, self.without_record, each)


def detection_epsilon(found: Detections, delta: float = 0.0, *, confidence: float = 0.95) -> float:
    """Bound epsilon from below by the outcomes of a test.

    epsilon >= ln((TPR - delta) / FPR) and epsilon >= ln((1 - FPR - delta) / (1 - TPR)), with a lower bound of the true positive rate TPR and an
    upper bound of the false positive rate FPR.
    Source: Jagielski, Ullman and Oprea 2020 (arXiv 2006.07709), section 3; Kairouz, Oh and Viswanath 2015.

    Returns:
        Epsilon, 0 or more.

    Raises:
        ValueError: an argument is out of its range.

    >>> round(detection_epsilon(Detections(100, 100, 0, 100)), 2)
    3.28
    """
    _check(delta, confidence)
    hits, false_hits = found.rates(confidence)
    pairs = ((hits, false_hits), (1 - false_hits, 1 - hits))
    return max(0.0, *(math.log((share - delta) / other) for share, other in pairs if share > delta and other > 0), 0.0)


def detection_mu(found: Detections, *, confidence: float = 0.95) -> float:
    """Bound mu of a Gaussian mechanism from below by the outcomes of a test.

    mu >= Phi^-1(1 - FPR) - Phi^-1(FNR), with upper bounds of the false positive rate FPR and the false negative rate FNR; 0 if these add up to 1 or
    more, because then they bound nothing.
    `leakaudit.results.gaussian_dp.epsilon_of_mu` gives epsilon at a delta. It assumes that the mechanism is Gaussian. Source: Nasr et al.
    2023 (arXiv 2302.07956), section 4.

    Raises:
        ValueError: the confidence does not lie between 0 and 1.

    >>> round(detection_mu(Detections(500, 1000, 23, 1000)), 2)
    1.74
    """
    _check(0.0, confidence)
    return mu_of_rates(*found.rates(confidence))


def _check(delta: float, confidence: float) -> None:
    if not 0 <= delta < 1:
        raise ValueError(f"delta lies between 0 and 1, got {delta}")
    if not 0 < confidence < 1:
        raise ValueError(f"the confidence lies between 0 and 1, got {confidence}")
