"""The distribution of noise's entries, against distributions that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import binom, norm
from torch import Tensor

from leakaudit.algorithms.above_noise import measured_projection_cut
from leakaudit.algorithms.noise_entries import NoiseEntries, quiet_entries


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _laplace(*shape: int, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    one, two = (torch.empty(shape, dtype=torch.float64).exponential_(generator=rng) for _ in range(2))
    return (one - two) / 2**0.5


def test_sums_of_normal_entries_have_the_normal_tail() -> None:
    """The saddlepoint approximation is exact for them."""
    weights = np.linspace(0.5, 2.0, 100)
    values = np.array([2.0, 4.0, 6.0]) * np.linalg.norm(weights)
    found = NoiseEntries.of(_normal(1_000_000)).surprise(values, np.tile(weights, (3, 1)))
    assert found == pytest.approx(-norm.logsf([2.0, 4.0, 6.0]), rel=0.03)


def test_the_far_tail_of_one_laplace_entry_is_not_shorter_than_it_is() -> None:
    """A tail of 1e-7 is told from ten thousand entries, within a factor of e^2."""
    value = -math.log(2e-7) / 2**0.5
    found = [
        float(NoiseEntries.of(_laplace(10_000, seed=seed)).surprise(np.array([value]), np.ones((1, 1)))[0])
        for seed in range(20)
    ]
    assert -math.log(1e-7) - 7 < np.mean(found) < -math.log(1e-7)
    assert max(found) < -math.log(1e-7) + 2


def test_a_value_that_no_sum_reaches_surprises_more_than_one_that_the_largest_reaches() -> None:
    """Signs: a sum of four is at most four."""
    entries = NoiseEntries.of(_normal(10_000).sign())
    four, more = entries.surprise(np.array([3.9, 5.0]), np.ones((2, 4)))
    assert four < 4 and more > 30
    assert entries.surprise(np.array([-1.0, 0.0]), np.ones((2, 4))).tolist() == [math.log(2)] * 2


def test_sparse_sums_exceed_a_value_as_often_as_stated() -> None:
    """One entry with most of the weight gives the sum single likely values."""
    rng = np.random.default_rng(0)
    drawn = np.where(rng.random((200_000, 16)) < 0.02, rng.choice([-1.0, 1.0], (200_000, 16)), 0.0)
    weights = np.geomspace(1.0, 0.01, 16)
    found = NoiseEntries.of(torch.from_numpy(drawn.flatten()))
    sums = drawn @ weights
    for value in (0.5, 1.0, 1.5, 1.8):
        share = float((sums >= value).mean())
        assert share <= 1.1 * math.exp(-float(found.surprise(np.array([value]), weights[None])[0])), value


def test_the_proxy_is_the_variance_of_normal_entries_and_bounds_the_cumulants_of_others() -> None:
    """The others have the cumulants log(1 + (cosh(3 u) - 1) / 50)."""
    assert NoiseEntries.of(2 * _normal(100_000)).proxy == pytest.approx(4.0, rel=0.02)
    rare = torch.zeros(100_000).index_fill(0, torch.arange(2000), 3.0)
    proxy, at = NoiseEntries.of(rare).proxy, np.linspace(0.01, 10, 1000)
    values = np.log1p((np.cosh(3 * at) - 1) / 50)
    assert bool((values <= 1.001 * proxy * at**2 / 2).all())
    assert proxy == pytest.approx(float((2 * values / at**2).max()), rel=0.1)


def test_signal_along_known_directions_is_no_noise() -> None:
    """Every row holds some of it; the noise is a tenth as large."""
    direction = torch.nn.functional.normalize(_normal(64, 1, seed=1), dim=0)
    rows = 0.1 * _normal(4000, 64) + (1 + _normal(4000, 1, seed=2).abs()) * 2 * direction.T
    assert NoiseEntries.of(quiet_entries(rows)).deviation > 0.15
    assert NoiseEntries.of(quiet_entries(rows, direction)).deviation == pytest.approx(0.1, rel=0.02)


@pytest.mark.parametrize("kept", [0.01, 0.001])
def test_quiet_entries_of_pruned_noise_are_as_sparse_as_all_without_their_directions(kept: float) -> None:
    """Rows of zeros are quiet in both halves, so a projection must not choose them."""
    noise = _laplace(4000, 64)
    rows = noise * (noise.abs() > noise.abs().flatten().quantile(1 - kept))
    found = NoiseEntries.of(quiet_entries(rows, torch.eye(64, dtype=torch.float64)[:, :8]))
    assert found.deviation == pytest.approx(float(rows.square().mean().sqrt()), rel=0.35)


def test_a_projection_of_pruned_noise_reaches_many_standard_deviations() -> None:
    """One entry in a thousand is sent, and one weight is large."""
    direction = torch.zeros(64, dtype=torch.float64).index_fill(0, torch.tensor([3]), 1.0)
    draws, tail = 12, 1 / 4000
    above = 0
    for seed in range(draws):
        noise = _laplace(4000, 64, seed=seed)
        rows = noise * (noise.abs() > -math.log(0.001) / 2**0.5)
        above += int((rows @ direction > measured_projection_cut(rows, direction)(tail)).sum())
    assert above <= binom.isf(1e-4, draws * 4000, tail)
