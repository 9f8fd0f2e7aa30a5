"""The tokens that a tokenizer puts around texts, and the lengths they suggest.

A BERT tokenizer, for instance, starts each text with [CLS] and ends it with [SEP]. So a sentence of T tokens has [SEP]
at position T - 1, and the attention input of that pair lies near the span of the update: the nearest positions are the
likely lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from leakaudit.algorithms.span.hypothesis_search import Hypothesis
from leakaudit.algorithms.span.problem import SpanProblem
from leakaudit.algorithms.span.subspace import SoftSpan

LONGEST = 128
"""Largest length in tokens that is tried.
Our choice: longer sentences have too many words to search in time."""

POSITIONS_PER_DIRECTION, MORE_POSITIONS = 3, 8
"""Positions to try: so many for each direction above the noise, and so many in addition.
Our choice: each token adds a direction, and most directions are visible."""

LADDER = 1.5
"""Ratio of the growing distances between the lengths that are tried if no token marks the end.
Length i is the shortest one plus LADDER ** i tokens. Our choice."""

LENGTHS = 5
"""Number of likely lengths that are returned; without a closing token up to 2 LENGTHS - 1.
Chosen on training sentences; see docs/decisions/span_constants.md."""


@dataclass(frozen=True)
class Frame:
    """Tokens before and after the words of every text."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of tokens in the frame."""
        return len(self.before) + len(self.after)

    @property
    def shortest(self) -> int:
        """Length in tokens of the shortest sentence: one word."""
        return self.size + 1

    def around(self, words: Sequence[int], label: int) -> Hypothesis:
        """Return the sentence that has these words inside the frame."""
        return Hypothesis((*self.before, *words, *self.after), label)

    def words_of(self, sentence: Hypothesis) -> tuple[int, ...]:
        """Return the token ids of a sentence without its frame."""
        return sentence.token_ids[len(self.before) : len(sentence.token_ids) - len(self.after)]

    def is_word(self, position: int, length: int) -> bool:
        """Return whether a position of a sentence is inside the frame."""
        return len(self.before) <= position < length - len(self.after)


def frame_of(problem: SpanProblem) -> Frame:
    """Return the frame that the public tokenizer puts around texts."""
    vocabulary = problem.seen.facts.vocabulary
    return Frame(vocabulary.starts_with, vocabulary.ends_with)


def likely_lengths(problem: SpanProblem, span: SoftSpan, frame: Frame) -> tuple[int, ...]:
    """Return sentence lengths in tokens, most likely first.

    The score of a length is the weighted share of the closing tokens' inputs that lies in the span. If texts have no
    closing token, a series of ascending lengths is returned (`LADDER`).

    Args:
        problem: the observation with its parts.
        span: weighted directions of the noisy span.
        frame: of the tokenizer.
    """
    stage, shortest = problem.stage, frame.shortest
    longest = min(stage.max_length, LONGEST, POSITIONS_PER_DIRECTION * len(span.weights) + MORE_POSITIONS)
    longest = max(longest, shortest)
    if not frame.after:
        return tuple(sorted({min(longest, shortest + round(LADDER**i)) for i in range(1, 2 * LENGTHS)}))
    lengths = torch.arange(shortest, longest + 1, device=stage.device)
    share = torch.zeros(len(lengths), dtype=torch.float64, device=stage.device)
    rows = span.weights.sqrt()[:, None] * span.vectors
    for back, token in enumerate(reversed(frame.after)):
        x = stage.inputs(torch.full_like(lengths, token), lengths - 1 - back)
        share += (x @ rows.T).square().sum(1) / x.square().sum(1).clamp_min(1e-300)
    return tuple(lengths[share.argsort(descending=True)[:LENGTHS]].tolist())
