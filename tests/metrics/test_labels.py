"""The metrics of class counts, by hand and against brute force."""

from __future__ import annotations

import itertools

import pytest

from leakaudit.metrics.label_accuracy import LabelAccuracy
from leakaudit.metrics.label_classes import LabelClasses
from leakaudit.metrics.label_exact import LabelExact
from leakaudit.metrics.label_excess import LabelExcess, chance
from leakaudit.metrics.label_hellinger import LabelHellinger
from leakaudit.plugins.metric_protocol import LabelCounts


def test_one_wrong_label_is_not_exact() -> None:
    """The rate of exact vectors forgives nothing."""
    assert LabelExact()(LabelCounts((2, 1, 0), (2, 1, 0))) == 1.0
    assert LabelExact()(LabelCounts((2, 1, 0), (1, 1, 1))) == 0.0


def test_hellinger_by_hand() -> None:
    """p = (1/2, 1/2), q = (1, 0): the overlap is sqrt(1/2)."""
    assert LabelHellinger()(LabelCounts((2, 2), (4, 0))) == pytest.approx(1 - (1 - 0.5**0.5) ** 0.5)
    assert LabelHellinger()(LabelCounts((2, 2), (1, 1))) == pytest.approx(1.0)
    assert LabelHellinger()(LabelCounts((2, 0), (0, 2))) == 0.0


def test_rare_classes_weigh_as_much_as_frequent_ones() -> None:
    """Missing the only example of a class costs as much as missing all of another."""
    assert LabelClasses()(LabelCounts((9, 1, 0), (9, 0, 1))) == pytest.approx(1 / 3)
    assert LabelClasses()(LabelCounts((9, 1, 0, 0), (9, 1, 0, 0))) == 1.0


@pytest.mark.parametrize("true", [(1, 0, 0), (2, 1, 0), (1, 1, 1), (0, 4, 0), (2, 1, 1)])
def test_chance_is_the_mean_over_all_draws(true: tuple[int, ...]) -> None:
    """Every sequence of labels is as likely as any other: all of them, counted out."""
    draws = list(itertools.product(range(3), repeat=sum(true)))
    rates = [LabelAccuracy()(LabelCounts(true, tuple(draw.count(c) for c in range(3)))) or 0.0 for draw in draws]
    assert chance(true) == pytest.approx(sum(rates) / len(rates))


def test_a_guess_at_chance_is_worth_nothing_and_half_way_above_it_a_half() -> None:
    """Chance is 1/2 for one sequence of two classes.

    For two sequences of one class, random guesses get one right.
    """
    assert LabelExcess()(LabelCounts((1, 0), (0, 1))) == 0.0
    assert LabelExcess()(LabelCounts((2, 0), (1, 1))) == pytest.approx(0.0)
    assert LabelExcess()(LabelCounts((2, 0), (2, 0))) == 1.0
    expected = chance((4, 0))
    assert LabelExcess()(LabelCounts((4, 0), (3, 1))) == pytest.approx((0.75 - expected) / (1 - expected))


def test_where_nothing_can_be_told_apart_nothing_is_measured() -> None:
    """One class only, or no labels."""
    assert LabelExcess()(LabelCounts((3,), (3,))) is None
    assert [
        kind()(LabelCounts((0, 0), (1, 0))) for kind in (LabelExact, LabelHellinger, LabelClasses, LabelExcess)
    ] == [None] * 4


def test_chance_of_thousands_of_labels_is_a_number() -> None:
    """Binomial coefficients of that size do not fit a float."""
    assert 0.9 < chance((1000, 1000, 1000, 1000)) < 1.0
