"""The bag of words and the longest length that FILM starts from.

Source: Gupta et al., "Recovering Private Text in Federated Learning of Language Models", NeurIPS 2022, Sec. 4.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from leakaudit.algorithms.above_noise import rows_above_noise
from leakaudit.algorithms.embedding_rows import FALSE_ROWS, can_read_rows, tokens_of, touched_rows
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.models.structure import word_embedding
from leakaudit.models.structure.anatomy import anatomy_of
from leakaudit.models.token_marks import Mark
from leakaudit.models.vocabulary import Vocabulary
from leakaudit.plugins.attack_protocol import APPLIES, Applicability

APART = 0.5
"""Largest cosine of an outlier of a tied table with the direction that its rows share. Chosen on training texts."""


@dataclass(frozen=True)
class Bag:
    """The tokens of a batch, without an order."""

    tokens: tuple[int, ...]
    """Distinct ids in ascending order, without special tokens."""
    counts: Mapping[int, int] = field(default_factory=dict)
    """How often a token occurs, for those whose number shows."""
    longest: int | None = None
    """Number of tokens of the longest text, those around it included; None if nothing tells it."""


def can_read_bag(seen: Observation) -> Applicability:
    """Say whether the word embedding's update names the words."""
    return can_read_rows(seen) if _tied_rows(seen) is None else APPLIES


def read_bag(seen: Observation) -> Bag:
    """Return the bag that the update shows; none of a tied table under noise.

    Args:
        seen: `can_read_bag` applies to it.
    """
    rows = _tied_rows(seen)
    if rows is not None and seen.noise_sigma:
        return Bag(())
    touched = touched_rows(seen, FALSE_ROWS)[0] if rows is None else _outliers(rows)
    return Bag(tokens_of(touched, seen), longest=_longest(seen))


def _tied_rows(seen: Observation) -> Tensor | None:
    """Return the update (V, D) of a tied word embedding; None of any other."""
    name = word_embedding(seen.model)
    tied = name is not None and name in seen.update and any(name in pair for pair in seen.facts.tied)
    return seen.update[str(name)] if tied else None


def _outliers(rows: Tensor) -> Tensor:
    """Return (V,) the rows of a tied table that stand out of its background.

    A row without a token of the batch is a sum of the head's inputs with the softmax's positive weights, and these inputs share a direction.

    Args:
        rows: (V, D) update.
    """
    norms = rows.norm(dim=1)  # (V,)
    unit = rows / norms[:, None].clamp_min(torch.finfo(rows.dtype).tiny)
    common: Tensor = functional.normalize(unit.median(dim=0).values, dim=0)
    along = unit @ common
    backwards: Tensor = (along < 0) & (norms > 0)
    if not bool(backwards.any()):
        return backwards
    apart: Tensor = (along < APART) & (norms > 0.5 * norms[backwards].quantile(0.1))
    return backwards | apart


def granted_bag(seen: Observation) -> Bag | None:
    """Return the granted bag and longest length, as FILM's published code does.

    None unless the threat model grants `words` and `lengths`.
    """
    granted = seen.facts.granted
    if granted.words is None or not granted.lengths:
        return None
    around = seen.facts.vocabulary.wordless_ids
    return Bag(tuple(token for token in granted.words if token not in around), longest=max(granted.lengths))


def _longest(seen: Observation) -> int | None:
    """Return the length of the longest text, by the moved rows of positions.

    A causal language model only predicts the last token of a text, so the position of that token has no gradient.
    """
    moved = 0
    for name in _position_tables(seen):
        rows = seen.update[name]
        touched = (rows != 0).any(dim=1)
        if bool(touched.all()):
            touched = rows_above_noise(rows, seen.noise_sigma, FALSE_ROWS)[0]
        places = touched.nonzero().flatten()
        moved = max(moved, int(places[-1]) + 1 if len(places) and not bool(touched.all()) else 0)
    return None if not moved else moved + (seen.facts.task == "causal-lm")


def _position_tables(seen: Observation) -> list[str]:
    """Return the names of shared tables with a row for each place of a text."""
    try:
        tables = anatomy_of(seen.model).tables
    except AnatomyError:
        return []
    most = seen.facts.vocabulary.max_length
    return [name for name in tables if name in seen.update and len(seen.update[name]) >= most]


def starts_of(bag: Bag, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Return the tokens of the bag that may begin a sentence.

    These are the ones with a capital that have the form of a text's first token (FILM, Sec. 4.3). If there is none, as with a
    tokenizer without capitals, they are all tokens of that form; and if the vocabulary has no token strings, all tokens.
    """
    for mark in (Mark.BEGINS_TEXT | Mark.CAPITAL, Mark.BEGINS_TEXT):
        fitting = vocabulary.marked(mark)
        found = tuple(token for token in bag.tokens if token in fitting)
        if found:
            return found
    return bag.tokens
