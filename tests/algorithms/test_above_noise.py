"""Rows above noise: quantiles against draws, and rows named by chance."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import binom
from torch import Tensor

from leakaudit.algorithms.above_noise import (
    WIDEST,
    energy_cut,
    heavy_tailed,
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


def test_one_extreme_value_counts_alone_and_a_few_near_the_bound_do_not() -> None:
    """Three values that one table in three has by chance are no evidence; six are."""
    cut = energy_cut(16, False)
    quiet = torch.full((1000,), 16.0)
    near = cut(0.9 / 1000)
    assert not standing_out(quiet.index_fill(0, torch.arange(3), near), cut, 1.0).any()
    assert standing_out(quiet.index_fill(0, torch.arange(6), near), cut, 1.0).sum() == 6
    assert standing_out(quiet.index_fill(0, torch.tensor([5]), 90.0), cut, 1.0).nonzero().tolist() == [[5]]
