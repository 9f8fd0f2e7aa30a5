"""Refinement of a guess as tokens: other words and other orders.

Steps on embeddings find most words quickly and the last ones slowly. But for a guess as tokens, one more right word changes
the distance at once. So three kinds of neighbours of a guess are tried: the few nearest words at each position, the words of
other candidates at that position, and other orders. Candidates miss different words: one may have a word twice where another
has the right word. The published attacks take the nearest word and stop. A local search often ends with one word missing,
another word twice, and the words between them at the next position. So words that occur twice are moved to all positions.
Words that the derivative suggests are not tried; docs/decisions/matching.md says why. (Own derivation; like GRAB's beam
search, a discrete step after the continuous one.)

Letters: B sequences, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from leakaudit.algorithms.matching.matcher import Matcher
from leakaudit.algorithms.matching.permutations import Permutation, draw_orders, move_subsequence, move_token, swap
from leakaudit.plugins.budget import Budget

Batch = tuple[tuple[int, ...], ...]

ORDERS = 8
"""Random transformations of each sequence in a sweep, in addition to every exchange of neighbours. Our choice: three times as
many gave nothing more on training sentences; see docs/decisions/matching.md."""

DOUBLES = 24
"""Most moves of repeated words for each sequence in a sweep, drawn from all such moves. Chosen on training sentences; see
docs/decisions/matching.md."""

MOVES = 96
"""Most moves of any word for each sequence in a sweep, under a language model's loss, where a search on embeddings finds the words before
their order. Chosen on training sentences."""

LIKELY = 0.6
"""A word is tried if its cosine is at least this share of the nearest word's cosine. Our choice."""

MOST_SWEEPS = 8
"""Most sweeps of one refinement. Our choice: most end earlier, because no neighbour is better."""


def nearest_words(matcher: Matcher, embeddings: Tensor, most: int) -> list[dict[int, list[int]]]:
    """Return for each sequence: position -> the nearest words by cosine.

    The nearest word comes first. Only positions whose tokens are not known are listed. A certain position has one near word; an
    uncertain one has many.

    Args:
        matcher: gives the word embedding.
        embeddings: (B, T, D) of one candidate.
        most: most words at each position.
    """
    cosine = matcher.words.cosines(embeddings)  # (B, T, V)
    near, ids = cosine.topk(most, dim=2)
    counts = (near >= LIKELY * near[..., :1]).sum(dim=2).clamp_min(1).tolist()
    found = ids.tolist()
    return [
        {place: found[row][place][: counts[row][place]] for place in matcher.free_places(row)}
        for row in range(len(matcher.lengths))
    ]


def pooled(found: Sequence[list[dict[int, list[int]]]]) -> list[dict[int, list[int]]]:
    """Return for each sequence: position -> the words of several candidates.

    Those of the first candidates come first.
    """
    return [
        {place: list(dict.fromkeys(itertools.chain(*(words[row][place] for words in found)))) for place in places}
        for row, places in enumerate(found[0])
    ]


def refine_tokens(
    matcher: Matcher,
    guess: Sequence[tuple[int, ...]],
    label_logits: Tensor,
    words: Sequence[dict[int, list[int]]],
    rng: torch.Generator,
    budget: Budget,
) -> Batch:
    """Return a guess after a local search over its neighbours.

    A neighbour has one other word, several of the best such changes together, or another order. The search moves to the best
    neighbour, until no neighbour is better.

    Args:
        matcher: compares.
        guess: (B,) sequences of token ids.
        label_logits: (B, C).
        words: for each sequence: position -> words to try there.
        rng: draws orders.
        budget: checked before every sweep.
    """
    best: Batch = tuple(guess)
    for _ in range(MOST_SWEEPS):
        if budget.exhausted():
            break
        tried = list(dict.fromkeys([best, *_neighbours(matcher, best, words, rng)]))
        losses = matcher.token_losses(tried, label_logits)
        together = _together(tried, losses)
        tried += together
        losses += matcher.token_losses(together, label_logits)
        number = min(range(len(tried)), key=lambda one: losses[one])
        if not losses[number] < losses[0]:
            break
        best = tried[number]
        if matcher.explain(best, label_logits):
            break
    return best


def _neighbours(
    matcher: Matcher, best: Batch, words: Sequence[dict[int, list[int]]], rng: torch.Generator
) -> Iterator[Batch]:
    """Yield a batch with one word changed, or one sequence in another order."""
    for row, places in enumerate(words):
        for place, found in places.items():
            yield from (_changed(best, {(row, place): word}) for word in found)
    for row, sequence in enumerate(best):
        for order in _orders(matcher, row, sequence, rng):
            yield (*best[:row], tuple(sequence[place] for place in order), *best[row + 1 :])


def _orders(matcher: Matcher, row: int, sequence: tuple[int, ...], rng: torch.Generator) -> list[Permutation]:
    """Return the orders of a sequence that are tried.

    They are every exchange of neighbours, some moves of words that occur twice, and some random transformations.
    """
    places, present = matcher.free_places(row), tuple(range(matcher.lengths[row]))
    exchanges = [swap(present, one, two) for one, two in itertools.pairwise(places)]
    count = Counter(sequence[place] for place in places)
    moving = places if matcher.labels.in_text else [place for place in places if count[sequence[place]] > 1]
    moves = [_moved(present, one, other) for one in moving for other in places if abs(one - other) > 1]
    most = MOVES if matcher.labels.in_text else DOUBLES
    drawn = torch.randperm(len(moves), generator=rng)[:most].tolist()
    return [*exchanges, *(moves[number] for number in drawn), *draw_orders(places, len(present), ORDERS, rng)]


def _moved(order: Permutation, one: int, other: int) -> Permutation:
    """Return the order with one token moved and the tokens between shifted."""
    if one < other:
        return move_token(order, one, other)
    return move_subsequence(order, other, one - 1, one)  # the tokens from there on follow it


def _together(tried: Sequence[Batch], losses: Sequence[float]) -> list[Batch]:
    """Return the improving changes applied together: the best two, three, ...

    Changes of the same position are not combined.

    Args:
        tried: a batch, and neighbours of it.
        losses: of each.
    """
    best, changes, found = tried[0], dict[tuple[int, int], int](), []
    for number in sorted(range(1, len(tried)), key=lambda one: losses[one]):
        if not losses[number] < losses[0]:
            break
        others = _changes(best, tried[number])
        if not others.keys() & changes.keys():
            changes |= others
            found.append(_changed(best, changes))
    return found[1:]


def _changes(batch: Batch, other: Batch) -> dict[tuple[int, int], int]:
    """Return (row, position) -> word of the other batch, where they differ."""
    return {
        (row, place): word
        for row, (sequence, changed) in enumerate(zip(batch, other, strict=True))
        for place, (before, word) in enumerate(zip(sequence, changed, strict=True))
        if before != word
    }


def _changed(batch: Batch, changes: Mapping[tuple[int, int], int]) -> Batch:
    """Return a batch with other words at some (row, position)."""
    changed = [list(sequence) for sequence in batch]
    for (row, place), word in changes.items():
        changed[row][place] = word
    return tuple(map(tuple, changed))
