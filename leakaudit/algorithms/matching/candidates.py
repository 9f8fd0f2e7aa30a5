"""Candidate batches: the unknowns of a search.

Letters: N candidates, B sequences, T tokens, D hidden size, C classes, P entries of dropout masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Candidate(NamedTuple):
    """N candidate batches, as the values that a search optimises."""

    embeddings: Tensor
    """(N, B, T, D), T the longest length."""
    label_logits: Tensor
    """(N, ...) logits of soft labels, in the shape that `Labels` says: (N, B, C) of classes, unused if labels are granted;
    (N, B, T, V) of the token at each place, if a language model's labels are optimised."""
    masks: Tensor
    """(N, P) dropout masks in [0, 1], in the order of `MaskLayout`. P = 0 if dropout is not modelled."""

    def take(self, rows: Tensor | Sequence[int] | slice) -> Candidate:
        """Return some of the candidates."""
        return Candidate(*(part[rows] for part in self))

    def detached(self) -> Candidate:
        """Return a copy without its autograd graph."""
        return Candidate(*(part.detach().clone() for part in self))

    def in_orders(self, row: int, orders: Tensor) -> Candidate:
        """Return the only candidate once for each order of one of its sequences.

        Dropout masks stay where they are.

        Args:
            row: the sequence.
            orders: (N, length) the place from which the token at each place comes.
        """
        embeddings = _in_orders(self.embeddings, row, orders)
        per_token = self.label_logits.dim() == 4
        logits = (
            _in_orders(self.label_logits, row, orders)
            if per_token
            else self.label_logits.expand(len(orders), *self.label_logits.shape[1:])
        )
        return Candidate(embeddings, logits, self.masks.expand(len(orders), -1))


def _in_orders(values: Tensor, row: int, orders: Tensor) -> Tensor:
    """Return (N, B, T, ...) one candidate's values with a sequence in each order."""
    found = values.repeat(len(orders), *[1] * (values.dim() - 1))
    found[:, row, : orders.shape[1]] = values[0, row][orders]
    return found


def joined(parts: Sequence[Candidate]) -> Candidate:
    """Return the candidates of all parts together."""
    return Candidate(*(torch.cat(each) for each in zip(*parts, strict=True)))
