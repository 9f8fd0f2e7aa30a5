"""Rows of an update that hold more than noise, with a stated rate of false rows.

Letters: V rows, D entries per row, s the standard deviation of the noise on every entry.

Without signal the energy |row|^2 / s^2 has a known distribution: chi-squared with D degrees of freedom under Gaussian
noise; under Laplace noise the sum of D squares E^2 / 2 with E exponential, which has a heavier tail. The entries
themselves show which of the two applies, so the kind of noise need not be known; in doubt the heavier tail is used.
Below D = 4096 neither quantile uses a normal approximation: at D = 8 to 64 the energy is skewed, and a normal
distribution's far quantile names several times too many rows.

What was done to the noise afterwards changes the distribution again. After quantisation to a few levels, for example, the energy counts a few
large entries and varies more than either kind of noise. So the rows themselves say how much the energy of noise varies: it is the sum of D
entries that are drawn from the quiet rows (`measured_cut`). The larger of both quantiles is used. Inner products of rows with a direction are judged in the same way
(`against_above_noise`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from scipy import special
from torch import Tensor

from leakaudit.algorithms.noise_entries import QUARTER, NoiseEntries, quiet_entries
from leakaudit.plugins.attack_protocol import FALSE_EVENTS

GAUSSIAN_RATIO = 2.65
"""Largest ratio of the 90 % quantile to the median of magnitudes at which noise counts as Gaussian.
The ratio is 2.44 for Gaussian and 3.32 for Laplace noise. Our choice is nearer to the first, because it is safe to treat
Gaussian noise as Laplace noise."""

SAMPLED = 100_000
"""Entries from which the ratio is estimated.
Our choice: its standard error is then 0.01."""

STANDARD_ERRORS = 3.0
"""Standard errors by which the rank of the noise's quantile is raised if no noise is declared.
Our choice."""

GRID = 2**16
"""Points of the grid for the distribution of an energy.
Our choice: the far quantiles of Laplace noise are right to 1 % for D up to 4096."""

SPREAD = 1.5
"""Steps of the grid, times the square root of D, that are added to a measured quantile. Sharing a value between two points gives it a
standard deviation of at most half a step, and a sum of D values sqrt(D) times as much; 1.5 is three such deviations."""

WIDEST = 4096
"""Entries from which a sum of Laplace squares counts as normal.
Our choice: its skewness is then below 0.1."""

PROJECTIONS, FARTHEST = 120, 40.0
"""Points at which the tail of a projection is computed, and minus the logarithm of the tail at the farthest of them.
Our choice: no table has so many rows."""

Cut = Callable[[float], float]
"""Probability -> the value that a statistic of noise alone exceeds with this probability."""


def rows_above_noise(rows: Tensor, sigma: float, false_rows: float) -> tuple[Tensor, float]:
    """Return which rows hold more than noise, and the noise that was assumed.

    The noise is measured on the rows with the least energy; the larger of the measured and the declared noise is used. So
    no declaration is needed, and one that is too low names no wrong rows. A row is named if its energy is above the quantile of Gaussian
    or Laplace noise of this size, and above that of the quiet rows' own entries.

    Args:
        rows: (V, D).
        sigma: declared standard deviation of the noise on every entry; 0 if none is declared.
        false_rows: how many rows may be named by chance.

    Returns:
        (V,) booleans, and the standard deviation of the noise.
    """
    count, width = rows.shape
    energy = rows.double().square().sum(dim=1)  # (V,)
    heavy = heavy_tailed(rows)
    rank = QUARTER * count
    if sigma == 0.0:
        rank += STANDARD_ERRORS * math.sqrt(QUARTER * (1 - QUARTER) * count)
    lower = float(energy.kthvalue(min(count, math.ceil(rank))).values)
    seen = math.sqrt(lower / energy_cut(width, heavy)(1 - QUARTER))
    used = max(sigma, seen)
    by_kind, by_entries = energy_cut(width, heavy), measured_cut(rows)
    return standing_out(energy, lambda tail: max(used**2 * by_kind(tail), by_entries(tail)), false_rows), used


def against_above_noise(statistic: Tensor, rows: Tensor, direction: Tensor, sigma: float, false_rows: float) -> Tensor:
    """Return (V,) booleans: whether a row points along a direction beyond noise.

    The larger of two quantiles is used: of Gaussian or Laplace noise of the declared size, and of the quiet rows' own entries, which show
    what was done to the noise afterwards.

    Args:
        statistic: (V,) inner products.
        rows: (V, D).
        direction: (D,).
        sigma: standard deviation of the noise on every entry.
        false_rows: how many rows may be named by chance.
    """
    by_kind, by_entries = projection_cut(direction, heavy_tailed(rows)), measured_projection_cut(rows, direction)
    return standing_out(statistic, lambda tail: max(sigma * by_kind(tail), by_entries(tail)), false_rows)


def standing_out(statistic: Tensor, cut: Cut, expected: float) -> Tensor:
    """Return (V,) booleans: whether a value is larger than chance explains.

    There are two tests. First, each value counts that exceeds the bound which `expected` of V values exceed by chance,
    if there are more such values than chance gives in 199 of 200 tables of noise. Otherwise, a value counts if only one
    table of noise in 200 has such a large value. So in 99 of 100 tables of noise alone no value counts.

    Args:
        statistic: (V,).
        cut: quantiles of one value under noise alone.
        expected: how many may be named by chance; at most the share FALSE_EVENTS of all.
    """
    count = len(statistic)
    expected = min(expected, FALSE_EVENTS * count)
    together: Tensor = statistic > cut(expected / count)
    by_chance = math.ceil(special.pdtrik(1 - FALSE_EVENTS / 2, expected))
    if float(together.sum()) > by_chance:
        return together
    alone: Tensor = statistic > cut(min(expected, FALSE_EVENTS / 2) / count)
    return alone


def heavy_tailed(entries: Tensor) -> bool:
    """Return whether noise has heavier tails than a normal distribution.

    A few rows of signal do not change the quantiles that are compared.

    Args:
        entries: of any shape; zeros are left out, because they were not sent.
    """
    flat = entries.detach().flatten()
    flat = flat[:: max(1, len(flat) // SAMPLED)].abs()
    flat = flat[flat > 0]
    if len(flat) == 0:
        return False
    middle, high = torch.quantile(
        flat.double(), torch.tensor([0.5, 0.9], dtype=torch.float64, device=flat.device)
    ).tolist()
    return bool(high > GAUSSIAN_RATIO * middle)


def energy_cut(width: int, heavy: bool) -> Cut:
    """Return the quantiles of |row|^2 / s^2 of noise alone.

    Args:
        width: D.
        heavy: Laplace noise instead of Gaussian.
    """
    if not heavy:
        return lambda tail: float(special.chdtri(width, tail))
    if width > WIDEST:
        return lambda tail: width + -float(special.ndtri(tail)) * math.sqrt(5 * width)
    return lambda tail: _laplace_energy(width, tail)


def measured_cut(rows: Tensor) -> Cut:
    """Return the quantiles of |row|^2 if all entries are drawn from the quiet rows.

    See `leakaudit.algorithms.noise_entries`.

    Args:
        rows: (V, D).
    """
    width = rows.shape[1]
    entries = NoiseEntries.of(quiet_entries(rows))
    squares = entries.sizes**2
    mean = float(entries.shares @ squares)
    spread, largest = math.sqrt(max(0.0, float(entries.shares @ squares**2) - mean**2)), float(squares.max())
    step = (width * mean + 12 * math.sqrt(width) * spread + 3 * largest) / GRID  # a Poisson count stays below, too
    if step == 0.0:
        return lambda _: 0.0
    at = squares / step
    below = at.astype(int)
    upper = entries.shares * (at - below)
    single = np.bincount(below, entries.shares - upper, GRID) + np.bincount(below + 1, upper, GRID)
    values, beyond = _sums(single, width, step)
    return lambda tail: _first_below(values, beyond, tail) + SPREAD * math.sqrt(width) * step


def projection_cut(direction: Tensor, heavy: bool) -> Cut:
    """Return the quantiles of a row's inner product with a fixed direction m.

    They are in units of the noise's standard deviation. For Gaussian noise they are exact. For Laplace noise they follow
    from Chernoff's bound, P(sum_i m_i x_i > t) <= min_u exp(-u t) prod_i 1 / (1 - u^2 m_i^2 / 2). A normal approximation
    would be wrong there, because features of transformers have few large entries, so the sum keeps heavy tails.

    Args:
        direction: (D,), m.
        heavy: Laplace noise instead of Gaussian.
    """
    length = float(direction.double().norm())
    if not heavy:
        return lambda tail: -float(special.ndtri(tail)) * length
    halves = direction.double().square().cpu().numpy() / 2
    steps = np.linspace(0.0, 1.0, 201)[1:-1, None] / math.sqrt(max(float(halves.max()), 1e-300))  # (199, 1): u
    grown = -np.log1p(-(steps**2) * halves).sum(axis=1)  # (199,)

    def cut(tail: float) -> float:
        return float(((grown - math.log(tail)) / steps[:, 0]).min())

    return cut


def measured_projection_cut(rows: Tensor, direction: Tensor) -> Cut:
    """Return the quantiles of a row's inner product with a fixed direction m.

    All entries are drawn from the quiet rows.

    Args:
        rows: (V, D).
        direction: (D,), m.
    """
    entries, weights = NoiseEntries.of(quiet_entries(rows)), direction.double().abs().cpu().numpy()  # (D,)
    deviation = entries.deviation * float(np.linalg.norm(weights))
    if deviation == 0.0:
        return lambda _: 0.0
    farthest = 12 * deviation
    while entries.surprise(np.array([farthest]), weights[None])[0] < FARTHEST:
        farthest *= 1.5  # entries that are seldom more than 0 reach many standard deviations
    at = np.linspace(0.0, farthest, PROJECTIONS)
    logs = np.maximum.accumulate(entries.surprise(at, np.broadcast_to(weights, (PROJECTIONS, len(weights)))))
    return lambda tail: float(np.interp(-math.log(tail), logs, at))


@lru_cache(maxsize=64)
def _laplace_energies(width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return values and tail probabilities of a sum of `width` squares E^2 / 2.

    E is exponential. The distribution of one square is put on a grid in a way that keeps its mean. Then its Fourier
    transform is raised to the power of `width`.
    """
    top = (
        width + 12 * math.sqrt(5 * width) + 600
    )  # mean D, variance 5 D; a single square reaches 600 with probability 1e-15
    step = top / GRID
    edges = np.sqrt(2 * step * np.arange(GRID))  # E where E^2 / 2 is k steps
    beyond = np.exp(-edges)
    moment = (edges**2 / 2 + edges + 1) * beyond / step  # E^2 / 2 over all E from there on, in steps
    mass, share = -np.diff(beyond), -np.diff(moment) - np.arange(GRID - 1) * -np.diff(beyond)
    single = np.zeros(GRID)
    single[:-1] += mass - share
    single[1:] += share
    return _sums(single, width, step)


def _sums(single: np.ndarray, count: int, step: float) -> tuple[np.ndarray, np.ndarray]:
    """Return values and tail probabilities of a sum of `count` independent values.

    Args:
        single: (GRID,) probability of each value k * step of one of them.
        count: number of values.
        step: distance of two points of the grid.
    """
    sums = np.fft.irfft(np.fft.rfft(single) ** count, GRID).clip(0.0)
    return step * np.arange(GRID), sums[::-1].cumsum()[::-1]


def _laplace_energy(width: int, tail: float) -> float:
    return _first_below(*_laplace_energies(width), tail)


def _first_below(values: np.ndarray, beyond: np.ndarray, tail: float) -> float:
    """Return the least value with a tail probability of at most `tail`."""
    return float(values[min(int((beyond > tail).sum()), len(values) - 1)])
