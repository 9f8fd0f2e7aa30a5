"""Comparison of an observed and a recomputed update, by sums over their entries."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from leakaudit.client.observation import check_finite

Update = Mapping[str, Tensor]
"""Parameter name -> tensor of the parameter's shape."""

PIECE = 1 << 20
"""Number of entries that are compared at a time.

Our choice: their float64 copies take a few megabytes, however large the model is.
"""


def relative_error(observed: Update, recomputed: Update) -> float:
    """Return ||observed - recomputed|| / ||recomputed|| over all entries.

    It is infinite if the recomputed update is zero.

    Raises:
        NonFiniteUpdateError: the recomputed update is not finite.
    """
    return UpdateComparison.of(observed, recomputed).error


def error_up_to_a_factor(observed: Update, recomputed: Update) -> float:
    """Return ||observed - k recomputed|| / (k ||recomputed||) for the best factor k.

    It is infinite if k is not above zero.

    Raises:
        NonFiniteUpdateError: the recomputed update is not finite.
    """
    found = UpdateComparison.of(observed, recomputed)
    return found.scaled_error if found.scale > 0 else float("inf")


@dataclass(frozen=True)
class Moments:
    """Sums over the entries of a vector."""

    entries: int
    total: float
    """Sum of the entries."""
    squares: float
    """Sum of their squares."""

    @property
    def norm(self) -> float:
        """L2 norm of the vector."""
        return math.sqrt(self.squares)

    @property
    def std(self) -> float:
        """Standard deviation of the entries, with n - 1 in the denominator.

        It is 0 for a single entry.
        """
        spread = self.squares - self.total**2 / max(1, self.entries)
        return math.sqrt(max(0.0, spread) / max(1, self.entries - 1))


@dataclass(frozen=True)
class UpdateComparison:
    """An observed and a recomputed update with the sums that compare them.

    The sums are in float64, and neither update is copied.
    """

    seen: Update
    """The observed update."""
    own: Update
    """The recomputed update."""
    entries: int
    seen_norm: float
    norm: float
    """L2 norm of the recomputed update."""
    product: float
    """<seen, own>."""
    difference: Moments
    """Sums over the entries of seen - own."""

    @classmethod
    def of(cls, observed: Update, recomputed: Update) -> UpdateComparison:
        """Compare two updates.

        Args:
            observed: holds at least the parameters of `recomputed`.
            recomputed: the update whose parameters are compared.

        Raises:
            NonFiniteUpdateError: the recomputed update is not finite.
        """
        check_finite(recomputed)
        sums = [0.0] * 5
        for seen, own in pieces(observed, recomputed):
            left = seen - own
            found = torch.stack([seen @ seen, own @ own, seen @ own, left.sum(), left @ left]).tolist()
            sums = [total + more for total, more in zip(sums, found, strict=True)]
        entries = sum(tensor.numel() for tensor in recomputed.values())
        return cls(
            seen=observed,
            own=recomputed,
            entries=entries,
            seen_norm=math.sqrt(sums[0]),
            norm=math.sqrt(sums[1]),
            product=sums[2],
            difference=Moments(entries, sums[3], sums[4]),
        )

    @property
    def error(self) -> float:
        """||seen - own|| / ||own||; infinite where own is zero."""
        return self.difference.norm / self.norm if self.norm else float("inf")

    @property
    def scale(self) -> float:
        """Least-squares factor k = <seen, own> / <own, own>; 0 where own is zero."""
        return self.product / self.norm**2 if self.norm else 0.0

    @cached_property
    def scaled_difference(self) -> Moments:
        """Moments of seen - k own, computed from the entries.

        The other sums would give the same moments, but with a relative error of 1e-8 in the squares.
        """
        total = squares = 0.0
        for seen, own in pieces(self.seen, self.own):
            left = seen - self.scale * own
            total, squares = total + float(left.sum()), squares + float(left @ left)
        return Moments(self.entries, total, squares)

    @property
    def scaled_error(self) -> float:
        """||seen - k own|| / (|k| ||own||); infinite where k is zero."""
        return self.scaled_difference.norm / (abs(self.scale) * self.norm) if self.scale else float("inf")

    @property
    def cosine(self) -> float:
        """Cosine between the two updates; 0 where one of them is zero."""
        length = self.norm * self.seen_norm
        return self.product / length if length else 0.0


def pieces(observed: Update, recomputed: Update) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the entries of both updates in float64, piece by piece.

    A piece is up to `PIECE` entries of one parameter.
    """
    for name, own in recomputed.items():
        both = zip(observed[name].flatten().split(PIECE), own.flatten().split(PIECE), strict=True)
        yield from ((seen.double(), mine.double()) for seen, mine in both)
