"""Estimates of how the entries of noise are distributed, from quiet rows.

Letters: V rows, D entries per row, N entries that were measured, J groups of equal entries, K(u) = log E cosh(u x) for an entry x.

The entries of noise are independent and alike, whatever was done to each of them: quantisation, pruning, signs. So the rows that hold no signal tell what a sum of
entries of noise may be, and nobody needs to know the kind of noise, its size, or what came after it. Few entries do not show the far tail of one
entry. It is continued as an exponential one, whose mean is the mean excess of the largest entries that were seen. That is exact for Laplace noise, more than
Gaussian noise has, and nothing for entries that all have one size. Entries are taken as symmetric. (Own derivation.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from scipy import special
from torch import Tensor

QUARTER = 0.25
"""Share of the rows that is assumed to hold noise alone.
Our choice: a batch names fewer than three quarters of all tokens."""

GROWTH = 1.15
"""Ratio of two neighbouring ranks between which magnitudes count as equal. Our choice: a hundred groups for a million entries."""

LEVELS, SAMPLED = 300, 20_000
"""Number of distinct magnitudes up to which they are not grouped, and of entries among which they are counted first. Our choice."""

LARGEST, BEYOND, HALVING = 100, 1e-3, 2.0
"""Entries whose mean excess continues the tail, the number of entries of the N beyond which it ends, and the ratio of two neighbouring shares.
Our choice: the mean of 100 is right to a tenth, and one table in a thousand has an entry beyond the end."""

ERRORS = 1.5
"""Standard errors that are added to the mean excess, and to the share of entries above 0. Our choice: a tail that is too short names words in one
table of ten, not of a hundred."""

FARTHEST, POINTS = 40.0, 4000
"""Largest u of the table of K, in units of 1 / standard deviation, and its points.
Our choice: one entry of a sum may have most of its weight, and then the table reaches the largest entries."""

ROUNDS = 45
"""Halvings in the search for the saddle point. Our choice: it is then right to a float's precision."""

NORMAL = 1.15
"""Largest ratio of `proxy` to the variance at which entries count as normal.
Our choice: a million entries of Gaussian noise have up to 1.1, because their tail is continued as a heavier one."""

ALIKE = 1.1
"""Largest ratio of two standard deviations that count as equal. Our choice: those of noise differ by a hundredth or two, of sparse noise by more."""


def quiet_entries(rows: Tensor, beside: Tensor | None = None) -> Tensor:
    """Return entries (N,) of rows (V, D) that hold noise alone.

    The quiet rows of the left half of the columns are the QUARTER with the least energy in the right half, and the other way round. So a row of
    noise is not chosen by the entries that are taken from it, and a row of signal is left out.

    If even quiet rows hold signal along some directions, they lose what they have there, and the rest is scaled to the size that noise would have. Rows
    without it are taken as they are, because a projection mixes entries.

    Args:
        rows: (V, D).
        beside: (D, R), orthonormal directions of signal, R < D; None if quiet rows hold none.
    """
    width = rows.shape[1]
    middle = (width + 1) // 2
    if width == 1:
        return rows.flatten()
    chosen = _quiet(rows[:, middle:]), _quiet(rows[:, :middle])
    plain = torch.cat([rows[chosen[0], :middle].flatten(), rows[chosen[1], middle:].flatten()])
    if beside is None or not beside.shape[1]:
        return plain
    left, right = (rows[rank] - (rows[rank] @ beside) @ beside.T for rank in chosen)
    without = torch.cat([left[:, :middle].flatten(), right[:, middle:].flatten()])
    without = without / math.sqrt(1 - beside.shape[1] / width)
    return plain if float(plain.norm()) <= ALIKE * float(without.norm()) else without


def _quiet(judged: Tensor) -> Tensor:
    """Return the indices of the rows (V, F) with the least energy."""
    energy = judged.double().square().sum(dim=1)  # (V,)
    return energy.topk(max(1, math.ceil(QUARTER * len(energy))), largest=False).indices


@dataclass(frozen=True)
class NoiseEntries:
    """Magnitudes of the entries of noise, in groups."""

    sizes: np.ndarray
    """(J,) float64, in the update's units."""
    shares: np.ndarray
    """(J,) float64, of all entries; their sum is 1."""
    seen: np.ndarray
    """(I,) float64, magnitudes above 0 as they were seen, without the continued tail."""
    seen_shares: np.ndarray
    """(I,) float64, of all entries."""

    @classmethod
    def of(cls, entries: Tensor) -> NoiseEntries:
        """Return the distribution of measured entries (N,), with its far tail."""
        found = entries.detach().double().abs().cpu().numpy()
        ranked = np.sort(found[found > 0])[::-1]
        top = min(LARGEST, len(ranked) // 2)
        sizes, counts = _grouped(ranked)
        seen = sizes, counts / len(found)
        if top:
            excess = float(ranked[:top].mean() - ranked[top]) * (1 + ERRORS / math.sqrt(top))
            beyond = top * HALVING ** -np.arange(
                math.ceil(math.log(top / BEYOND, HALVING)) + 1.0
            )  # (J,) entries beyond each edge
            far = ranked[top] + excess * (np.log(top / beyond) + 1 - math.log(HALVING) / (HALVING - 1))
            sizes, counts = _longer(ranked, far, np.append(-np.diff(beyond), beyond[-1]), top)
        counts = counts * (1 + ERRORS * math.sqrt(max(0.0, 1 / max(1, len(ranked)) - 1 / len(found))))
        sizes, counts = np.append(sizes, 0.0), np.append(counts, max(0.0, len(found) - counts.sum()))
        return cls(sizes, counts / counts.sum(), *seen)

    @cached_property
    def deviation(self) -> float:
        """Standard deviation of an entry."""
        return math.sqrt(float(self.shares @ self.sizes**2))

    @cached_property
    def proxy(self) -> float:
        """Least s^2 with K(u) <= s^2 u^2 / 2 at all u.

        A normal entry of this variance has larger tails.

        It is the variance itself where it is nearly that.
        """
        at, value, *_ = self._table
        variance = float(self.seen_shares @ self.seen**2)
        if not variance or _proxy(at, _cumulants(at, self.seen, self.seen_shares)) <= NORMAL * variance:
            return variance
        return max(variance, _proxy(at, value))

    @cached_property
    def _table(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Points u (POINTS,), K(u), K'(u), K''(u) and the largest atom.

        The points are evenly spaced in the square root of u. The atom is the logarithm of the probability of the likeliest value of an entry whose
        distribution is tilted by exp(u x).
        """
        at = np.linspace(0.0, 1.0, POINTS) ** 2 * FARTHEST / max(self.deviation, 1e-300)
        by = np.outer(at, self.sizes)
        top = by.max(axis=1, keepdims=True)
        up, down = (self.shares * np.exp(sign * by - top) / 2 for sign in (1, -1))
        whole = (up + down).sum(axis=1)
        first, second = (up - down) @ self.sizes / whole, (up + down) @ self.sizes**2 / whole
        atom = np.maximum((up + down * (self.sizes == 0)).max(axis=1), down.max(axis=1)) / whole
        return at, np.log(whole) + top[:, 0], first, second - first**2, np.log(atom.clip(1e-300))

    def surprise(self, values: np.ndarray, directions: np.ndarray) -> np.ndarray:
        """Return minus the logarithms of the chances that sums of noise exceed values.

        The sum of row n is that of D entries, each times its weight. Its tail is the saddlepoint approximation of Lugannani and Rice 1980, which is exact for
        normal entries. It takes sums as continuous. If few entries are more than 0, or one weight is far larger than the others, a sum has single likely values:
        the tilted sum has one of them with about the product of the atoms of its entries. This share of the tail counts by Chernoff's bound.

        Args:
            values: (n,).
            directions: (n, D) weights.

        Returns:
            (n,) float64; log(2) for values of 0 and below.
        """
        if not len(values):
            return np.zeros(0)
        at, value, first, second, atom = self._table
        weights = np.abs(directions)
        last = at[-1] / weights.max(axis=1).clip(1e-300)  # (n,) where the table ends
        low, high = np.zeros(len(values)), last.copy()
        for _ in range(ROUNDS):
            middle = (low + high) / 2
            reached = (weights * np.interp(middle[:, None] * weights, at, first)).sum(axis=1)
            low, high = np.where(reached < values, middle, low), np.where(reached < values, high, middle)
        inner = low[:, None] * weights
        chernoff = low * values - np.interp(inner, at, value).sum(axis=1)  # (n,) K* at the saddle point
        variance = (weights**2 * np.interp(inner, at, second)).sum(axis=1)
        root = np.sqrt(2 * chernoff.clip(1e-12))
        scaled = low * np.sqrt(variance.clip(1e-300))
        mills = special.erfcx(root / math.sqrt(2)) * math.sqrt(math.pi / 2)
        inside = mills + 1 / scaled.clip(1e-300) - 1 / root
        exact = root**2 / 2 - np.log(inside.clip(1e-300) / math.sqrt(2 * math.pi))
        usable = (inside > 0) & (high < last) & (root > 1e-3)
        single = np.interp(inner, at, atom).sum(axis=1)  # (n,) logarithms of the likeliest value's probability
        smooth = np.log1p(-np.exp(single.clip(None, -1e-12))) - np.maximum(exact - chernoff, 0.0)
        mixed = chernoff - np.logaddexp(single, smooth)
        return np.where(values > 0, np.where(usable, mixed, chernoff).clip(math.log(2)), math.log(2))


def _proxy(at: np.ndarray, values: np.ndarray) -> float:
    """Return the largest 2 K(u) / u^2.

    Args:
        at: (n,) points u, of which the first is 0.
        values: (n,) K(u).
    """
    return float((2 * values[1:] / at[1:] ** 2).max(initial=0.0))


def _cumulants(at: np.ndarray, sizes: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return (n,) K(u).

    Args:
        at: (n,) points u.
        sizes: (J,) of groups of equal entries.
        shares: (J,) of all entries; the other entries are 0.
    """
    by = np.outer(at, sizes)
    top = by.max(axis=1, keepdims=True)
    whole = ((np.exp(by - top) + np.exp(-by - top)) / 2) @ shares + (1 - shares.sum()) * np.exp(-top[:, 0])
    found: np.ndarray = np.log(whole) + top[:, 0]
    return found


def _grouped(ranked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return sizes (J,) and numbers (J,) of descending magnitudes (n,).

    A few levels stay as they are. Groups of others keep the mean square, and are finer towards the largest.
    """
    levels, counts = np.unique(ranked[:: max(1, len(ranked) // SAMPLED)], return_counts=True)
    if len(levels) <= LEVELS:
        levels, counts = np.unique(ranked, return_counts=True)
        return levels, counts.astype(float)
    ends = np.unique(np.minimum(np.ceil(GROWTH ** np.arange(400)), len(ranked)).astype(int))  # 1, 2, 3, ... n
    starts = np.concatenate([[0], ends[:-1]])
    return np.sqrt(np.add.reduceat(ranked**2, starts) / (ends - starts)), (ends - starts).astype(float)


def _longer(ranked: np.ndarray, far: np.ndarray, counts: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """Return sizes and numbers of magnitudes with the longer tail.

    It is either the seen or the continued one.

    Args:
        ranked: (n,) magnitudes, descending.
        far: (J,) ascending sizes of groups of the continued tail.
        counts: (J,) numbers of the groups.
        top: the number of largest magnitudes that the tail continues.
    """
    rest, numbers = _grouped(ranked[top:])
    ranks = (counts[::-1].cumsum() - counts[::-1] / 2)[
        ::-1
    ]  # (J,) middle rank of each group; below 1 beyond the largest one
    seen = np.interp(ranks, np.arange(top) + 0.5, ranked[:top])
    return np.concatenate([np.maximum(far, seen), rest]), np.concatenate([counts, numbers])
