"""Rows of the word embedding's update: the tokens of the batch."""

from __future__ import annotations

from torch import Tensor

from leakaudit.algorithms.above_noise import rows_above_noise
from leakaudit.client.observation import Observation
from leakaudit.models.structure import word_embedding
from leakaudit.plugins.attack_protocol import APPLIES, Applicability, not_applicable


def can_read_rows(seen: Observation) -> Applicability:
    """Say whether the word embedding's update is shared and depends on inputs alone."""
    name = word_embedding(seen.model)
    if name is None or name not in seen.update:
        return not_applicable(
            f"the word embedding {name!r} is frozen or its update is not shared"
            if name
            else "the model has no word embedding among its parameters"
        )
    if any(name in pair for pair in seen.facts.tied):
        return not_applicable(f"the word embedding {name!r} is tied to an output head, which touches every row of it")
    return APPLIES


def touched_rows(seen: Observation, false_rows: float) -> tuple[Tensor, float]:
    """Return the rows of the word embedding (V, D) that hold more than noise.

    Args:
        seen: `can_read_rows` applies to it.
        false_rows: how many of the V rows may be named by chance, under noise.

    Returns:
        (V,) bool, and the noise's standard deviation in the update's units, 0 without noise.
    """
    rows = seen.update[str(word_embedding(seen.model))]  # (V, D)
    touched = (rows != 0).any(dim=1)  # (V,)
    if seen.noise_sigma > 0.0 or bool(touched.all()):
        return rows_above_noise(rows, seen.noise_sigma, false_rows)
    return touched, 0.0


def tokens_of(touched: Tensor, seen: Observation) -> tuple[int, ...]:
    """Return the tokens of touched rows (V,) in ascending order, without special ones."""
    around = seen.facts.vocabulary.wordless_ids
    return tuple(token for token in touched.nonzero().flatten().tolist() if token not in around)


FALSE_ROWS = 1.0
"""Rows that may be named by chance under noise.
Our choice: one word too many. With noise alone, 99 tables of 100 name no row."""
