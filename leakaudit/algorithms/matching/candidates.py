"""Candidate batches: the unknowns of a search.

Letters: N candidates, B sequences, T tokens, D hidden size, C classes, P entries of dropout masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Candidate(NamedTuple):
    """N candidate batches: what is optimised."""

    embeddings: Tensor
    """(N, B, T, D), T the longest length."""
    label_logits: Tensor
    """(N, B, C) of soft labels; unused where labels are granted."""
    masks: Tensor
    """(N, P) of dropout, in [0, 1], as `MaskLayout` lays them out; P = 0 where dropout is not modelled."""

    def take(self, rows: Tensor | Sequence[int] | slice) -> Candidate:
        """Return some of the candidates."""
        return Candidate(*(part[rows] for part in self))

    def detached(self) -> Candidate:
        """Return a copy without history."""
        return Candidate(*(part.detach().clone() for part in self))


def joined(parts: Sequence[Candidate]) -> Candidate:
    """Return all candidates as one."""
    return Candidate(*(torch.cat(each) for each in zip(*parts, strict=True)))
