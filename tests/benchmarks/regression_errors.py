"""How often a rule on the difference from a baseline is wrong.

    python -m tests.benchmarks.regression_errors

All numbers are exact: every count that can occur is weighed with its probability, so there is no seed and no chance error.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import comb
from typing import NamedTuple

from leakaudit.results.bounds import upper_bound
from leakaudit.results.differences import difference_of_pairs, difference_of_rates

SMALLEST = 1e-10
"""Probability of a count that is left out. Our choice: a few thousand of them change no printed digit."""


class Answers(NamedTuple):
    """How often each answer is given, 0 to 1."""

    passed: float
    failed: float


@cache
def chance(k: int, n: int, rate: float) -> float:
    """Return the probability of k leaks in n steps."""
    return float(comb(n, k) * rate**k * (1 - rate) ** (n - k))


def of_two_samples(sizes: tuple[int, int], rates: tuple[float, float], margin: float) -> Answers:
    """Return the answers on audits of other batches: baseline first, then new."""
    passed = failed = 0.0
    for k0 in range(sizes[0] + 1):
        for k1 in range(sizes[1] + 1):
            weight = chance(k0, sizes[0], rates[0]) * chance(k1, sizes[1], rates[1])
            if weight > SMALLEST:
                lower, upper = _rates((k0, sizes[0]), (k1, sizes[1]))
                passed += weight * (upper <= margin)
                failed += weight * (lower > margin)
    return Answers(passed, failed)


def of_pairs(n: int, opened: float, stopped: float, margin: float) -> Answers:
    """Return the answers on n shared batches.

    A share `opened` of all batches leaks only in the new audit, and a share `stopped` only in the baseline.
    """
    passed = failed = 0.0
    for b in range(n + 1):
        for c in range(n + 1 - b):
            ways = comb(n, b) * comb(n - b, c)
            weight = ways * opened**b * stopped**c * (1 - opened - stopped) ** (n - b - c)
            if weight > SMALLEST:
                lower, upper = _pairs(b, c, n)
                passed += weight * (upper <= margin)
                failed += weight * (lower > margin)
    return Answers(passed, failed)


_rates = cache(difference_of_rates)
_pairs = cache(difference_of_pairs)


def kept_by_ratchet(n: int, rate: float) -> float:
    """Return how often an unchanged release keeps the upper bound of its baseline.

    Both have n steps and the same leak rate.
    """
    uppers = [upper_bound(k, n) for k in range(n + 1)]
    return sum(
        chance(k0, n, rate) * chance(k1, n, rate)
        for k0 in range(n + 1)
        for k1 in range(n + 1)
        if uppers[k1] <= uppers[k0]
    )


MARGINS = (0.03, 0.1, 0.2)
BASES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
SIZES = ((60, 60), (120, 120), (60, 200), (200, 60), (300, 60))
BOTH = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)


def lines() -> Iterator[str]:
    """Yield the lines of the tables."""
    yield "The true difference is the margin, so each PASS and each FAIL is an error (at most 5 % are meant):"
    yield ""
    yield "| method | margin | n | most wrong PASS | most wrong FAIL |"
    yield "| --- | --- | --- | --- | --- |"
    for margin in MARGINS:
        for sizes in SIZES:
            found = [of_two_samples(sizes, (base, base + margin), margin) for base in BASES]
            yield _row("two samples", margin, f"{sizes[0]} and {sizes[1]}", found)
        for n in (60, 120, 200):
            yield _row("pairs", margin, str(n), [of_pairs(n, both + margin, both, margin) for both in BOTH])
    yield ""
    yield "Nothing changed, and 5 % of the steps leak in both audits; of the pairs, 1 % leaks in one audit only, either way:"
    yield ""
    yield "| margin | n | PASS, pairs | PASS, two samples |"
    yield "| --- | --- | --- | --- |"
    for margin in (0.03, 0.05, 0.1):
        for n in (60, 120, 300):
            paired = of_pairs(n, 0.01, 0.01, margin).passed
            yield f"| {margin:g} | {n} | {paired:.0%} | {of_two_samples((n, n), (0.05, 0.05), margin).passed:.0%} |"
    yield ""
    yield "A limit that is the upper bound of the baseline, and an unchanged release:"
    yield ""
    yield "| leak rate | n | PASS |"
    yield "| --- | --- | --- |"
    for rate in (0.0, 0.01, 0.02, 0.05):
        for n in (60, 300):
            yield f"| {rate:g} | {n} | {kept_by_ratchet(n, rate):.0%} |"


def _row(method: str, margin: float, n: str, found: list[Answers]) -> str:
    passed, failed = (max(getattr(one, name) for one in found) for name in Answers._fields)
    return f"| {method} | {margin:g} | {n} | {passed:.1%} | {failed:.1%} |"


def main() -> None:
    """Print the tables."""
    for line in lines():
        print(line)


if __name__ == "__main__":
    main()
