"""Marks that let two audits find the steps that they share.

A mark is a keyed hash (HMAC-SHA-256, 64 bits) under a key that outlives the run, unlike the run's own key. Whoever has the key can confirm a guessed
batch, so the key is as private as the data: that of a simulation is the digest of the whole data file, and that of a history of nights
lies beside it, readable by its owner only.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.client.snapshot import Snapshot
from leakaudit.client.truth import Truth

MARK_DIGITS = 16
"""Hex digits of a mark: 64 bits, as in the other keyed hashes of the results."""


@dataclass(frozen=True)
class Marks:
    """The marks of one step."""

    batch: str
    """The same for two steps on the same batch, whatever the model."""
    unit: str
    """The same for two steps on the same batch with the same weights and the same random numbers: the second one is no new evidence."""


@dataclass(frozen=True)
class Pairing:
    """The key of the marks."""

    key: bytes

    @property
    def id(self) -> str:
        """Tells whether two audits have the same key; it does not reveal it."""
        return self._mark(b"pairing")

    def marks_of(self, snapshot: Snapshot) -> Marks:
        """Return the marks of a step."""
        batch = _digest(_batch(snapshot.truth))
        weights = _digest(sorted(snapshot.observation.model.state_dict().items()))
        unit = b"".join((batch, weights, _digest(_random_states(snapshot.truth))))
        return Marks(batch=self._mark(b"batch" + batch), unit=self._mark(b"unit" + unit))

    def mark_of_weights(self, model: nn.Module) -> str:
        """Return the mark of a model's weights."""
        return self._mark(b"weights" + _digest(sorted(model.state_dict().items())))

    def mark_of_files(self, files: Iterable[Path]) -> str:
        """Return the mark of stored weights.

        It is the same whatever a simulation adds to them.

        Raises:
            OSError: a file cannot be read.
        """
        digest = hashlib.sha256()
        for path in files:
            with path.open("rb") as content:
                digest.update(path.name.encode() + hashlib.file_digest(content, "sha256").digest())
        return self._mark(b"files" + digest.digest())

    def mark_of_audit(self, source: str) -> str:
        """Return the mark of an audit.

        Args:
            source: digest of its model, data and options.
        """
        return self._mark(b"audit" + source.encode())

    def _mark(self, content: bytes) -> str:
        return hmac.new(self.key, content, hashlib.sha256).hexdigest()[:MARK_DIGITS]


def _batch(truth: Truth) -> Iterable[tuple[str, Any]]:
    """Yield what the client trained on, by name."""
    for number, batch in enumerate(truth.micro_batches):
        yield from _named(number, "inputs", batch.inputs)
        yield from _named(number, "withheld", batch.withheld_inputs)


def _random_states(truth: Truth) -> Iterable[tuple[str, Any]]:
    for number, batch in enumerate(truth.micro_batches):
        yield from _named(number, "rng", batch.rng)


def _named(number: int, kind: str, tensors: Any) -> Iterable[tuple[str, Any]]:
    return ((f"{kind} {number} {name}", tensors[name]) for name in sorted(tensors))


def _digest(named: Iterable[tuple[str, Any]]) -> bytes:
    digest = hashlib.sha256()
    for name, tensor in named:
        if isinstance(tensor, Tensor):
            digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
            content = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
            digest.update(content.numpy().data)
    return digest.digest()
