"""Rows of a pruned output head that hold more than the softmax's share.

Letters: V tokens, D hidden size, N features.

Magnitude pruning keeps the largest entries: those of the batch's words, and those of words that the model finds likely everywhere. The public
model says what the softmax's share of each row is on texts of its own: its direction, and its size up to a factor. What a row holds beside that
direction, or against it, is compared with that size. (Own derivation.)
"""

from __future__ import annotations

import torch
from torch import Tensor

MORE = 1.0
"""Least ratio of what is beside the direction to the size of the softmax's share at which a token is named.
Chosen on training texts: at most 0.9 for rows without a token of the batch. The shares of frequent words are too large for this test."""

ALONG, ENTRIES = 0.3, 10
"""Largest cosine with the softmax's share at which a token is named, and the least number of entries left for that.
Chosen on training texts: rows without a token of the batch have 0.6 or more, except where a few entries are left."""


def left_over(rows: Tensor, features: Tensor, probabilities: Tensor) -> Tensor:
    """Return (V,) how much more a row holds than the softmax's share.

    Args:
        rows: (V, D) pruned update of the head.
        features: (N, D) float64 inputs of the head on other texts.
        probabilities: (N, V) of the next token there.

    Returns:
        (V,) float64: natural logarithm of the ratio over `MORE`, or of `ALONG` over the cosine, whichever says more; minus infinity for a row of
        zeros. A token is named above 0.
    """
    shares = probabilities.double().T @ features / len(features)  # (V, D)
    size = shares.norm(dim=1).clamp_min(1e-300)
    given = rows.double()
    left, length = (given != 0), given.norm(dim=1)
    there = shares * left
    along = ((given * there).sum(dim=1) / there.norm(dim=1).clamp_min(1e-300)).clamp_min(0.0)  # (V,)
    beside = (length.square() - along.square()).clamp_min(0.0).sqrt()
    turned = torch.where(left.sum(dim=1) >= ENTRIES, ALONG * length / along.clamp_min(1e-300), torch.zeros_like(along))
    return torch.log(torch.maximum(beside / size / MORE, turned))
