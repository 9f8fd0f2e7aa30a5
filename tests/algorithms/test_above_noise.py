"""Rows above noise: quantiles against draws, and rows named by chance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scipy.stats import binom, norm
from torch import Tensor

from leakaudit.algorithms.above_noise import (
    WIDEST,
    against_above_noise,
    energy_cut,
    heavy_tailed,
    measured_cut,
    measured_projection_cut,
    projection_cut,
    rows_above_noise,
    standing_out,
)


def _noise(heavy: bool, *shape: int, seed: int = 0) -> Tensor:
    """Return noise of unit variance, Laplace or Gaussian."""
    rng = torch.Generator().manual_seed(seed)
    if not heavy:
        return torch.randn(shape, generator=rng)
    one, two = (torch.empty(shape).exponential_(generator=rng) for _ in range(2))
    return (one - two) / 2**0.5


@pytest.mark.parametrize("tail", [0.75, 0.01, 1e-3])
@pytest.mark.parametrize("width", [1, 8, 64])
@pytest.mark.parametrize("heavy", [True, False])
def test_the_energys_quantiles_are_those_of_draws(heavy: bool, width: int, tail: float) -> None:
    """A normal approximation of the norm is exceeded several times too often at D = 8."""
    draws = 100_000
    energy = _noise(heavy, draws, width).square().sum(dim=1)
    above = int((energy > energy_cut(width, heavy)(tail)).sum())
    assert binom.ppf(1e-4, draws, 0.96 * tail) <= above <= binom.isf(1e-4, draws, 1.04 * tail)


def test_quantiles_of_wide_sums_continue_those_of_the_table() -> None:
    """The normal approximation takes over without a step."""
    assert energy_cut(WIDEST, True)(1e-3) / WIDEST == pytest.approx(
        energy_cut(WIDEST + 1, True)(1e-3) / WIDEST, rel=0.01
    )


@pytest.mark.parametrize("heavy", [True, False])
def test_the_kind_of_noise_is_read_from_its_entries(heavy: bool) -> None:
    """Also with a few rows of signal in it, and with entries that were not sent."""
    rows = _noise(heavy, 200, 16)
    rows[:2] *= 20
    rows[50:60] = 0
    assert heavy_tailed(rows) == heavy
    assert not heavy_tailed(torch.zeros(4, 4))


@pytest.mark.parametrize("heavy", [True, False])
def test_a_projection_on_one_large_entry_keeps_the_noises_tails(heavy: bool) -> None:
    """With one outlying dimension Laplace noise does not average to a normal one."""
    direction = torch.full((32,), 0.1)
    direction[3] = 5.0
    draws, tail = 200_000, 1e-3
    above = int((_noise(heavy, draws, 32) @ direction > projection_cut(direction, heavy)(tail)).sum())
    assert above <= binom.isf(1e-4, draws, tail)


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("heavy", [True, False])
@pytest.mark.parametrize(("count", "width"), [(47, 8), (47, 64), (1000, 16)])
def test_noise_alone_names_nothing_in_99_tables_of_100(count: int, width: int, heavy: bool, declared: bool) -> None:
    """Neither with a known size nor with one that is measured on the rows themselves."""
    draws = 500
    named = sum(
        bool(rows_above_noise(_noise(heavy, count, width, seed=seed), float(declared), 1.0)[0].any())
        for seed in range(draws)
    )
    assert named <= binom.isf(1e-4, draws, 0.01)


@pytest.mark.parametrize("heavy", [True, False])
def test_beside_rows_that_stand_out_one_false_row_a_table_is_named(heavy: bool) -> None:
    """That is what `false_rows` states."""
    wrong = 0
    for seed in range(100):
        rows = _noise(heavy, 1000, 16, seed=seed)
        rows[:8] *= 6
        named, _ = rows_above_noise(rows, 1.0, 1.0)
        assert int(named[:8].sum()) >= 7
        wrong += int(named[8:].sum())
    assert wrong <= binom.isf(1e-4, 100 * 992, 1 / 1000)


def _quantized(noise: Tensor, bits: int) -> Tensor:
    """Return the noise on 2^bits - 1 levels, rounded up or down at random."""
    rng, steps, largest = torch.Generator().manual_seed(1), 2 ** (bits - 1) - 1, float(noise.abs().max())
    levels: Tensor = (noise / largest * steps + torch.rand(noise.shape, generator=rng)).floor() * (largest / steps)
    return levels


def _rarely_sent(noise: Tensor, bits: int) -> Tensor:
    """Return the noise with all but one entry in 4^bits set to zero, at random."""
    return noise * (torch.rand(noise.shape, generator=torch.Generator().manual_seed(1)) < 4.0**-bits)


@pytest.mark.parametrize("changed", [_quantized, _rarely_sent])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("heavy", [True, False])
def test_noise_that_was_changed_afterwards_names_nothing_in_99_tables_of_100(
    heavy: bool, bits: int, changed: Callable[[Tensor, int], Tensor]
) -> None:
    """The declared size is that of the noise before the change.

    Quantisation makes it larger.
    """
    draws = 50
    named = sum(
        bool(rows_above_noise(changed(_noise(heavy, 3000, 128, seed=seed), bits), 1.0, 1.0)[0].any())
        for seed in range(draws)
    )
    assert named <= binom.isf(1e-4, draws, 0.01)


def test_the_measured_quantile_is_that_of_a_binomial_count() -> None:
    """Signs with one entry in ten sent: the energy of a row counts the entries."""
    rng = torch.Generator().manual_seed(0)
    rows = (torch.rand(20_000, 100, generator=rng) < 0.1).float()
    rows[:50] = 3.0
    for tail in (0.015, 1e-4, 1e-6):
        assert measured_cut(rows)(tail) == pytest.approx(binom.isf(tail, 100, 0.1), abs=0.6)


@pytest.mark.parametrize("changed", [_quantized, _rarely_sent])
@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("heavy", [True, False])
def test_no_row_of_changed_noise_points_backwards_by_more_than_chance(
    heavy: bool, bits: int, changed: Callable[[Tensor, int], Tensor]
) -> None:
    """A few entries of features are large, so that the sum is far from normal."""
    direction = torch.randn(128, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    direction[:3] *= 10
    draws, named = 12, 0
    for seed in range(draws):
        rows = changed(_noise(heavy, 3000, 128, seed=seed), bits).double()
        named += bool(against_above_noise(rows @ direction, rows, direction, 1.0, 1.0).any())
    assert named <= binom.isf(1e-4, draws, 0.01)


@pytest.mark.parametrize("tail", [1e-2, 1e-4, 1e-6])
def test_the_measured_quantile_of_a_projection_is_that_of_normal_noise_and_of_signs(tail: float) -> None:
    """Both are known: a normal variable, and a binomial count for a direction of ones."""
    rows = _noise(False, 20_000, 100).double()
    direction = torch.linspace(0.5, 2.0, 100, dtype=torch.float64)
    expected = float(norm.isf(tail)) * float(direction.norm())
    assert measured_projection_cut(rows, direction)(tail) == pytest.approx(expected, rel=0.03)
    signs = measured_projection_cut(rows.sign(), torch.ones(100, dtype=torch.float64))
    assert signs(tail) == pytest.approx(2 * binom.isf(tail, 100, 0.5) - 100, abs=2)


def test_words_stand_out_of_quantised_noise() -> None:
    """The quantile that the rows themselves show is no larger than it must be."""
    rows = _noise(False, 3000, 128)
    rows[:20] *= 3
    named, _ = rows_above_noise(_quantized(rows, 2), 1.0, 1.0)
    assert int(named[:20].sum()) >= 18
    assert int(named[20:].sum()) <= 4


def test_one_extreme_value_counts_alone_and_a_few_near_the_bound_do_not() -> None:
    """Three values that one table in three has by chance are no evidence; six are."""
    cut = energy_cut(16, False)
    quiet = torch.full((1000,), 16.0)
    near = cut(0.9 / 1000)
    assert not standing_out(quiet.index_fill(0, torch.arange(3), near), cut, 1.0).any()
    assert standing_out(quiet.index_fill(0, torch.arange(6), near), cut, 1.0).sum() == 6
    assert standing_out(quiet.index_fill(0, torch.tensor([5]), 90.0), cut, 1.0).nonzero().tolist() == [[5]]
