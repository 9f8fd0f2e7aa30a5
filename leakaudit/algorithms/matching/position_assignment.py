"""Assignment of embeddings to positions, by their cosine with words.

In an encoder with absolute positions, attention does not depend on order: its input is the *set* of the sums x_p +
v_p of embeddings and position vectors. So the embedding at position p may move to q as x_p + v_p - v_q without any
change of the gradient. If a search has found the right sums at wrong positions, it is at a perfect minimum,
although its embeddings are no words. This module finds the assignment of embeddings to positions under which they are nearest
to words. (Own derivation. LAMP's new orders move embeddings without their position vectors, which changes
the gradient.)

Letters: T tokens, D hidden size, V vocabulary, P positions that are not public.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from leakaudit.algorithms.matching.permutations import Permutation
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.models.structure import input_stage_of

TINY = 1e-12
"""Keeps quotients finite."""


class AssignedPositions(NamedTuple):
    """One sequence with its embeddings at other positions."""

    order: Permutation
    """The position from which the embedding at each position comes."""
    embeddings: Tensor
    """(T, D) after the move. Their sums with the position vectors are the same sums, in another order."""
    gain: float
    """The rise of the mean cosine with the nearest words."""


def position_vectors(seen: Observation, longest: int) -> Tensor | None:
    """Return (T, D) the vectors that the model adds at each position.

    They are known up to a constant. Return None if the model does more than add.
    """
    try:
        stage = input_stage_of(seen.model, longest)
    except AnatomyError:
        return None
    if not stage.additive or stage.position_free:
        return None
    table: Tensor = seen.model.get_input_embeddings().weight  # type: ignore[operator]
    return stage.position_vectors[:longest].to(table) if stage.position_vectors.shape[1] == table.shape[1] else None


def assign_positions(embeddings: Tensor, places: Sequence[int], positions: Tensor, words: Tensor) -> AssignedPositions:
    """Return the assignment of embeddings to positions nearest to words.

    It has the highest mean cosine of embeddings with their nearest words.

    Args:
        embeddings: (T, D) of one sequence.
        places: positions whose tokens are not public.
        positions: (T, D) position vectors.
        words: (V', D) directions of the words that may stand there, at norm 1.
    """
    index = torch.tensor(places, device=embeddings.device)
    sums = embeddings[index] + positions[index]  # (P, D)
    split = sums[:, None] - positions[index][None]  # (P, P, D): the embedding at p, if it belongs to q
    # (P, V') each; their differences are the products of a split with words
    of_sums, of_positions = sums @ words.T, positions[index] @ words.T
    nearest = torch.stack([(products - of_positions).amax(dim=1) for products in of_sums])
    likeness = nearest / split.norm(dim=2).clamp_min(TINY)
    sources, targets = linear_sum_assignment(likeness.double().cpu().numpy(), maximize=True)
    order = list(range(len(embeddings)))
    moved = embeddings.clone()
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        order[places[target]] = places[source]
        moved[places[target]] = split[source, target]
    gain = float(likeness[sources, targets].mean() - likeness.diagonal().mean())
    return AssignedPositions(tuple(order), moved, gain)
