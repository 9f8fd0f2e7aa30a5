"""Dropout masks as unknowns of the search.

GRAB (Feng et al., CCS 2024, Sec. 4.3) learns the masks of a client's step together with its embeddings. One pass in
training mode finds every dropout of the model. For each candidate, all masks are stored in one row
of unknowns, and later passes read their masks from that row.

Letters: N candidates, B sequences, T tokens of a sequence, P mask entries of a candidate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from leakaudit.algorithms.matching.permutations import Permutation


class Drop(NamedTuple):
    """One dropout of a forward pass, for sequences of one length."""

    rate: float
    """p: the share of entries that is dropped. Kept entries are divided by 1 - p."""
    shape: tuple[int, ...]
    """Shape of one sequence's mask."""
    places: tuple[int, ...]
    """The dimensions of `shape` that run over the tokens."""

    @property
    def size(self) -> int:
        """Number of entries of one sequence's mask."""
        return math.prod(self.shape)


class MaskLayout:
    """The position of each mask of a batch among P unknowns.

    The masks are sorted by length, then by dropout, then by sequence.
    """

    def __init__(self, drops: Mapping[int, Sequence[Drop]], groups: Sequence[tuple[Sequence[int], int]]) -> None:
        """Assign a range of entries to each mask.

        Args:
            drops: length -> the dropouts of a pass over sequences of that length.
            groups: (sequences, length) as they run together.
        """
        self._groups = {tuple(rows): tuple(drops[length]) for rows, length in groups}
        self._starts: dict[tuple[int, ...], int] = {}
        self.entries = 0
        """P."""
        rates = []
        for rows, dropouts in self._groups.items():
            self._starts[rows] = self.entries
            for drop in dropouts:
                self.entries += len(rows) * drop.size
                rates.append(torch.full((len(rows) * drop.size,), drop.rate))
        self.rates = torch.cat(rates) if rates else torch.zeros(0)
        """(P,) the rate of each entry's dropout."""

    def of(self, masks: Tensor, rows: Sequence[int]) -> list[Tensor]:
        """Return the masks of a pass over some sequences, (N rows, ...) each.

        They are divided by 1 - p, as dropout does.

        Args:
            masks: (N, P).
            rows: sequences that run together.
        """
        return [
            part.reshape(-1, *drop.shape) / (1 - drop.rate)
            for drop, part in zip(self._groups[tuple(rows)], self._parts(masks, tuple(rows)), strict=True)
        ]

    def of_places(self, places: Sequence[Collection[int]]) -> Tensor:
        """Return (P,) whether an entry belongs to these positions, or to no token.

        For example, a mask between the pooler and the head belongs to no token. An entry of an attention weight belongs to the
        token of the query.

        Args:
            places: the positions of each sequence.
        """
        chosen = torch.zeros(1, self.entries, dtype=torch.bool)
        for rows, dropouts in self._groups.items():
            for drop, part in zip(dropouts, self._parts(chosen, rows), strict=True):
                for row, own in zip(rows, part.view(len(rows), *drop.shape), strict=True):
                    if drop.places:
                        own.index_fill_(drop.places[0], torch.tensor(sorted(places[row]), dtype=torch.long), value=True)
                    else:
                        own.fill_(value=True)
        return chosen[0]

    def rearranged(self, masks: Tensor, row: int, order: Permutation) -> Tensor:
        """Return the masks after a sequence's tokens and their masks moved.

        Args:
            masks: (N, P).
            row: the sequence.
            order: the position from which the token at each position comes.
        """
        moved = masks.clone()
        index = torch.tensor(order, device=masks.device)
        for rows, dropouts in self._groups.items():
            if row not in rows:
                continue
            for drop, part in zip(dropouts, self._parts(moved, rows), strict=True):
                own = part.view(len(masks), len(rows), *drop.shape)[:, rows.index(row)]  # (N, ...): writes into `moved`
                new = own
                for place in drop.places:
                    new = new.index_select(1 + place, index)
                own.copy_(new.clone())
        return moved

    def _parts(self, masks: Tensor, rows: tuple[int, ...]) -> Iterator[Tensor]:
        start = self._starts[rows]
        for drop in self._groups[rows]:
            yield masks[:, start : start + len(rows) * drop.size]
            start += len(rows) * drop.size


def layout_of(
    model: nn.Module, groups: Sequence[tuple[Sequence[int], int]], run: Callable[[int], object]
) -> MaskLayout | None:
    """Find the dropouts of a model by running it.

    Args:
        model: in any mode, which is restored.
        groups: (sequences, length) as they will run together.
        run: function that runs the model on one sequence of a given length.

    Returns:
        The layout; None if there is no dropout, or if passes of different lengths have different numbers of dropouts.
    """
    drops: dict[int, list[Drop]] = {}
    for _, length in groups:
        here, other_length = _drops(model, run, length), _drops(model, run, length - 1 if length > 2 else length + 1)
        if len(here) != len(other_length):
            return None
        drops[length] = [
            Drop(rate, shape, tuple(n for n, (one, two) in enumerate(zip(shape, other, strict=True)) if one != two))
            for (rate, shape), (_, other) in zip(here, other_length, strict=True)
        ]
    return MaskLayout(drops, groups) if any(drops.values()) else None


def _drops(model: nn.Module, run: Callable[[int], object], length: int) -> list[tuple[float, tuple[int, ...]]]:
    """Return rate and shape of every dropout of one sequence's pass."""
    found: list[tuple[float, tuple[int, ...]]] = []

    def note(_number: int, given: Tensor, rate: float) -> Tensor:
        found.append((rate, tuple(given.shape[1:])))
        return given

    with torch.no_grad(), dropping(model, note):
        run(length)
    return found


@contextmanager
def dropping(model: nn.Module, drop: Callable[[int, Tensor, float], Tensor]) -> Iterator[None]:
    """Run a model in training mode, with `drop` instead of its dropouts.

    Args:
        model: the model; its dropouts may be modules or calls of `torch.nn.functional.dropout`.
        drop: takes the dropout's number in its pass, its input and its rate, and returns its output.
    """
    before = model.training
    model.train()
    try:
        with _Dropping(drop):
            yield
    finally:
        model.train(before)


def masked_by(masks: Sequence[Tensor]) -> Callable[[int, Tensor, float], Tensor]:
    """Return a function that multiplies each dropout's input by its mask.

    An input without a mask of its shape passes unchanged.
    """

    def drop(number: int, given: Tensor, _rate: float) -> Tensor:
        return given * masks[number] if number < len(masks) and given.shape == masks[number].shape else given

    return drop


class _Dropping(TorchFunctionMode):
    """Replaces every active dropout."""

    def __init__(self, drop: Callable[[int, Tensor, float], Tensor]) -> None:
        super().__init__()
        self._drop = drop
        self._numbers = itertools.count()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace calls of dropout, and make all other calls unchanged."""
        kwargs = kwargs or {}
        if func is functional.dropout:
            given = args[0] if args else kwargs["input"]
            rate = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            training = args[2] if len(args) > 2 else kwargs.get("training", True)
            return self._drop(next(self._numbers), given, rate) if training and rate > 0 else given
        return func(*args, **kwargs)
