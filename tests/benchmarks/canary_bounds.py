"""Tables of the bounds of canaries on epsilon, and how often they are wrong.

    python -m tests.benchmarks.canary_bounds

The tables of bounds are closed forms. The coverage is exact for randomised response, because every count is weighed with its probability; for
the Gaussian mechanism it is exact, too, since the counts of its test are binomial. The comparison with jax_privacy runs only where that package and
dp-accounting can be imported.
"""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from collections.abc import Callable
from math import comb
from pathlib import Path
from typing import Any

from leakaudit.results.epsilon_bounds import (
    Detections,
    Secrets,
    detection_epsilon,
    detection_mu,
    most_recovered,
    most_recovered_gaussian,
    secret_epsilon,
)
from leakaudit.results.gaussian_dp import epsilon_of_mu, false_hits_of_mu
from leakaudit.results.one_run import Coins, one_run_epsilon, one_run_mu

VALUES = (10**3, 10**6, 10**9, 10**12)
TRIALS = 20
SMALLEST = 1e-12
"""Probability of a count that is left out. Our choice: no printed digit changes."""


def secrets_table() -> None:
    """Print the bound by number of values and of recovered secrets."""
    print(f"Lower bound on epsilon of one step, delta 1e-5, confidence 95 %, one guess, n = {TRIALS} trials:\n")
    print("| M | n | 1 recovered | 5 recovered | 20 recovered |\n| --- | --- | --- | --- | --- |")
    for values in VALUES:
        found = (secret_epsilon(Secrets(k, TRIALS, values)) for k in (1, 5, 20))
        print(f"| {values:.0e} | {TRIALS} | " + " | ".join(f"{one:.2f}" for one in found) + " |")


def recovery_table() -> None:
    """Print the largest probability of recovery that a claim allows."""
    print("\nLargest probability of recovering a secret of a million values in one step, delta 1e-5:\n")
    print("| claim | probability |\n| --- | --- |")
    for epsilon in (1, 4, 8, 10):
        print(f"| epsilon = {epsilon} | {most_recovered(epsilon, 1e-5, 10**6):.1e} |")
    for sigma in (1.0, 0.5, 0.3):
        print(f"| Gaussian, noise multiplier {sigma:g} | {most_recovered_gaussian(sigma, 10**6):.1e} |")


def binomial(k: int, n: int, rate: float) -> float:
    """Return the probability of k of n."""
    return comb(n, k) * rate**k * (1 - rate) ** (n - k)


def wrong(n: int, rate: float, bound: Callable[[int], float], truth: float) -> float:
    """Return how often a bound on k of n exceeds the truth."""
    return math.fsum(p for k in range(n + 1) if (p := binomial(k, n, rate)) > SMALLEST and bound(k) > truth)


def coverage_table() -> None:
    """Print how often each bound exceeds the true value; 5 % are allowed."""
    print("\nShare of audits whose bound exceeds the truth, exact; at most 5 % are allowed:\n")
    print("| bound | mechanism | n | wrong |\n| --- | --- | --- | --- |")
    for epsilon in (0.5, 2.0, 4.0):
        rate = math.exp(epsilon) / (math.exp(epsilon) + 15)
        share = wrong(
            60,
            rate,
            lambda k: secret_epsilon(Secrets(k, 60, 16), 0.0, neighbours="replace-one"),
            epsilon,
        )
        print(f"| secret, replace-one | randomised response of 16 values, epsilon {epsilon:g} | 60 | {share:.1%} |")
    for epsilon in (0.5, 1.5):
        rate = 1 / (1 + math.exp(-epsilon))
        share = wrong(300, rate, lambda k: one_run_epsilon(Coins(300, 300, k)), epsilon)
        print(f"| one run | randomised response of 300 coins, epsilon {epsilon:g} | 300 | {share:.1%} |")
    for mu in (0.0, 1.0, 3.0):
        print(f"| detections, mu | Gaussian, mu {mu:g}, threshold mu / 2 | 60 + 60 | {wrong_mu(mu, 60):.1%} |")


def wrong_mu(mu: float, n: int) -> float:
    """Return how often the bound on mu of a Gaussian exceeds mu."""
    miss = false_hits_of_mu(mu / 2, 0.5)  # Phi(-mu / 2), both for misses and for false hits
    return math.fsum(
        p
        for hits in range(n + 1)
        for false in range(n + 1)
        if (p := binomial(hits, n, 1 - miss) * binomial(false, n, miss)) > SMALLEST
        and detection_mu(Detections(hits, n, false, n)) > mu
    )


def jax_auditing() -> Any:
    """Return the module `auditing` of jax_privacy, or None if it cannot be had."""
    package = importlib.util.find_spec("jax_privacy")
    if package is None or importlib.util.find_spec("dp_accounting") is None:
        return None
    place = Path(next(iter(package.submodule_search_locations or ()))) / "auditing.py"
    spec = importlib.util.spec_from_file_location("jax_privacy_auditing", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def comparison_table() -> None:
    """Print our bounds beside those of jax_privacy on the same counts."""
    other = jax_auditing()
    if other is None:
        print("\njax_privacy cannot be imported here: no comparison.")
        return
    from importlib.metadata import version

    print(f"\nThe same counts in jax_privacy {version('jax_privacy')}, delta 1e-5, confidence 95 %:\n")
    print("| bound | counts | n | ours | jax_privacy |\n| --- | --- | --- | --- | --- |")
    for counts in ((1000, 200, 200), (1000, 100, 90), (500, 500, 300)):
        shown, coins = "{2} of {1} guesses right".format(*counts), Coins(*counts)
        pairs = (
            ("one run", one_run_epsilon(coins, 1e-5), other._epsilon_one_run(0, *counts, 0.05, 1e-5)),
            (
                "one run, f-DP",
                epsilon_of_mu(one_run_mu(coins), 1e-5),
                other._epsilon_one_run_fdp(0, *counts, 0.05, 1e-5),
            ),
        )
        for name, ours, theirs in pairs:
            print(f"| {name} | {shown} | {counts[0]} | {ours:.5f} | {theirs:.5f} |")
    auditor = other.CanaryScoreAuditor([1.0] * 190 + [0.0] * 10, [1.0] * 6 + [0.0] * 194)
    theirs = auditor.epsilon_clopper_pearson(0.05, 1e-5, False, threshold_strategy=other.Explicit(0.5))
    ours = detection_epsilon(Detections(190, 200, 6, 200), 1e-5)
    print(f"| Clopper-Pearson, one threshold | 190 hits, 6 false hits | 200 + 200 | {ours:.5f} | {theirs:.5f} |")
    print(f"\n{null_of_gdp(other)}")


def null_of_gdp(other: Any) -> str:
    """Say what `epsilon_from_gdp` finds where there is nothing to find."""
    draw, runs, n = random.Random(0), 50, 1000
    found = [
        other.CanaryScoreAuditor(*([draw.gauss(0, 1) for _ in range(n)] for _ in range(2))).epsilon_from_gdp(0.05, 1e-5)
        for _ in range(runs)
    ]
    above = sum(one > 0 for one in found)
    return (
        f"`epsilon_from_gdp` of that version is not compared. Of {runs} audits of a mechanism that tells nothing (epsilon 0, {n} + {n} scores from one "
        f"distribution, seed 0), {above} got a bound above 0, the median is {sorted(found)[runs // 2]:.2f}. It takes the absolute value of mu "
        "where the upper bounds of both error rates add up to more than 1; such bounds bound nothing, and ours is 0 there."
    )


if __name__ == "__main__":
    secrets_table()
    recovery_table()
    coverage_table()
    comparison_table()
