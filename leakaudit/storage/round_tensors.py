"""The list of a round's tensors, for another process that says what was sent.

`tensors.json` in the folder of a held round has the names that a client may use, the shapes of what the round trained, and digests of every
other tensor of the model as it was before the round.
"""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from leakaudit.client.facts import DeclaredDefense
from leakaudit.errors import SnapshotError
from leakaudit.files.private_files import write_atomic
from leakaudit.files.strict_json import read_bounded
from leakaudit.storage.digests import NEW, Digest

TENSORS = "tensors.json"

MAX_BYTES = 64 * 1024 * 1024
"""Largest list that is read. Our choice: 100,000 tensors with four names each fit."""

WIRE_TYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Types in which weights are audited as they were sent. Wider ones pass if float32 holds the same numbers."""


class UnmovedTensor(BaseModel):
    """A frozen parameter or a buffer, as it was before a round."""

    model_config = ConfigDict(extra="forbid")

    shape: tuple[int, ...]
    digests: dict[str, str]
    """Type -> digest of the numbers in this type: its own and, of weights, those in which they may be sent."""

    @classmethod
    def of(cls, tensor: Tensor) -> UnmovedTensor:
        """Return what is known of a tensor."""
        types = {tensor.dtype, *(WIRE_TYPES if tensor.is_floating_point() else ())}
        return cls(shape=tuple(tensor.shape), digests={str(t): digest_of_numbers(tensor.to(t)) for t in types})

    def is_same(self, sent: Tensor) -> bool:
        """Return whether a sent tensor holds the same numbers, in its own type."""
        if tuple(sent.shape) != self.shape:
            return False
        if sent.dtype == torch.float64 and str(sent.dtype) not in self.digests:
            if not torch.equal(sent.float().to(sent.dtype), sent):
                return False
            sent = sent.float()
        known = self.digests.get(str(sent.dtype), "")
        return known == digest_of_numbers(sent, known.partition(":")[0] or NEW)


class RoundTensors(BaseModel):
    """What another process has to know of a round to judge what is sent of it."""

    model_config = ConfigDict(extra="forbid")

    trained: dict[str, tuple[int, ...]]
    """Name -> shape of each parameter that the optimizer moves."""
    unmoved: dict[str, UnmovedTensor]
    """Name -> every other tensor, as it was before the round and is after it."""
    known: dict[str, str]
    """Name that a client may use -> name in `trained` or `unmoved`."""
    own: tuple[DeclaredDefense, ...]
    """Declared defences that are in the produced update already."""
    declared: tuple[DeclaredDefense, ...]
    """Declared defences that the sent update goes through after that."""

    def as_before(self, name: str, sent: Tensor, *, differences: bool) -> bool:
        """Return whether a sent tensor is one that the round left as it was.

        Args:
            name: in `unmoved`; others are not.
            sent: its value, or its difference from the one before the round.
            differences: which of both.
        """
        before = self.unmoved.get(name)
        if before is None:
            return False
        if differences:
            return tuple(sent.shape) == before.shape and not bool(sent.any())
        return before.is_same(sent)


def digest_of_numbers(tensor: Tensor, algorithm: str = NEW) -> str:
    """Return the digest of a tensor's numbers; zeros have no sign."""
    digest = Digest(algorithm)
    own = tensor.detach().to("cpu")
    numbers = own + 0 if own.is_floating_point() else own
    digest.update(numbers.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.finish()


def write_round_tensors(folder: Path, tensors: RoundTensors) -> None:
    """Write the list into the folder of a held round.

    Raises:
        SnapshotError: it cannot be written, or the round is held no more.
    """
    try:
        write_atomic(folder / TENSORS, tensors.model_dump_json())
    except OSError as error:
        raise SnapshotError(
            f"{folder / TENSORS}: cannot be written ({error.strerror}), so no other process can send this round"
        ) from None


def read_round_tensors(folder: Path) -> RoundTensors:
    """Read the list of a held round.

    Raises:
        SnapshotError: there is none, or it is damaged.
    """
    try:
        return RoundTensors.model_validate_json(read_bounded(folder / TENSORS, MAX_BYTES))
    except (OSError, ValidationError, ValueError):
        raise SnapshotError(f"{folder / TENSORS}: cannot be read, so nobody knows what the round trained") from None
