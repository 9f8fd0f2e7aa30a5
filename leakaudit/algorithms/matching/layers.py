"""Layers whose gradients are kept as pairs, and records of their passes.

Letters: N candidates, M tokens of a candidate at a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from leakaudit.models.structure.trace import hooked

AGREES = 1e-3
"""Relative error up to which a parameter's gradient from pairs counts as its true gradient. It is tested once on random
input. Our choice: float32 leaves 1e-6, and a layer that does more than W x + b gives a far larger error."""


MOST_ROWS = 4096
"""Most rows of a table that is treated as a linear layer with one-hot inputs. Our choice: enough for position tables, but not
for word tables."""


@dataclass(frozen=True)
class Matrix:
    """A parameter whose gradient is kept as pairs of inputs and output gradients."""

    name: str
    """Parameter name."""
    input_first: bool
    """Whether it is stored as (in, out) and not as (out, in)."""


@dataclass(frozen=True)
class Vector:
    """A parameter whose gradient is formed."""

    name: str
    """Parameter name."""
    gain: bool
    """Whether it is the gain of a normalisation and not a bias."""


@dataclass(frozen=True)
class Layer:
    """A module that owns matrices or vectors."""

    module: nn.Module
    matrix: Matrix | None
    vectors: tuple[Vector, ...]

    @property
    def names(self) -> frozenset[str]:
        """The names of its parameters."""
        vectors = {vector.name for vector in self.vectors}
        return frozenset(vectors if self.matrix is None else {self.matrix.name, *vectors})

    def only(self, names: Collection[str]) -> Self:
        """Return the layer with these parameters only."""
        matrix = self.matrix if self.matrix is not None and self.matrix.name in names else None
        return replace(self, matrix=matrix, vectors=tuple(vector for vector in self.vectors if vector.name in names))


class Record(NamedTuple):
    """Inputs and outputs of a layer in a forward pass, call by call."""

    given: list[Tensor]
    made: list[Tensor]


@contextmanager
def recording(modules: Sequence[nn.Module], candidates: int, running: Callable[[], int]) -> Iterator[list[Record]]:
    """Record inputs and outputs of modules while the block runs.

    A module such as a position table may run only once for all sequences. Its output is then expanded to all rows, so that
    each candidate has a gradient of its own.
    """
    records = [Record([], []) for _ in modules]

    def recorder(record: Record) -> Any:
        def record_call(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], made: Tensor) -> Tensor:
            if made.shape[0] % candidates:
                made = made.expand(running(), *made.shape[1:])
            if torch.is_grad_enabled() and not made.requires_grad:  # a table does not depend on the candidate
                made = made.detach().requires_grad_()
            record.given.append(next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)))
            record.made.append(made)
            return made

        return record_call

    with hooked(
        module.register_forward_hook(recorder(record), with_kwargs=True)
        for module, record in zip(modules, records, strict=True)
    ):
        yield records


def tokens_joined(tensors: Sequence[Tensor], candidates: int) -> Tensor:
    """Return (N, M, features) the tokens of each candidate from all calls."""
    parts = [tensor.reshape(candidates, -1, tensor.shape[-1]) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def layer_inputs(module: nn.Module, record: Record) -> list[Tensor]:
    """Return a layer's inputs, call by call; one-hot rows for a table."""
    if not isinstance(module, nn.Embedding):
        return record.given
    return [
        functional.one_hot(ids.expand(made.shape[:-1]), module.num_embeddings).to(made.dtype)
        for ids, made in zip(record.given, record.made, strict=True)
    ]


def before_gain(module: nn.Module, made: Tensor) -> Tensor:
    """Return the output of a normalisation before gain and shift."""
    gain: Any = module.weight
    shift: Any = getattr(module, "bias", None)
    plain: Tensor = (made if shift is None else made - shift) / gain
    return plain


def matrix_of(name: str, module: nn.Module, record: Record) -> Matrix | None:
    """Return the module's weight as a `Matrix`, or None.

    None unless the module is a linear layer or a small table.
    """
    weight: Any = module.weight
    if isinstance(module, nn.Embedding):
        return Matrix(name, input_first=True) if module.num_embeddings <= MOST_ROWS else None
    given, made = record.given[0], record.made[0]
    if weight.dim() != 2 or not given.is_floating_point():
        return None
    bias: Any = getattr(module, "bias", None)
    plain = made if bias is None else made - bias
    for input_first in (False, True):
        matrix = weight if input_first else weight.T
        fits = matrix.shape == (given.shape[-1], made.shape[-1])
        if fits and float((given @ matrix - plain).abs().max()) <= AGREES * float(plain.abs().max()):
            return Matrix(name, input_first)
    return None


def is_gain(module: nn.Module, record: Record) -> bool:
    """Return whether the module's weight is a gain, as a normalisation's is."""
    weight: Any = module.weight
    return weight.dim() == 1 and record.given[0].shape == record.made[0].shape and bool((weight.abs() > 1e-6).all())
