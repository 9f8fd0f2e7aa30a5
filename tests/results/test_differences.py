"""Bounds of the difference of two rates: right as often as they say."""

from __future__ import annotations

import random

import pytest

from leakaudit.results.bounds import sign_test, upper_bound
from leakaudit.results.differences import difference_of_pairs, difference_of_rates, more_steps
from tests.benchmarks.regression_errors import of_pairs, of_two_samples


@pytest.mark.parametrize("base", [0.0, 0.02, 0.1])
def test_at_the_margin_a_rule_is_wrong_in_one_of_twenty_audits_at_most(base: float) -> None:
    """Neither a wrong PASS nor a wrong FAIL is more frequent; every count is weighed."""
    for found in (of_two_samples((40, 40), (base, base + 0.1), 0.1), of_pairs(40, base + 0.1, base, 0.1)):
        assert found.passed < 0.05
        assert found.failed < 0.05


def test_drawn_audits_are_wrong_as_rarely_as_the_weighed_ones() -> None:
    """The weights of the exact computation are those of real draws."""
    draw, wrong, n = random.Random(1), 0, 60
    for _ in range(400):
        pairs = [draw.random() for _ in range(n)]
        opened, stopped = sum(one < 0.15 for one in pairs), sum(0.15 <= one < 0.2 for one in pairs)
        wrong += difference_of_pairs(opened, stopped, n)[1] <= 0.1
    exact = of_pairs(n, 0.15, 0.05, 0.1).passed
    assert wrong / 400 == pytest.approx(exact, abs=0.025)


def test_pairs_decide_sooner_than_two_samples() -> None:
    """Six leaks on the same batches are no change; on other ones they may be."""
    paired, apart = difference_of_pairs(0, 0, 60), difference_of_rates((6, 60), (6, 60))
    assert paired[1] == pytest.approx(upper_bound(0, 60)) == pytest.approx(-paired[0])
    assert apart[0] < paired[0] < 0 < paired[1] < apart[1]


@pytest.mark.parametrize(("opened", "stopped"), [(4, 0), (5, 0), (9, 3), (0, 4), (0, 5), (60, 0), (30, 30)])
def test_bounds_and_the_sign_test_never_disagree(opened: int, stopped: int) -> None:
    """A change that the exact test does not show is not outside the bounds."""
    lower, upper = difference_of_pairs(opened, stopped, 60)
    assert -1 <= lower <= (opened - stopped) / 60 <= upper <= 1
    if sign_test(max(opened, stopped), min(opened, stopped)) > 0.05:
        assert lower <= 0 <= upper


def test_further_clean_steps_are_counted_to_the_first_that_is_enough() -> None:
    """One fewer is not enough."""

    def upper(more: int) -> float:
        return difference_of_rates((1, 60), (2, 60 + more))[1]

    found = more_steps(upper, 0.05)
    assert found is not None
    assert upper(found) <= 0.05 < upper(found - 1)
    assert more_steps(lambda more: 0.2, 0.1) is None
