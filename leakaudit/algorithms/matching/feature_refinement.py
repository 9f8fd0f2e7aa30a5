"""Refinement of one sequence's tokens by its own feature.

A batch's gradient is a mean over its sequences, so for a single word the other sequences are a disturbance. A feature
belongs to one sequence alone. A comparison with it needs only a forward pass over that sequence, and no backward pass. So
thousands of neighbours of a guess can be tried. (Own derivation; the paper matches features only during LAMP's two
phases.)

Letters: N candidates, B sequences, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from leakaudit.algorithms.matching.permutations import draw_orders, swap
from leakaudit.plugins.budget import Budget

BEAMS = (2, 6)
"""Guesses that are expanded in each turn. First comes a narrow beam, then a wide one if the first did not find the feature.
Our choice."""

FIRST_WORDS = 8
"""Words that the narrow beam tries at each position. Our choice."""

MOST_EXCHANGES = 150
"""Most exchanges of two words that are tried for one guess. Up to 17 free words, these are all. Our choice."""

ORDERS = 40
"""Random transformations of LAMP that are also tried for one guess. Our choice."""

AT_ONCE = 64
"""Candidates in one forward pass. Our choice: it bounds the memory."""

FOUND = 1e-6
"""A feature counts as reproduced if one minus the cosine is at most this. Our choice: float32 leaves 1e-7, one wrong word 1e-2."""

MOST = 10_000
"""Guesses after which a search ends. Our choice: a minute and a half for a sentence of 20 tokens on one core
(MiniLM)."""

TURNS = 3
"""Most turns of a search, for each position of the sequence. Our choice: on training sentences, searches ended earlier, because
no guess was left to expand."""

Tokens = tuple[int, ...]
"""Token ids of one sequence."""


class Compared(Protocol):
    """The parts of a matcher that this search uses."""

    @property
    def table(self) -> Tensor:
        """(V, D) word embeddings."""

    @property
    def directions(self) -> Tensor:
        """(V, D) at norm 1; zero for words that never occur in a text."""

    def free_places(self, row: int) -> list[int]:
        """Return the positions of a sequence whose tokens are not public."""

    def feature_distances(self, row: int, number: int, embeddings: Tensor) -> Tensor:
        """Return (N,) cosine distances of (N, T, D) candidates to a feature.

        A distance is one minus the cosine of the given feature with the candidate's own.
        """


class SearchResult(NamedTuple):
    """The tokens that a search found, and their distance."""

    tokens: Tokens
    distance: float
    """One minus the cosine of their feature with the given one."""

    @property
    def found(self) -> bool:
        """Whether they reproduce the feature."""
        return self.distance <= FOUND


def search_tokens(
    matcher: Compared, row: int, number: int, guess: Tokens, words: int, rng: torch.Generator, budget: Budget
) -> SearchResult:
    """Return the tokens nearest to a feature that two beam searches find.

    The first search has a narrow beam, the second a wide one. They try neighbours of a guess: one word replaced, two words
    exchanged, or one of LAMP's transformations. The derivative suggests the new words (HotFlip, Ebrahimi et al. 2018, Eq. 10).

    Args:
        matcher: compares.
        row: the sequence.
        number: the feature that belongs to it.
        guess: tokens to start from.
        words: number of words that are tried at each position.
        rng: draws orders.
        budget: checked before every turn.
    """
    known = dict(zip([guess], _distances(matcher, row, number, [guess]), strict=True))
    for beams, tried in zip(BEAMS, (min(FIRST_WORDS, words), words), strict=True):
        expanded: set[Tokens] = set()
        for _ in range(TURNS * len(guess)):
            best = sorted(known, key=lambda each: known[each])[:beams]
            fresh = [each for each in best if each not in expanded]
            if not fresh or known[best[0]] <= FOUND or len(known) >= MOST or budget.exhausted():
                break
            neighbours = itertools.chain.from_iterable(
                _neighbours(matcher, row, number, each, tried, rng) for each in fresh
            )
            new = [each for each in dict.fromkeys(neighbours) if each not in known]
            known |= zip(new, _distances(matcher, row, number, new), strict=True)
            expanded |= set(fresh)
    nearest = min(known, key=lambda each: known[each])
    return SearchResult(nearest, known[nearest])


def _distances(matcher: Compared, row: int, number: int, tokens: Sequence[Tokens]) -> list[float]:
    """Return the feature distance of each guess; infinity if it is not finite."""
    found: list[float] = []
    with torch.no_grad():
        for start in range(0, len(tokens), AT_ONCE):
            ids = torch.tensor(tokens[start : start + AT_ONCE], device=matcher.table.device)
            found += matcher.feature_distances(row, number, matcher.table[ids]).tolist()
    return [distance if math.isfinite(distance) else math.inf for distance in found]


def _neighbours(
    matcher: Compared, row: int, number: int, tokens: Tokens, words: int, rng: torch.Generator
) -> list[Tokens]:
    """Return a guess with other words and in other orders."""
    places = matcher.free_places(row)
    present = tuple(range(len(tokens)))
    pairs = list(itertools.combinations(places, 2))
    drawn = torch.randperm(len(pairs), generator=rng)[:MOST_EXCHANGES].tolist()
    orders = [swap(present, *pairs[pair]) for pair in drawn]
    orders += draw_orders(places, len(tokens), ORDERS, rng)
    promising = _promising(matcher, row, number, tokens, words)
    changed = [(*tokens[:place], word, *tokens[place + 1 :]) for place in places for word in promising[place]]
    return changed + [tuple(tokens[place] for place in order) for order in orders]


def _promising(matcher: Compared, row: int, number: int, tokens: Tokens, words: int) -> list[list[int]]:
    """Return (T, words) the words at each position that the derivative suggests."""
    with torch.enable_grad():
        live = matcher.table[torch.tensor([tokens], device=matcher.table.device)].detach().requires_grad_()
        (slope,) = torch.autograd.grad(matcher.feature_distances(row, number, live).sum(), live)
    gains = -(slope[0] @ matcher.table.T)  # (T, V)
    gains[:, matcher.directions.abs().sum(dim=1) == 0] = -math.inf
    found: list[list[int]] = gains.topk(words, dim=1).indices.tolist()
    return found
