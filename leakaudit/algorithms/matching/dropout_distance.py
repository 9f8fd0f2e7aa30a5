"""The distance that dropout alone causes between a batch and its own gradient.

Letters: B sequences, C classes, P entries of dropout masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leakaudit.algorithms.matching.comparison import Comparison
from leakaudit.algorithms.matching.matcher import Matcher


def distances_by_dropout(
    matcher: Matcher,
    tokens: Sequence[Sequence[int]],
    label_logits: Tensor,
    masks: Tensor,
    draws: int,
    rng: torch.Generator,
) -> list[float]:
    """Return the distances that drawn dropout masks alone cause.

    Each is the distance between two gradients of the same guess: with the given masks, and with drawn masks in the place of
    those that are not learned. So it estimates the distance of the true batch from the observed update after the masks were
    learned. The result is empty without dropout. It is also empty if the objective takes noise or pruning into account,
    because the expected distance is then unknown.

    Args:
        matcher: its model and objective.
        tokens: (B,) sequences of token ids.
        label_logits: (B, C).
        masks: (P,) masks of the guess; the learned ones stay the same in all draws.
        draws: number of draws of the other masks.
        rng: draws the masks.
    """
    objective, gradients = matcher.objective, matcher.gradients
    if gradients.masks is None or objective.masked or objective.filled or objective.sigma > 0:
        return []
    own = matcher.token_pairs([tokens], label_logits, masks)
    found = []
    for drawn in matcher.masks.drawn(draws, rng):
        behind = torch.where(matcher.masks.learned > 0, masks, drawn)
        pairs = matcher.token_pairs([tokens], label_logits, behind)
        made = gradients.formed(pairs, 0)
        comparison = Comparison(objective, gradients.matrices, gradients.vectors, made, sum(matcher.lengths))
        found += comparison.losses(own).tolist()
    return found
