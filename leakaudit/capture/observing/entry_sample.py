"""A few remembered entries of tensors, which show changes without a whole copy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.models.tensors import few_entries


@dataclass(frozen=True)
class EntrySample:
    """A few entries of some tensors at one moment.

    The sample also shows whether a tensor was replaced or written to later.
    """

    places: tuple[tuple[int, int, int], ...]
    """For each tensor: identity of the object, version counter, address of its memory; zeros for a missing tensor."""
    entries: tuple[Tensor | None, ...]
    """For each tensor: at most `ENTRIES` entries, on its device and in its dtype."""

    @classmethod
    def of(cls, tensors: Iterable[Tensor | None]) -> EntrySample:
        """Remember some tensors.

        Args:
            tensors: None stands for a missing one, such as a gradient that was not computed.
        """
        held = list(tensors)
        entries = (None if tensor is None else few_entries(own_part(tensor)).clone() for tensor in held)
        return cls(tuple(map(_place, held)), tuple(entries))

    def touched(self, tensors: Sequence[Tensor | None]) -> list[int]:
        """Return the positions of tensors that were replaced, written to or changed since.

        Args:
            tensors: the same tensors in the same order.
        """
        moved = {number for number, tensor in enumerate(tensors) if _place(tensor) != self.places[number]}
        return sorted(moved.union(self.changed(tensors)))

    def changed(self, tensors: Sequence[Tensor | None]) -> list[int]:
        """Return the positions of tensors whose entries changed.

        A tensor that is missing now or was missing then, but not both, counts as changed.

        Args:
            tensors: the same tensors in the same order.
        """
        now = [None if tensor is None else few_entries(own_part(tensor)) for tensor in tensors]
        if _all_equal(now, self.entries):
            return []
        return [number for number, pair in enumerate(zip(now, self.entries, strict=True)) if not _same(*pair)]

    def equals(self, other: EntrySample) -> bool:
        """Return whether the same tensors had the same entries at another moment."""
        return len(self.entries) == len(other.entries) and _all_equal(self.entries, other.entries)


def own_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds.

    This needs no collective operation. For a sparse tensor, the result is its values.
    """
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part.coalesce().values() if part.is_sparse else part


def _place(tensor: Tensor | None) -> tuple[int, int, int]:
    if tensor is None:
        return (0, 0, 0)
    part = getattr(tensor, "_local_tensor", tensor)
    return id(tensor), part._version, 0 if part.is_sparse else part.data_ptr()


def _all_equal(now: Sequence[Tensor | None], before: Sequence[Tensor | None]) -> bool:
    """Return whether all entries are equal, with only one wait for a GPU.

    The result is also False if the entries cannot be compared in one operation.
    """
    if [t is None or (t.device, t.shape) for t in now] != [t is None or (t.device, t.shape) for t in before]:
        return False
    here = [t for t in now if t is not None]
    if len({t.device for t in here}) != 1:
        return not here
    return torch.equal(torch.cat(here), torch.cat([t for t in before if t is not None]))


def _same(now: Tensor | None, before: Tensor | None) -> bool:
    """Return whether a tensor still has its remembered entries; NaN equals NaN."""
    if now is None or before is None:
        return now is None and before is None
    return now.shape == before.shape and torch.allclose(now, before, rtol=0.0, atol=0.0, equal_nan=True)
