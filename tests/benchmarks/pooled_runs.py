"""How often pooled runs pass by luck, at a leak rate just above the limit.

    python -m tests.benchmarks.pooled_runs

Runs of ten steps are judged together by a rule of 5 % at 95 % confidence, as `leakaudit gate RUN...` does. The mean rate is 5.05 %, so every
PASS is an error.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from functools import cache

from leakaudit.results.bounds import upper_bound

LIMIT, STEPS, MEAN = 0.05, 10, 0.0505
EQUAL = (MEAN,) * 30
"""Leak rates of thirty runs that are all alike."""
MIXED = (0.0005, 0.1005) * 15
"""The same mean: every other run leaks one step in ten."""
EVERY = tuple(range(6, 31))
"""Looks of a caller who judges after each run from the sixth on."""

_upper = cache(upper_bound)


def passes(rates: Sequence[float], looks: Collection[int], rng: random.Random) -> bool:
    """Simulate runs with these leak rates; return whether a look passes.

    Args:
        rates: leak rate of each run.
        looks: numbers of runs after which the caller judges.
        rng: source of the leaks.
    """
    leaks = 0
    for number, rate in enumerate(rates, 1):
        leaks += sum(rng.random() < rate for _ in range(STEPS))
        if number in looks and _upper(leaks, STEPS * number) <= LIMIT:
            return True
    return False


def share(rates: Sequence[float], looks: Collection[int], rng: random.Random, tries: int) -> float:
    """Return the share of simulated pools that pass."""
    return sum(passes(rates, looks, rng) for _ in range(tries)) / tries


def rare(rng: random.Random, tries: int) -> float:
    """Return the share of passes where one run in twenty leaks every step.

    Six runs are judged once.
    """
    pools = ([float(rng.random() < MEAN) for _ in range(6)] for _ in range(tries))
    return sum(passes(rates, {6}, rng) for rates in pools) / tries


def main() -> None:
    """Print the table."""
    rng, tries = random.Random(7), 20_000
    for name, rates in (("equal runs", EQUAL), ("mixed runs", MIXED)):
        for said, looks in (("6 runs", (6,)), ("20 runs", (20,)), ("30 runs", (30,)), ("6, 7 ... 30 runs", EVERY)):
            print(f"{name}, judged after {said}: {100 * share(rates, looks, rng, tries):.1f} % pass")
    print(f"one run in twenty leaks every step, judged after 6 runs: {100 * rare(rng, tries):.1f} % pass")


if __name__ == "__main__":
    main()
