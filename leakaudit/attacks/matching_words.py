"""Mends a guess word by word: which neighbours of the guess, as tokens, have a gradient nearer to the observed one?

Steps on embeddings find most words soon and the last ones slowly; as tokens, one right word more is a jump in the distance. So the
nearest few words at each place, those that other candidates ended with there, and new orders are tried as tokens, all in a few passes. Candidates
differ in what they miss: one has a word twice and another not at all. The published attacks take the nearest word and
stop. Words that the derivative points to are not tried: the right one was hundreds to thousands of ranks down there (training sentences, by hand),
and a half of the passes went to them for the same texts. (Own; as in `span_refine`, and like GRAB's beam search a discrete step after the continuous one.)

Letters: B sequences, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from leakaudit.attacks.matching_discrete import Order, draw_orders, swap
from leakaudit.attacks.matching_engine import Matcher
from leakaudit.budget import Budget

Batch = tuple[tuple[int, ...], ...]

ORDERS = 24
"""Random transformations of each sequence that a sweep tries, beside every exchange of neighbours and new words. Our choice."""

LIKELY = 0.6
"""Share of the nearest word's cosine that another's must have to be tried. Our choice."""

MOST_SWEEPS = 6
"""Sweeps after which mending ends. Our choice: most end before, because nothing helps any more."""


def nearest_words(matcher: Matcher, embeddings: Tensor, most: int) -> list[dict[int, list[int]]]:
    """Return for each sequence place -> the nearest words by cosine, nearest first, at the places that are not public.

    A place that is sure of its word has no other near it; one that found none has many.

    Args:
        matcher: whose vocabulary it is.
        embeddings: (B, T, D) of one candidate.
        most: words a place.
    """
    cosine = functional.normalize(embeddings, dim=2) @ matcher.directions.T  # (B, T, V)
    near, ids = cosine.topk(most, dim=2)
    counts = (near >= LIKELY * near[..., :1]).sum(dim=2).clamp_min(1).tolist()
    found = ids.tolist()
    return [
        {place: found[row][place][: counts[row][place]] for place in matcher.free_places(row)}
        for row in range(len(matcher.lengths))
    ]


def pooled(found: Sequence[list[dict[int, list[int]]]]) -> list[dict[int, list[int]]]:
    """Return for each sequence place -> all words that several candidates have there, those of the first candidates first."""
    return [
        {place: list(dict.fromkeys(itertools.chain(*(words[row][place] for words in found)))) for place in places}
        for row, places in enumerate(found[0])
    ]


def mend(
    matcher: Matcher,
    guess: Sequence[tuple[int, ...]],
    label_logits: Tensor,
    words: Sequence[dict[int, list[int]]],
    rng: torch.Generator,
    budget: Budget,
) -> Batch:
    """Climb from a guess to the best of its neighbours until none is better: other words, the best of these together, other orders.

    Args:
        matcher: compares.
        guess: (B,) sequences of token ids.
        label_logits: (B, C).
        words: for each sequence place -> words to try there.
        rng: draws orders.
        budget: looked at before every sweep.
    """
    best: Batch = tuple(guess)
    loss = math.inf
    for _ in range(MOST_SWEEPS):
        if budget.exhausted():
            break
        singles = [
            (row, place, word)
            for row, places in enumerate(words)
            for place, found in places.items()
            for word in found
            if word != best[row][place]
        ]
        orders = [(row, order) for row in range(len(best)) for order in _orders(matcher, row, rng)]
        tried = [best, *(_with_words(best, [single]) for single in singles)]
        tried += [(*best[:row], tuple(best[row][place] for place in order), *best[row + 1 :]) for row, order in orders]
        losses = matcher.token_losses(tried, label_logits)
        loss = losses[0]
        together = _together(best, singles, losses[1 : 1 + len(singles)], loss)
        tried += together
        losses += matcher.token_losses(together, label_logits)
        number = min(range(len(tried)), key=lambda one: losses[one])
        if not losses[number] < loss:
            break
        best = tried[number]
        if matcher.explain(best, label_logits):
            break
    return best


def _orders(matcher: Matcher, row: int, rng: torch.Generator) -> list[Order]:
    """Return every exchange of neighbours, and some random transformations."""
    places, present = matcher.free_places(row), tuple(range(matcher.lengths[row]))
    exchanges = [swap(present, one, two) for one, two in itertools.pairwise(places)]
    return list(dict.fromkeys([*exchanges, *draw_orders(places, len(present), ORDERS, rng)]))


def _together(
    best: Batch, singles: Sequence[tuple[int, int, int]], losses: Sequence[float], loss: float
) -> list[Batch]:
    """Return the best words of all places that gain by themselves applied together: the best two, the best three, and so on."""
    gains: dict[tuple[int, int], tuple[float, tuple[int, int, int]]] = {}
    for single, found in zip(singles, losses, strict=True):
        if found < gains.get(single[:2], (loss, single))[0]:
            gains[single[:2]] = (found, single)
    ranked = [single for _, single in sorted(gains.values())]
    return [_with_words(best, ranked[:number]) for number in range(2, len(ranked) + 1)]


def _with_words(batch: Batch, changes: Sequence[tuple[int, int, int]]) -> Batch:
    """Return a batch with other words at some (row, place)."""
    changed = [list(sequence) for sequence in batch]
    for row, place, word in changes:
        changed[row][place] = word
    return tuple(map(tuple, changed))
