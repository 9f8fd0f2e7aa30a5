"""Remembers a few entries of tensors, to see a change of them.

A copy of everything is not needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ENTRIES = 32
"""Entries that are remembered of each tensor, at equal distances. Our choice: noise and clipping change all of them, and reading them
takes microseconds. A change of single rows of an embedding table may be missed by them, and is seen by the version of the tensor."""


@dataclass(frozen=True)
class Witness:
    """A few entries of some tensors at one moment.

    It also tells whether a tensor was replaced or written to.
    """

    places: tuple[tuple[int, int, int], ...]
    """Of each tensor: identity of the object, version counter, address of its memory; zeros where there was no tensor."""
    entries: tuple[Tensor | None, ...]
    """Of each tensor: at most `ENTRIES` entries, on its device and in its dtype."""

    @classmethod
    def of(cls, tensors: Iterable[Tensor | None]) -> Witness:
        """Remember some tensors; None stands for one that is missing.

        A gradient that was not computed is missing.
        """
        held = list(tensors)
        entries = (None if tensor is None else few_entries(own_part(tensor)).clone() for tensor in held)
        return cls(tuple(map(_place, held)), tuple(entries))

    def touched(self, tensors: Sequence[Tensor | None]) -> list[int]:
        """Return the positions of tensors that were replaced or written to.

        Tensors that changed since count, too; they are given in the same order.
        """
        moved = {number for number, tensor in enumerate(tensors) if _place(tensor) != self.places[number]}
        return sorted(moved.union(self.changed(tensors)))

    def changed(self, tensors: Sequence[Tensor | None]) -> list[int]:
        """Return the positions of the tensors whose entries have changed.

        Tensors that came or went count, too.
        """
        now = [None if tensor is None else few_entries(own_part(tensor)) for tensor in tensors]
        if _all_equal(now, self.entries):
            return []
        return [number for number, pair in enumerate(zip(now, self.entries, strict=True)) if not _same(*pair)]

    def equals(self, other: Witness) -> bool:
        """Return whether the same tensors had the same entries at another moment."""
        return len(self.entries) == len(other.entries) and _all_equal(self.entries, other.entries)


def own_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds.

    So looking at it is no collective; of a sparse one it is the values.
    """
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part.coalesce().values() if part.is_sparse else part


def few_entries(tensor: Tensor, most: int = ENTRIES) -> Tensor:
    """Return at most `most` entries of a tensor, at equal distances.

    They are a view if the tensor is contiguous.
    """
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // most)][:most]


def _place(tensor: Tensor | None) -> tuple[int, int, int]:
    if tensor is None:
        return (0, 0, 0)
    part = getattr(tensor, "_local_tensor", tensor)
    return id(tensor), part._version, 0 if part.is_sparse else part.data_ptr()


def _all_equal(now: Sequence[Tensor | None], before: Sequence[Tensor | None]) -> bool:
    """Compare all entries at once, with one wait for a GPU.

    False means that this cannot be done.
    """
    if [t is None or (t.device, t.shape) for t in now] != [t is None or (t.device, t.shape) for t in before]:
        return False
    here = [t for t in now if t is not None]
    if len({t.device for t in here}) != 1:
        return not here
    return torch.equal(torch.cat(here), torch.cat([t for t in before if t is not None]))


def _same(now: Tensor | None, before: Tensor | None) -> bool:
    """Return whether a tensor still has its remembered entries.

    NaN equals NaN.
    """
    if now is None or before is None:
        return now is None and before is None
    return now.shape == before.shape and torch.allclose(now, before, rtol=0.0, atol=0.0, equal_nan=True)
