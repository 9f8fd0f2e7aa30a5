"""Which rows of an update hold more than noise, with a stated rate of rows that are named by chance.

Letters: V rows, D entries a row, s the standard deviation of the noise on every entry.

Without signal the energy |row|^2 / s^2 has a known distribution: chi-squared with D degrees of freedom under Gaussian noise, and under
Laplace noise the sum of D squares E^2 / 2 with E exponential, whose tail is heavier. Which of the two applies is read from the entries
themselves, so that nobody has to name the noise; what is neither clearly gets the heavier tail. Neither cut is a normal approximation,
because at D = 8 to 64 the energy is skewed and a normal's far quantile names several times too many rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from leakaudit.plugins.attack_protocol import FALSE_EVENTS

GAUSSIAN_RATIO = 2.65
"""Ratio of the 90 % quantile to the median of the entries' magnitudes up to which noise counts as Gaussian. It is 2.44 for Gaussian and 3.32
for Laplace noise; our choice lies nearer to the first, because the cut of the second is safe for both."""

SAMPLED = 100_000
"""Entries that the ratio is read from. Our choice: its standard error is 0.01 then."""

QUARTER = 0.25
"""Share of the rows that is taken to hold noise alone where its size is measured. Our choice: a batch names fewer than three quarters
of all tokens."""

STANDARD_ERRORS = 3.0
"""By how many of them a measured noise is taken to be larger than measured where none is declared. Our choice."""

GRID = 2**16
"""Points of the grid on which the Laplace energy's distribution is computed. Our choice: its far quantiles are right to 1 % for D up to 4096."""

WIDEST = 4096
"""Entries from which a sum of Laplace squares is taken as normal. Our choice: its skewness is below 0.1 there."""

Cut = Callable[[float], float]
"""Probability -> the value that a statistic of noise alone exceeds with it."""


def rows_above_noise(rows: Tensor, sigma: float, false_rows: float) -> tuple[Tensor, float]:
    """Say which rows hold more than noise, and how large the noise is taken to be.

    The noise is the larger of what is declared and what the quietest quarter of the rows shows. So a declaration that is too low names
    nothing, and none is needed.

    Args:
        rows: (V, D).
        sigma: declared standard deviation of the noise on every entry; 0 where none is declared.
        false_rows: how many of the rows may be named by chance.

    Returns:
        (V,) whether a row stands out, and the standard deviation that was assumed.
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
    return standing_out(energy / max(used**2, 1e-300), energy_cut(width, heavy), false_rows), used


def standing_out(statistic: Tensor, cut: Cut, expected: float) -> Tensor:
    """Return (V,) which values are more than chance explains.

    A value that one table of noise in 200 reaches stands out alone. Values that `expected` of V reach by chance stand out together, if there
    are more of them than chance brings in all but one table in 200. So noise alone names nothing in 99 of 100 tables.

    Args:
        statistic: (V,).
        cut: of one value under noise alone.
        expected: how many may be named by chance; at most FALSE_EVENTS of all are.
    """
    count = len(statistic)
    expected = min(expected, FALSE_EVENTS * count)
    together: Tensor = statistic > cut(expected / count)
    by_chance = float(stats.poisson.isf(FALSE_EVENTS / 2, expected))
    if float(together.sum()) > by_chance:
        return together
    alone: Tensor = statistic > cut(min(expected, FALSE_EVENTS / 2) / count)
    return alone


def heavy_tailed(entries: Tensor) -> bool:
    """Return whether noise has heavier tails than a normal distribution, from quantiles that a few rows of signal do not move.

    Args:
        entries: of any shape; zeros are left out, as they were not sent.
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
        return lambda tail: float(stats.chi2.isf(tail, width))
    if width > WIDEST:
        return lambda tail: width + float(stats.norm.isf(tail)) * math.sqrt(5 * width)
    return lambda tail: _laplace_energy(width, tail)


def projection_cut(direction: Tensor, heavy: bool) -> Cut:
    """Return the quantiles of a row's inner product with a fixed direction, in units of the noise's standard deviation.

    Exact for Gaussian noise. Under Laplace noise it is Chernoff's bound: P(sum_i m_i x_i > t) <= min_u exp(-u t) prod_i 1 / (1 - u^2 m_i^2 / 2). A
    direction with few large entries does not average the tails away, as transformers' features have them.

    Args:
        direction: (D,), m.
        heavy: Laplace noise instead of Gaussian.
    """
    length = float(direction.double().norm())
    if not heavy:
        return lambda tail: float(stats.norm.isf(tail)) * length
    halves = direction.double().square().cpu().numpy() / 2
    steps = np.linspace(0.0, 1.0, 201)[1:-1, None] / math.sqrt(max(float(halves.max()), 1e-300))  # (199, 1): u
    grown = -np.log1p(-(steps**2) * halves).sum(axis=1)  # (199,)

    def cut(tail: float) -> float:
        return float(((grown - math.log(tail)) / steps[:, 0]).min())

    return cut


@lru_cache(maxsize=64)
def _laplace_energies(width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return values and probabilities of exceeding them, for the sum of `width` squares E^2 / 2 with E exponential.

    One square's distribution is put on a grid so that its mean is kept, and its transform is raised to the power of `width`.
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
    sums = np.fft.irfft(np.fft.rfft(single) ** width, GRID).clip(0.0)
    return step * np.arange(GRID), sums[::-1].cumsum()[::-1]


def _laplace_energy(width: int, tail: float) -> float:
    values, beyond = _laplace_energies(width)
    return float(values[min(int((beyond > tail).sum()), len(values) - 1)])
