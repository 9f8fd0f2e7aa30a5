"""Weights that training does not change, and checks that find a change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.errors import SnapshotError


@dataclass(frozen=True)
class Fingerprint:
    """Numbers of a tensor that change if it is written."""

    place: int
    """Address of its memory."""
    version: int
    """PyTorch's count of the operations that wrote to it; writes through `.data` are not counted."""
    checksum: int
    """Sum of its bytes, eight at a time, modulo 2^64. The probability that other values have the same sum is 2^-64."""

    @classmethod
    def of(cls, tensor: Tensor) -> Fingerprint:
        """Return the fingerprint of a tensor, computed on its own device."""
        return cls(tensor.data_ptr(), tensor._version, _checksum(tensor))


@dataclass(frozen=True)
class FrozenWeights:
    """Live parameters that no optimizer changes, at one step."""

    tensors: Mapping[str, Tensor]
    """Name -> parameter: references, not copies, on their own devices."""
    fingerprints: Mapping[str, Fingerprint]
    """Name -> fingerprint at that step."""

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, Tensor]]) -> FrozenWeights:
        """Take the fingerprints of parameters.

        Sharded tensors and other special kinds are left out.
        """
        tensors = {
            name: p.detach()
            for name, p in parameters
            if type(p.data) is Tensor and not (p.is_sparse or p.is_inference())
        }
        return cls(tensors, {name: Fingerprint.of(tensor) for name, tensor in tensors.items()})

    def unchanged_in(self, later: FrozenWeights) -> FrozenWeights:
        """Return the part of these weights that is still the same in `later`."""
        names = [name for name, found in self.fingerprints.items() if later.fingerprints.get(name) == found]
        return FrozenWeights({n: later.tensors[n] for n in names}, {n: self.fingerprints[n] for n in names})

    def and_copy(self, name: str, tensor: Tensor) -> FrozenWeights:
        """Return these weights and a copy of one more, which cannot change."""
        return FrozenWeights({**self.tensors, name: tensor}, {**self.fingerprints, name: Fingerprint.of(tensor)})

    def without(self, names: frozenset[str]) -> FrozenWeights:
        """Return these weights without some of them."""
        left = {name: tensor for name, tensor in self.tensors.items() if name not in names}
        return FrozenWeights(left, {name: self.fingerprints[name] for name in left})

    def check(self) -> None:
        """Refuse weights that were changed since the step.

        Data that was read in the meantime may be partly old and partly new.

        Raises:
            SnapshotError: a weight was changed. The message names the first.
        """
        changed = [name for name, tensor in self.tensors.items() if Fingerprint.of(tensor) != self.fingerprints[name]]
        if changed:
            raise SnapshotError(
                f"{changed[0]!r} is in no optimizer, but it was changed while it was being written ({len(changed)} such parameters); "
                "the next step that is kept holds its own copy"
            )

    @property
    def bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def changed_rows(now: Tensor, before: Tensor) -> Tensor:
    """Return the indices (R,) of the rows of a table (V, D) whose bits differ."""
    return (now.view(torch.uint8) != before.view(torch.uint8)).any(dim=1).nonzero().flatten()


def _checksum(tensor: Tensor) -> int:
    """Return the sum of a tensor's bytes, eight at a time, modulo 2^64."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = len(data) - len(data) % 8
    if whole and data.storage_offset() % 8 == 0:
        return int(data[:whole].view(torch.int64).sum() + data[whole:].sum(dtype=torch.int64))
    return int(data.sum(dtype=torch.int64))
