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
    """Return the distances between a guess and itself behind drawn masks.

    The masks that are learned are known to both. The result estimates the distance at which the true batch is to be
    expected from the observed update, once its masks are learned. It is empty without dropout, and where noise or
    pruning are accounted for as well, because nothing is known then.

    Args:
        matcher: its model and objective.
        tokens: (B,) sequences of token ids.
        label_logits: (B, C).
        masks: (P,) of which the learned ones are kept.
        draws: number of draws of the others.
        rng: draws.
    """
    objective, gradients = matcher.objective, matcher.gradients
    if gradients.masks is None or objective.masked or objective.filled or objective.sigma > 0:
        return []
    certain = matcher.certain(label_logits)[None]
    own = matcher.first_order(matcher.known.placed(matcher.candidates.of_tokens([tokens], certain, masks)))
    found = []
    for drawn in matcher.masks.drawn(draws, rng):
        behind = torch.where(matcher.masks.learned > 0, masks, drawn)
        pairs = matcher.first_order(matcher.known.placed(matcher.candidates.of_tokens([tokens], certain, behind)))
        made = gradients.formed(pairs, 0)
        comparison = Comparison(objective, gradients.matrices, gradients.vectors, made, sum(matcher.lengths))
        found += comparison.losses(own).tolist()
    return found
