"""The bag of words and the longest length that FILM starts from.

Source: Gupta et al., "Recovering Private Text in Federated Learning of Language Models", NeurIPS 2022, Sec. 4.2 and 4.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from leakaudit.algorithms.bag.word_bag import word_bag
from leakaudit.client.observation import Observation
from leakaudit.models.token_marks import Mark
from leakaudit.models.vocabulary import Vocabulary

SURE = 3.0
"""Evidence (`word_bag`) from which a token counts as sure.
Chosen on training texts, four GPT-2 shapes with tied heads: the few false tokens had at most 2.7, and nineteen of twenty true ones 3.6 or more."""


@dataclass(frozen=True)
class Bag:
    """The tokens of a batch, without an order."""

    tokens: tuple[int, ...]
    """Distinct ids in ascending order, without special tokens."""
    counts: Mapping[int, int] = field(default_factory=dict)
    """How often a token may come in a text, for those whose number shows."""
    doubt: Mapping[int, float] = field(default_factory=dict)
    """How far the evidence for a token is below `SURE`, as a natural logarithm; tokens above it have no entry."""
    longest: int | None = None
    """Number of tokens of the longest text, those around it included; None if nothing tells it."""


def read_bag(seen: Observation) -> Bag:
    """Return the bag that the update shows.

    Args:
        seen: `leakaudit.algorithms.bag.word_bag.can_read_bag` applies to it.
    """
    found = word_bag(seen)
    firsts = seen.facts.vocabulary.marked(Mark.BEGINS_TEXT)
    tokens = found.tokens.tolist()
    lacking = {token: SURE - how for token, how in zip(tokens, found.evidence.tolist(), strict=True) if how < SURE}
    bounds = {token: max(1, count + (token in firsts or not firsts)) for token, count in found.counts.items()}
    return Bag(tuple(tokens), bounds, lacking, found.longest)


def granted_bag(seen: Observation) -> Bag | None:
    """Return the granted bag and longest length, as FILM's published code does.

    None unless the threat model grants `words`, and `lengths` or `longest`.
    """
    granted = seen.facts.granted
    longest = max(granted.lengths) if granted.lengths else granted.longest
    if granted.words is None or longest is None:
        return None
    around = seen.facts.vocabulary.wordless_ids
    return Bag(tuple(token for token in granted.words if token not in around), longest=longest)


def with_granted_counts(bag: Bag, seen: Observation) -> Bag:
    """Return a bag whose tokens come in no text more often than the batch has them.

    Source: Gupta et al. 2022, Fig. 5, "oracle": "the frequency of each word is known". The same bag without the grant `counts`.
    """
    counts = seen.facts.granted.counts
    return bag if counts is None else replace(bag, counts={**bag.counts, **dict(counts)})


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
