"""Budgets are counted on a clock that the test holds."""

from __future__ import annotations

import pytest

from leakaudit.plugins.budget import Budget


class Clock:
    """Seconds that pass only when the test says so."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_a_budget_counts_from_its_creation() -> None:
    """Not from zero, nor from the first look at it."""
    clock = Clock()
    budget = Budget(10.0, clock)
    clock.now += 4.0
    assert (budget.spent(), budget.left(), budget.exhausted()) == (4.0, 6.0, False)


def test_a_budget_is_exhausted_from_its_last_second_on() -> None:
    """At the very end nothing is left, and afterwards it never goes below zero."""
    clock = Clock()
    budget = Budget(10.0, clock)
    clock.now += 9.75
    assert not budget.exhausted()
    clock.now += 0.25
    assert budget.exhausted() and budget.left() == 0.0
    clock.now += 5.0
    assert budget.exhausted() and budget.left() == 0.0 and budget.spent() == 15.0


def test_two_budgets_on_one_clock_are_independent() -> None:
    """Every attempt has its own."""
    clock = Clock()
    first = Budget(10.0, clock)
    clock.now += 8.0
    assert Budget(10.0, clock).left() == 10.0 and first.left() == 2.0


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_budget_of_no_time_is_refused(seconds: float) -> None:
    """An attack that cannot start would look like one that found nothing."""
    with pytest.raises(ValueError, match=rf"a budget must be positive, got {seconds} s"):
        Budget(seconds)


def test_a_part_of_a_budget_ends_before_the_whole() -> None:
    """A stage that is given 70 % of what is left leaves 30 % for the next one."""
    clock = Clock()
    whole = Budget(100.0, clock)
    clock.now += 50.0
    part = whole.part(0.7)
    assert part.left() == 35.0
    clock.now += 35.0
    assert part.exhausted() and whole.left() == 15.0


def test_a_part_of_nothing_is_exhausted_as_soon_as_time_passes() -> None:
    """It can be asked for all the same: the attack returns its best guess."""
    clock = Clock()
    whole = Budget(1.0, clock)
    clock.now += 2.0
    part = whole.part(0.7)
    clock.now += 0.001
    assert part.exhausted()
