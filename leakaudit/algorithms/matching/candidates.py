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
    """(N, B, C) logits of soft labels; unused if labels are granted."""
    masks: Tensor
    """(N, P) dropout masks in [0, 1], in the order of `MaskLayout`. P = 0 if dropout is not modelled."""

    def take(self, rows: Tensor | Sequence[int] | slice) -> Candidate:
        """Return some of the candidates."""
        return Candidate(*(part[rows] for part in self))

    def detached(self) -> Candidate:
        """Return a copy without its autograd graph."""
        return Candidate(*(part.detach().clone() for part in self))


def joined(parts: Sequence[Candidate]) -> Candidate:
    """Return the candidates of all parts together."""
    return Candidate(*(torch.cat(each) for each in zip(*parts, strict=True)))
