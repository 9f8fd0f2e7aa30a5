"""Bounds on k of n, compared with published numbers and with scipy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import betaincinv
from scipy.stats import binom, binomtest, bootstrap, quantile_test

from leakaudit.results import bounds as stats


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (20, (13.9, 21.6, 28.3, 34.4)),
        (30, (9.5, 14.9, 19.5, 23.9)),
        (50, (5.8, 9.1, 12.1, 14.8)),
        (100, (3.0, 4.7, 6.2, 7.6)),
        (300, (1.0, 1.6, 2.1, 2.6)),
        (1000, (0.3, 0.5, 0.6, 0.8)),
    ],
)
def test_upper_bounds_are_the_ones_of_the_table(n: int, expected: tuple[float, ...]) -> None:
    """Upper bounds at 95 % for k = 0 to 3, in per cent."""
    assert tuple(round(100 * stats.upper_bound(k, n), 1) for k in range(4)) == expected


@pytest.mark.parametrize(
    ("max_rate", "expected"),
    [(0.10, (29, 46, 61)), (0.05, (59, 93, 124)), (0.02, (149, 236, 313)), (0.01, (299, 473, 628))],
)
def test_steps_needed_are_the_ones_of_the_table(max_rate: float, expected: tuple[int, ...]) -> None:
    """Steps needed for k = 0, 1, 2 to bound the rate."""
    assert tuple(stats.steps_needed(k, max_rate) for k in range(3)) == expected


def test_the_numbers_shown_to_users_hold() -> None:
    """2 of 60 is undecided at 5 %, 7 of 60 is above it, 0 of 12 may still be 22 %."""
    assert stats.lower_bound(2, 60) == pytest.approx(0.006, abs=5e-4)
    assert stats.upper_bound(2, 60) == pytest.approx(0.101, abs=5e-4)
    assert stats.lower_bound(7, 60) == pytest.approx(0.056, abs=5e-4)
    assert stats.upper_bound(0, 12) == pytest.approx(0.22, abs=5e-3)


@given(
    st.integers(1, 5_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))),
    st.sampled_from([0.05, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999]),
)
def test_bounds_are_the_quantiles_of_scipys_beta(k_n: tuple[int, int], confidence: float) -> None:
    """Another road to the same twelve digits: the beta form of the exact interval."""
    k, n = k_n
    upper = 1.0 if k == n else betaincinv(k + 1, n - k, confidence)
    lower = 0.0 if k == 0 else betaincinv(k, n - k + 1, 1 - confidence)
    assert stats.upper_bound(k, n, confidence) == pytest.approx(upper, abs=1e-12)
    assert stats.lower_bound(k, n, confidence) == pytest.approx(lower, abs=1e-12)


def test_bounds_of_no_step_are_the_whole_range() -> None:
    """Nothing is known without evidence."""
    assert (stats.lower_bound(0, 0), stats.upper_bound(0, 0)) == (0.0, 1.0)


@pytest.mark.parametrize("n", [30, 60, 1000])
def test_bootstrap_bounds_lie_among_those_of_scipy(n: int) -> None:
    """As far from each of scipy's as its seeds are from each other, by three times."""
    values = np.random.default_rng(n).beta(1, 6, size=n)
    bounds = stats.mean_bounds(values.tolist())
    assert bounds is not None
    seeds = [np.random.default_rng(seed) for seed in range(10)]
    lower = [
        bootstrap(
            (values.tolist(),), np.mean, rng=rng, confidence_level=0.95, alternative="greater"
        ).confidence_interval.low
        for rng in seeds[:5]
    ]
    upper = [
        bootstrap(
            (values.tolist(),), np.mean, rng=rng, confidence_level=0.95, alternative="less"
        ).confidence_interval.high
        for rng in seeds[5:]
    ]
    for ours, found in ((bounds.lower, lower), (bounds.upper, upper)):
        assert ours == pytest.approx(np.mean(found), abs=0.06 * values.std() / n**0.5 + 3 * np.std(found))


@given(
    st.lists(st.floats(0, 1), min_size=30, max_size=120),
    st.sampled_from([0.5, 0.9, 0.95]),
    st.sampled_from([0.9, 0.95]),
)
def test_bounds_of_a_quantile_are_those_of_scipy(values: list[float], quantile: float, confidence: float) -> None:
    """Ties included; None is its nan."""
    bounds = stats.quantile_bounds(values, quantile, confidence)
    assert bounds is not None
    above: Any = quantile_test(values, p=quantile, alternative="greater").confidence_interval(confidence)
    below: Any = quantile_test(values, p=quantile, alternative="less").confidence_interval(confidence)  # stubs: a float
    low, high = above.low, below.high
    assert bounds.lower == (0.0 if np.isnan(low) else low)
    assert bounds.upper == (None if np.isnan(high) else high)
    assert stats.percentile(values, quantile) == np.quantile(values, quantile, method="inverted_cdf")


@given(st.integers(0, 30), st.integers(0, 200), st.floats(0.005, 0.9))
def test_more_clean_steps_is_the_least_number_that_decides(k: int, clean: int, max_rate: float) -> None:
    """With that many the bound holds, with one fewer it does not."""
    n = k + clean
    more = stats.more_clean_steps(k, n, max_rate)
    assert more is not None
    assert stats.upper_bound(k, n + more) <= max_rate
    if more > 0:
        assert stats.upper_bound(k, n + more - 1) > max_rate


def test_no_number_of_steps_proves_a_rate_of_zero() -> None:
    """A limit of zero needs a count, not a rate."""
    with pytest.raises(ValueError, match="no number of steps proves"):
        stats.steps_needed(0, 0.0)


def test_impossible_counts_are_refused() -> None:
    """More leaks than steps is a mistake of the caller."""
    with pytest.raises(ValueError, match=r"k must lie within 0\.\.n, got 3 of 2"):
        stats.upper_bound(3, 2)
    with pytest.raises(ValueError, match="confidence must lie between 0 and 1"):
        stats.lower_bound(1, 2, confidence=95)


def test_few_steps_have_no_bounds_of_a_score() -> None:
    """Below 30 steps there is no bootstrap and no pretence of one."""
    assert stats.mean_bounds([0.5] * 29) is None
    assert stats.quantile_bounds([0.5] * 29) is None


def test_bootstrap_bounds_of_the_mean_enclose_it_and_repeat() -> None:
    """They lie around the mean, near the normal approximation."""
    values = np.random.default_rng(3).beta(2, 5, size=60).tolist()
    bounds = stats.mean_bounds(values)
    assert bounds == stats.mean_bounds(values)
    assert bounds is not None and bounds.lower is not None and bounds.upper is not None
    half = 1.645 * np.std(values, ddof=1) / 60**0.5
    assert bounds.lower == pytest.approx(np.mean(values) - half, abs=0.01)
    assert bounds.upper == pytest.approx(np.mean(values) + half, abs=0.01)


def test_bounds_do_not_collapse_where_every_step_is_alike() -> None:
    """Sixty zeros still leave room for a few steps that score."""
    bounds = stats.mean_bounds([0.0] * 60)
    assert bounds is not None
    assert (bounds.lower, bounds.upper) == (0.0, stats.upper_bound(0, 60))


def test_upper_bound_of_p95_needs_59_steps() -> None:
    """With 58 values even the largest may lie below the 95th percentile."""
    few, enough = stats.quantile_bounds([i / 58 for i in range(58)]), stats.quantile_bounds([i / 59 for i in range(59)])
    assert few is not None and enough is not None
    assert few.upper is None
    assert enough.upper == 58 / 59


@pytest.mark.parametrize("n", [30, 59, 100, 361])
def test_bounds_of_a_quantile_cover_it_as_often_as_they_say(n: int) -> None:
    """The next order statistic inside would not have the coverage."""
    bounds = stats.quantile_bounds([float(i) for i in range(1, n + 1)], 0.9)
    assert bounds is not None and bounds.lower is not None and bounds.upper is not None
    upper, lower = int(bounds.upper), int(bounds.lower)
    assert binom.cdf(upper - 1, n, 0.9) >= 0.95 > binom.cdf(upper - 2, n, 0.9)
    assert binom.sf(lower - 1, n, 0.9) >= 0.95 > binom.sf(lower, n, 0.9)


def test_percentile_is_a_value_that_was_seen() -> None:
    """No interpolation: p95 of twenty values is the nineteenth."""
    assert stats.percentile([float(i) for i in range(1, 21)]) == 19.0
    with pytest.raises(ValueError, match="the percentile of nothing is not 0"):
        stats.percentile([])


@given(st.integers(0, 40), st.integers(0, 40))
def test_sign_test_agrees_with_scipy(stopped: int, opened: int) -> None:
    """The exact sign test is a binomial test at one half."""
    expected = 1.0
    if stopped + opened:
        expected = binomtest(stopped, stopped + opened, 0.5, alternative="greater").pvalue
    assert stats.sign_test(stopped, opened) == pytest.approx(expected)
