"""False alarms of clean histories of nights, and nights until a leak is seen.

    python -m tests.benchmarks.night_alarms --histories 200 --nights 200 --seed 1

A history is simulated step by step: a baseline of `--base` steps, then nights of `--steps` steps. In a clean history the rate never changes. An
alarm is what ends a night with FAIL: the e-value against "not worse than the baseline". The confidence sequence fails where it ever excludes
the true rate. Nothing else is drawn, and no model is run.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Iterator
from functools import lru_cache

from leakaudit.results import sequential
from leakaudit.results.bounds import lower_bound, upper_bound
from leakaudit.results.sequential import confidence_sequence, log_e_change

CONFIDENCE = 0.95
CLEAN_RATES = (0.0, 0.01, 0.05, 0.2)
LEAK_RATES = (0.01, 0.05, 0.2)


def nights(rng: random.Random, rate: float, steps: int, number: int) -> Iterator[tuple[int, int]]:
    """Yield leaks and steps of each night."""
    for _ in range(number):
        yield sum(rng.random() < rate for _ in range(steps)), steps


def first_alarm(base: tuple[int, int], history: list[tuple[int, int]]) -> int | None:
    """Return the night of the first alarm, counted from 1; None without one."""
    limit = -math.log(1 - CONFIDENCE)
    for night in range(1, len(history) + 1):
        if log_e_change(base, history[:night]) >= limit:
            return night
    return None


def excluded(rate: float, history: list[tuple[int, int]]) -> bool:
    """Return whether the confidence sequence excludes the true rate at any look."""
    k = n = 0
    for leaks, steps in history:
        k, n = k + leaks, n + steps
        interval = confidence_sequence(k, n, confidence=CONFIDENCE)
        if not interval.lower <= rate <= interval.upper:
            return True
    return False


def share(k: int, n: int) -> str:
    """Return a share with its two-sided 95 % interval of Clopper and Pearson."""
    return (
        f"{k} of {n}, {100 * k / n:.1f} % [{100 * lower_bound(k, n, 0.975):.1f}, {100 * upper_bound(k, n, 0.975):.1f}]"
    )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=200)
    parser.add_argument("--nights", type=int, default=200)
    parser.add_argument("--steps", type=int, default=20, help="steps of a night")
    parser.add_argument("--base", type=int, nargs="+", default=[60, 400], help="steps of the baseline")
    parser.add_argument("--sequences", type=int, default=2000, help="histories for the confidence sequence")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    sequential.log_e_worse = lru_cache(maxsize=None)(sequential.log_e_worse)
    length = f"{asked.nights} nights of {asked.steps} steps"
    print(f"Clean histories of {length}, seed {asked.seed}:\n")
    print("| leak rate | steps of the baseline | n | histories with a false alarm |\n| --- | --- | --- | --- |")
    for rate in CLEAN_RATES:
        for size in asked.base:
            rng = random.Random(f"{asked.seed} clean {rate} {size}")
            alarms = 0
            for _ in range(asked.histories):
                base = (sum(rng.random() < rate for _ in range(size)), size)
                history = list(nights(rng, rate, asked.steps, asked.nights))
                alarms += first_alarm(base, history) is not None
            sequential.log_e_worse.cache_clear()
            print(f"| {rate:g} | {size} | {asked.histories} | {share(alarms, asked.histories)} |", flush=True)
    print(f"\nConfidence sequences over {length}:\n")
    print("| leak rate | n | histories in which the sequence ever excludes it |\n| --- | --- | --- |")
    for rate in CLEAN_RATES:
        rng = random.Random(f"{asked.seed} sequence {rate}")
        wrong = sum(excluded(rate, list(nights(rng, rate, asked.steps, asked.nights))) for _ in range(asked.sequences))
        print(f"| {rate:g} | {asked.sequences} | {share(wrong, asked.sequences)} |", flush=True)
    print(f"\nA clean baseline, then a leak in every night, at most {length}:\n")
    print("| leak rate | steps of the baseline | n | seen | nights until it is seen, median | 90 % |")
    print("| --- | --- | --- | --- | --- | --- |")
    for rate in LEAK_RATES:
        for size in asked.base:
            rng = random.Random(f"{asked.seed} leak {rate} {size}")
            found = [
                first_alarm((0, size), list(nights(rng, rate, asked.steps, asked.nights)))
                for _ in range(asked.histories)
            ]
            seen = sorted(night if night is not None else math.inf for night in found)
            median, most = statistics.median(seen), seen[math.ceil(0.9 * len(seen)) - 1]
            shown = [f"{number:g}" if math.isfinite(number) else "not seen" for number in (median, most)]
            count = sum(map(math.isfinite, seen))
            print(f"| {rate:g} | {size} | {asked.histories} | {count} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
