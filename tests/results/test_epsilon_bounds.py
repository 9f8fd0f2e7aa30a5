"""Lower bounds on epsilon: closed forms, simulated mechanisms, another package."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from scipy.stats import norm

from leakaudit.results.epsilon_bounds import (
    Detections,
    Secrets,
    detection_epsilon,
    detection_mu,
    most_recovered,
    most_recovered_gaussian,
    secret_epsilon,
    secret_mu,
)
from leakaudit.results.gaussian_dp import delta_of_mu, epsilon_of_mu, false_hits_of_mu, hits_of_mu, mu_of_rates
from leakaudit.results.one_run import Coins, one_run_epsilon, one_run_mu, one_run_p_value
from tests.benchmarks.canary_bounds import jax_auditing

DRAWS = 400
"""Simulated audits of a mechanism. With 5 % errors allowed, more than 32 wrong bounds of 400 have a probability of 0.5 %."""
MOST_WRONG = 32


@pytest.mark.parametrize(("values", "recovered", "expected"), [
    (10**3, 1, 0.94), (10**3, 5, 4.65), (10**3, 20, 6.76),
    (10**6, 1, 7.84), (10**6, 5, 11.55), (10**6, 20, 13.67),
    (10**12, 1, 21.66), (10**12, 20, 27.48),
])  # fmt: skip
def test_the_secret_bound_has_its_closed_form(values: int, recovered: int, expected: float) -> None:
    """ln((CP - delta) M / L), with the beta quantile of scipy."""
    assert secret_epsilon(Secrets(recovered, 20, values)) == pytest.approx(expected, abs=0.006)


def test_more_guesses_lower_the_bound_by_their_logarithm() -> None:
    """The chance of L guesses of M values is L / M."""
    one, eight = (secret_epsilon(Secrets(5, 20, 10**6, guesses)) for guesses in (1, 8))
    assert one - eight == pytest.approx(math.log(8))


def test_few_recoveries_of_few_values_bound_nothing() -> None:
    """Guessing recovers one of ten values often enough."""
    assert secret_epsilon(Secrets(1, 20, 10)) == 0.0
    assert secret_epsilon(Secrets(0, 20, 10**6)) == 0.0


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 6.0])
def test_replace_one_inverts_its_own_probability(epsilon: float) -> None:
    """Randomised response over M values keeps the secret with e^eps / (e^eps + M - 1)."""
    values = 50
    rate = math.exp(epsilon) / (math.exp(epsilon) + values - 1)
    trials = 10**7
    found = secret_epsilon(Secrets(round(rate * trials), trials, values), 0.0, neighbours="replace-one")
    assert found == pytest.approx(epsilon, abs=0.01)
    assert found < epsilon


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 4.0])
def test_the_secret_bound_exceeds_the_true_epsilon_rarely(epsilon: float) -> None:
    """Randomised response of known epsilon is audited four hundred times."""
    draw, values, trials = random.Random(7), 16, 60
    rate = math.exp(epsilon) / (math.exp(epsilon) + values - 1)
    found = [
        secret_epsilon(Secrets(sum(draw.random() < rate for _ in range(trials)), trials, values), 0.0,
                       neighbours="replace-one")
        for _ in range(DRAWS)
    ]  # fmt: skip
    assert sum(one > epsilon for one in found) <= MOST_WRONG
    assert max(found) > 0.6 * epsilon  # and the bound is of use


def test_both_sides_of_add_remove_count() -> None:
    """Half of the values are guessed nearly always, which only the complement shows."""
    rate = Secrets(100, 100, 2).least_rate()
    assert secret_epsilon(Secrets(100, 100, 2), 0.0) == pytest.approx(math.log(0.5 / (1 - rate)))


@pytest.mark.parametrize(("epsilon", "expected"), [(1, 1.3e-5), (4, 6.5e-5), (8, 3.0e-3), (10, 2.2e-2)])
def test_the_most_recovered_of_a_million_values(epsilon: float, expected: float) -> None:
    """Numbers of a published bound at delta = 1e-5."""
    assert most_recovered(epsilon, 1e-5, 10**6) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("sigma", "expected"), [(1.0, 8.7e-5), (0.5, 2.9e-3), (0.3, 7.8e-2)])
def test_one_gaussian_release_has_its_own_bound(sigma: float, expected: float) -> None:
    """Phi(Phi^-1(1e-6) + 1 / sigma) by scipy."""
    assert most_recovered_gaussian(sigma, 10**6) == pytest.approx(expected, rel=0.02)
    assert most_recovered_gaussian(sigma, 10**6) == pytest.approx(norm.cdf(norm.ppf(1e-6) + 1 / sigma))


def test_secrets_bound_mu_of_a_gaussian_release_rarely_above_the_truth() -> None:
    """The attacker sees each value's score with Gaussian noise and takes the largest."""
    draw, mu, values, trials = random.Random(3), 2.0, 20, 40
    wrong = 0
    for _ in range(100):
        recovered = sum(mu + draw.gauss(0, 1) > max(draw.gauss(0, 1) for _ in range(values - 1)) for _ in range(trials))
        wrong += secret_mu(Secrets(recovered, trials, values)) > mu
    assert wrong <= 12  # more than 12 of 100 at 5 %: probability 0.2 %


@pytest.mark.parametrize("mu", [0.0, 1.0, 3.0])
def test_a_test_of_a_gaussian_mechanism_bounds_it_rarely_above_the_truth(mu: float) -> None:
    """Four hundred audits, each of two hundred draws with the record and without."""
    draw, n = random.Random(11), 200
    wrong = wrong_epsilon = 0
    for _ in range(DRAWS):
        hits = sum(draw.gauss(mu, 1) > mu / 2 for _ in range(n))
        false_hits = sum(draw.gauss(0, 1) > mu / 2 for _ in range(n))
        found = Detections(hits, n, false_hits, n)
        wrong += detection_mu(found) > mu
        wrong_epsilon += detection_epsilon(found, 1e-2) > epsilon_of_mu(mu, 1e-2)
    assert wrong <= MOST_WRONG
    assert wrong_epsilon <= MOST_WRONG


def test_detections_are_bounded_by_either_error() -> None:
    """A test without misses shows as much as one without false hits."""
    one, other = Detections(100, 100, 50, 100), Detections(50, 100, 0, 100)
    assert detection_epsilon(one) == pytest.approx(detection_epsilon(other))
    assert detection_epsilon(Detections(1, 100, 99, 100)) == 0.0


@pytest.mark.parametrize("mu", [0.2, 1.0, 5.0, 40.0])
def test_epsilon_of_mu_inverts_delta_of_mu(mu: float) -> None:
    """Also far in the tail, where e^epsilon is larger than any float."""
    assert delta_of_mu(mu, epsilon_of_mu(mu, 1e-5)) == pytest.approx(1e-5, rel=1e-6)


def test_mu_and_its_rates_invert_each_other() -> None:
    """A test at the rate a has Phi(Phi^-1(a) + mu) hits, by scipy."""
    assert hits_of_mu(1.5, 0.01) == pytest.approx(norm.cdf(norm.ppf(0.01) + 1.5))
    assert false_hits_of_mu(1.5, hits_of_mu(1.5, 0.01)) == pytest.approx(0.01)
    assert mu_of_rates(hits_of_mu(1.5, 0.01), 0.01) == pytest.approx(1.5)


@pytest.mark.parametrize("epsilon", [0.5, 1.5])
def test_one_run_exceeds_the_true_epsilon_rarely(epsilon: float) -> None:
    """Randomised response on three hundred coins, in four hundred runs."""
    draw, m = random.Random(5), 300
    rate = 1 / (1 + math.exp(-epsilon))
    counts = [sum(draw.random() < rate for _ in range(m)) for _ in range(DRAWS)]
    bounds = {right: one_run_epsilon(Coins(m, m, right)) for right in set(counts)}
    assert sum(bounds[right] > epsilon for right in counts) <= MOST_WRONG
    assert max(bounds.values()) > 0.6 * epsilon


def test_one_run_of_a_gaussian_exceeds_the_true_mu_rarely() -> None:
    """Each coin is seen through Gaussian noise; the attacker guesses the surest third."""
    draw, m, mu = random.Random(9), 300, 1.0
    found: list[float] = []
    for _ in range(100):
        coins = [draw.random() < 0.5 for _ in range(m)]
        seen = sorted((abs(x - mu / 2), (x > mu / 2) == coin) for coin in coins for x in [draw.gauss(mu * coin, 1)])
        found.append(one_run_mu(Coins(m, 100, sum(right for _, right in seen[-100:]))))
    assert sum(one > mu for one in found) <= 12
    assert max(found) > 0.5 * mu


@pytest.mark.parametrize(("guesses", "expected"), [(200, 4.19), (1000, 5.81)])
def test_one_run_has_a_ceiling(guesses: int, expected: float) -> None:
    """Perfect guesses show no more than -ln(alpha^(-1/r) - 1)."""
    assert one_run_epsilon(Coins(guesses, guesses, guesses)) == pytest.approx(expected, abs=0.02)
    assert one_run_epsilon(Coins(guesses, guesses, guesses)) == pytest.approx(-math.log(0.05 ** (-1 / guesses) - 1))


def test_the_steepest_part_of_the_tail_is_that_of_brute_force() -> None:
    """The sum is made from single probabilities; scipy's tail gives it directly."""
    from scipy.stats import binom

    coins, epsilon, delta = Coins(80, 40, 33), 0.7, 1e-3
    rate = 1 / (1 + math.exp(-epsilon))
    beta = binom.sf(32, 40, rate)
    steepest = max((binom.sf(32 - i, 40, rate) - beta) / i for i in range(1, 34))
    assert one_run_p_value(coins, epsilon, delta) == pytest.approx(beta + 160 * delta * steepest)


@pytest.mark.parametrize("make", [
    lambda: Secrets(3, 2, 10), lambda: Secrets(0, 0, 10), lambda: Secrets(0, 5, 10, 10), lambda: Detections(2, 1, 0, 1),
    lambda: Coins(5, 6, 1), lambda: Coins(5, 0, 0), lambda: secret_epsilon(Secrets(1, 2, 9), 1.0),
    lambda: most_recovered(-1.0, 0.0, 9), lambda: most_recovered_gaussian(0.0, 9), lambda: epsilon_of_mu(1.0, 0.0),
])  # fmt: skip
def test_counts_that_cannot_be_are_refused(make: object) -> None:
    """A wrong count would become a wrong claim."""
    assert callable(make)
    with pytest.raises(ValueError, match="got"):
        make()


# ----------------------------------------------------------------------------------------------------- jax_privacy
def _jax_auditing() -> Any:
    module = jax_auditing()
    if module is None:
        pytest.skip("jax_privacy or dp-accounting is not installed")
    return module


@pytest.mark.parametrize("counts", [(1000, 200, 200), (1000, 100, 90), (500, 500, 300)])
def test_jax_privacy_gives_the_same_one_run_bounds(counts: tuple[int, int, int]) -> None:
    """Both forms, for perfect, good and poor guesses."""
    other, coins = _jax_auditing(), Coins(*counts)
    assert one_run_epsilon(coins, 1e-5) == pytest.approx(other._epsilon_one_run(0, *counts, 0.05, 1e-5), abs=1e-5)
    ours = epsilon_of_mu(one_run_mu(coins), 1e-5)
    assert ours == pytest.approx(other._epsilon_one_run_fdp(0, *counts, 0.05, 1e-5), abs=1e-5)


def test_jax_privacy_gives_the_same_epsilon_of_counts() -> None:
    """One threshold, fixed before; both directions."""
    other = _jax_auditing()
    auditor = other.CanaryScoreAuditor([1.0] * 190 + [0.0] * 10, [1.0] * 6 + [0.0] * 194)
    theirs = auditor.epsilon_clopper_pearson(0.05, 1e-5, False, threshold_strategy=other.Explicit(0.5))
    assert detection_epsilon(Detections(190, 200, 6, 200), 1e-5) == pytest.approx(theirs, abs=1e-6)
