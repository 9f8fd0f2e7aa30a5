"""Bounds and e-values that hold at every look."""

from __future__ import annotations

import math
import random

import pytest

from leakaudit.results.sequential import clean_steps_for, confidence_sequence, log_e_change, log_e_worse


@pytest.mark.parametrize(
    ("max_rate", "prior", "steps"),
    [
        (0.10, (0.25, 10.0), (32, 67, 91)),
        (0.05, (0.25, 10.0), (69, 139, 187)),
        (0.05, (0.5, 0.5), (116, 177, 224)),
    ],
)
def test_the_steps_until_a_bound_are_those_of_the_closed_form(
    max_rate: float, prior: tuple[float, float], steps: tuple[int, ...]
) -> None:
    """They were computed before with scipy's `betaln` and `brentq`."""
    for k, n in enumerate(steps):
        assert confidence_sequence(k, n, prior=prior).upper <= max_rate
        assert confidence_sequence(k, n - 1, prior=prior).upper > max_rate
    assert clean_steps_for(max_rate, prior=prior) == steps[0]


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.2])
def test_the_sequence_holds_the_rate_at_every_look(rate: float) -> None:
    """At most 5 % of 400 histories leave it at any look.

    33 is the 99.9 % quantile of Binomial(400, 0.05).
    """
    draw = random.Random(0)
    left = 0
    for _ in range(400):
        k = 0
        for n in range(1, 301):
            k += draw.random() < rate
            if n % 10 == 0:
                found = confidence_sequence(k, n)
                if not found.lower <= rate <= found.upper:
                    left += 1
                    break
    assert left <= 33


def test_an_e_value_is_at_most_one_on_average_if_nothing_changed() -> None:
    """Computed over every outcome of two small audits with the same rate."""
    for rate in (0.05, 0.3, 0.5):
        mean = sum(
            math.comb(6, k0)
            * math.comb(6, k1)
            * rate ** (k0 + k1)
            * (1 - rate) ** (12 - k0 - k1)
            * math.exp(log_e_worse((k0, 6), (k1, 6)))
            for k0 in range(7)
            for k1 in range(7)
        )
        assert mean <= 1


def test_a_change_is_seen_in_whatever_night_it_came() -> None:
    """The clean nights before it do not hide it."""
    assert log_e_change((0, 60), [(0, 20)] * 30 + [(20, 20)]) > math.log(20)
    assert log_e_change((0, 60), [(0, 20)] * 200) < 0
    assert log_e_change((0, 60), []) == 0


def test_a_margin_allows_a_higher_rate() -> None:
    """Three leaks in 20 steps are worse than 0 of 200, but not by 20 points."""
    base, new = (0, 200), (5, 20)
    assert log_e_worse(base, new) > math.log(20) > 0 > log_e_worse(base, new, margin=0.3)


@pytest.mark.parametrize("wrong", [(3, 2, 0.95, (1, 1)), (0, 1, 1.0, (1, 1)), (0, 1, 0.95, (0, 1))])
def test_arguments_out_of_range_are_refused(wrong: tuple[int, int, float, tuple[float, float]]) -> None:
    """They would give a bound of nothing."""
    k, n, confidence, prior = wrong
    with pytest.raises(ValueError, match="must"):
        confidence_sequence(k, n, confidence=confidence, prior=prior)
