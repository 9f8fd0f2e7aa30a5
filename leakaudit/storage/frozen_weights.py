"""Weights that training does not change, and checks that find a change.

The training thread reads marks and a sample of them at each kept step, and all their bytes at the first one only. Whoever writes the step
reads all bytes again (`FrozenWeights.check`). `docs/decisions/digests.md` says which changes are found, and which are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from leakaudit.errors import SnapshotError
from leakaudit.models.quantised_layers import QuantisedLayer
from leakaudit.storage.safetensors_stream import MadeLater

SAMPLE = 256
"""Words of a tensor in its sample, up to twice as many. Our choice: 5 ms of a step for 200 tensors, nearly all of it to fetch each word."""

RUN = 63
"""Words that a checksum adds before it mixes them. Our choice: mixing costs little beside reading, and the sum changes if all signs do,
because the number is odd."""

CHUNK = 520 * RUN
"""Words that one operation of the writer's thread reads. Torch shares operations on 32768 numbers or more among all its threads, which the
training needs."""

PIECE = 64 * CHUNK
"""Words whose sums of runs are held at once, 256 kB of memory."""

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Types of words, the widest first; a tensor is read in the first that fits its size and place."""


@dataclass(frozen=True)
class Mark:
    """What is known of a tensor without reading it."""

    place: int
    """Address of its memory."""
    version: int
    """PyTorch's count of the operations that wrote to it; writes through `.data` are not counted."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Mark:
        """Return the mark of a tensor."""
        return cls(tensor.data_ptr(), tensor._version, tensor.dtype, tuple(tensor.shape), tensor.stride())


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """What tells whether a tensor was written."""

    mark: Mark
    sample: Tensor
    """(S,) words of it, on its device."""
    checksum: Tensor
    """() int64 of all its bytes, on its device; see `checksum_of`."""

    @classmethod
    def of(cls, tensor: Tensor) -> Fingerprint:
        """Return the fingerprint of a tensor; nobody waits for its device."""
        return cls(Mark.of(tensor), sample_of(tensor), checksum_of(tensor))

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether a tensor still has these bytes at this place.

        All bytes are read by one thread. The mark is read last, so a counted write meanwhile is found.
        """
        return torch.equal(self.checksum, checksum_of(tensor, one_thread=True)) and self.mark == Mark.of(tensor)


@dataclass(frozen=True)
class FrozenWeights:
    """Live parameters that no optimizer changes, at one step."""

    tensors: Mapping[str, Tensor]
    """Name -> parameter: references, not copies, on their own devices."""
    fingerprints: Mapping[str, Fingerprint]
    """Name -> fingerprint at the first kept step."""
    samples: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> (S,) sample at this step of each parameter on a GPU, for which the training thread does not wait."""
    changed: set[str] = field(default_factory=set)
    """Names of parameters that `check` found to be changed. All later steps share it."""
    quantised: Mapping[str, QuantisedLayer] = field(default_factory=dict)
    """Name -> layer that stores its matrix in few bits. `tensors` has its packed numbers; its matrix is stored in their place."""

    @classmethod
    def of(
        cls, parameters: Iterable[tuple[str, Tensor]], quantised: Mapping[str, QuantisedLayer] | None = None
    ) -> FrozenWeights:
        """Take the fingerprints of parameters.

        Sharded tensors, tensors with gaps between their entries, and other special kinds are left out.

        Args:
            parameters: name and tensor of each, the packed numbers of quantised layers among them.
            quantised: name -> quantised layer.
        """
        tensors = {
            name: p.detach()
            for name, p in parameters
            if type(p.data) is Tensor and not (p.is_sparse or p.is_inference()) and _in_order(p).is_contiguous()
        }
        fingerprints = {name: Fingerprint.of(tensor) for name, tensor in tensors.items()}
        return cls(tensors, fingerprints, quantised=quantised or {})

    def still_in(self, parameters: Iterable[tuple[str, Tensor]]) -> FrozenWeights:
        """Return the part of these weights that seems to be the same at a later step.

        Only marks and samples are read; `check` reads the rest.
        """
        tensors: dict[str, Tensor] = {}
        samples: dict[str, Tensor] = {}
        for name, parameter in parameters:
            found = self.fingerprints.get(name)
            if found is None or name in self.changed or found.mark != Mark.of(parameter):
                continue
            sample = sample_of(parameter)
            if sample.device.type != "cpu":
                samples[name] = sample
            elif not torch.equal(sample, found.sample):
                continue
            tensors[name] = parameter.detach()
        fingerprints = {name: self.fingerprints[name] for name in tensors}
        return FrozenWeights(tensors, fingerprints, samples, self.changed, self.quantised)

    def to_store(self) -> dict[str, tuple[Tensor | MadeLater, int]]:
        """Return each tensor that a snapshot holds, with a checksum of what it is made of.

        Matrices of quantised layers are made one at a time, when they are written.
        """
        packed = {name for layer in self.quantised.values() for name in layer.packed}
        found: dict[str, tuple[Tensor | MadeLater, int]] = {
            name: (tensor, int(self.fingerprints[name].checksum))
            for name, tensor in self.tensors.items()
            if name not in packed
        }
        for name, layer in self.quantised.items():
            parts = tuple(int(self.fingerprints[part].checksum) for part in sorted(layer.packed))
            found[f"{name}.weight"] = (MadeLater(layer.dtype, layer.shape, layer.matrix), hash(parts))
        return found

    def and_copy(self, name: str, tensor: Tensor) -> FrozenWeights:
        """Return these weights and a copy of one more, which cannot change."""
        fingerprints = {**self.fingerprints, name: Fingerprint.of(tensor)}
        return replace(self, tensors={**self.tensors, name: tensor}, fingerprints=fingerprints)

    def without(self, names: frozenset[str]) -> FrozenWeights:
        """Return these weights without some of them."""
        left = {name: tensor for name, tensor in self.tensors.items() if name not in names}
        return replace(self, tensors=left, fingerprints={name: self.fingerprints[name] for name in left})

    def is_unchanged(self, name: str) -> bool:
        """Return whether a weight has all its bytes, and had its sample at this step."""
        found = self.fingerprints[name]
        return torch.equal(self.samples.get(name, found.sample), found.sample) and found.is_of(self.tensors[name])

    def check(self) -> None:
        """Refuse weights that do not have the bytes of the first kept step.

        Nobody knows whether they were changed before the step or after it. Data that was read in the meantime may be partly old and
        partly new.

        Raises:
            SnapshotError: a weight was changed. The message names the first.
        """
        changed = [name for name in self.tensors if not self.is_unchanged(name)]
        self.changed.update(changed)
        if changed:
            raise SnapshotError(
                f"{changed[0]!r} is in no optimizer, but it was changed before the step was written ({len(changed)} such parameters), and it "
                "is not known whether the step saw the change; the next step that is kept holds its own copy"
            )

    @property
    def bytes(self) -> int:
        """Size of what a snapshot holds of them, in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor, _ in self.to_store().values())


def changed_rows(now: Tensor, before: Tensor) -> Tensor:
    """Return the indices (R,) of the rows of a table (V, D) whose bits differ."""
    return (now.view(torch.uint8) != before.view(torch.uint8)).any(dim=1).nonzero().flatten()


def sample_of(tensor: Tensor) -> Tensor:
    """Return a copy (S,) of every n-th word of a tensor.

    n is odd, so that a matrix whose rows are a power of two long is sampled in all columns.
    """
    words = _words(tensor)
    return words[:: (len(words) // SAMPLE) | 1].clone()


def checksum_of(tensor: Tensor, *, one_thread: bool = False) -> Tensor:
    """Return a checksum () int64 of all bytes of a tensor, on its device.

    Runs of 63 words are added modulo 2^64, and the sums are mixed with their places. So it changes if runs trade places, and if any one
    word changes. It may stay if several words of one run change such that their sum does not: two words trade places, or two signs flip.

    Args:
        tensor: without gaps between its entries.
        one_thread: whether only the calling thread computes, on a CPU.
    """
    chunk = CHUNK if one_thread and tensor.device.type == "cpu" else PIECE
    return _mixed(torch.stack([_mixed(_runs(piece, chunk)) for piece in _words(tensor).split(PIECE)]))


def _runs(words: Tensor, chunk: int) -> Tensor:
    """Return the sum of each run of words, and of what is left after the last.

    Args:
        words: (W,) words.
        chunk: words that one operation reads, a multiple of `RUN`.
    """
    whole = len(words) - len(words) % RUN
    sums = [part.view(-1, RUN).sum(dim=1, dtype=torch.int64) for part in words[:whole].split(chunk) if len(part)]
    return torch.cat([*sums, words[whole:].sum(dtype=torch.int64).reshape(1)])


def _mixed(values: Tensor) -> Tensor:
    """Return one number () that changes if one of numbers (N,) does.

    If several do, or if they trade places, it stays the same as rarely as a random number.
    """
    mixed = values
    for _ in range(
        2
    ):  # one round would leave a changed highest bit in two bits, and such changes of many numbers may cancel
        mixed = mixed * 0x9E3779B97F4A7C1  # odd, and about 2^60 divided by the golden ratio, as in Fibonacci hashing
        mixed = mixed ^ ((mixed >> 32) & 0xFFFFFFFF)  # shifted without the sign, so no two numbers become one
    return (mixed * torch.arange(1, 2 * len(values), 2, device=values.device)).sum()


def _words(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as integers (W,), of the widest type that fits."""
    data = _in_order(tensor).view(-1).view(torch.uint8)
    fits = (t for t in WORDS if len(data) % t.itemsize == 0 and data.storage_offset() % t.itemsize == 0)
    return data.view(next(fits))


def _in_order(tensor: Tensor) -> Tensor:
    """Return a view of a tensor with its dimensions in the order of its memory."""
    found = tensor.detach()
    return found.permute(sorted(range(found.dim()), key=found.stride, reverse=True))
