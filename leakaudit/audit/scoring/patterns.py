"""Patterns: which tokens of one sequence another sequence has.

A token or bigram counts no more often than it occurs in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from leakaudit.results.journal import TokenMatch
from leakaudit.results.schema import STRIP_CELLS


def token_pattern(tokens: Sequence[int], other: Sequence[int]) -> str:
    """Return one `TokenMatch` for each token of a sequence.

    A bigram is correct if the other sequence has it, as often as it has it, from left to right. A token outside correct
    bigrams is correct if the other sequence has it more often than it was already accounted for.

    Args:
        tokens: the sequence to mark.
        other: the sequence it is compared with.

    >>> token_pattern([1, 2, 3, 9, 3], [3, 1, 2])
    'bbu..'
    """
    bigrams_left = Counter(pairwise(other))
    marks = [TokenMatch.WRONG] * len(tokens)
    for i, bigram in enumerate(pairwise(tokens)):
        if bigrams_left[bigram] > 0:
            bigrams_left[bigram] -= 1
            marks[i] = marks[i + 1] = TokenMatch.BIGRAM
    tokens_left = Counter(other)
    tokens_left.subtract(token for token, mark in zip(tokens, marks, strict=True) if mark is TokenMatch.BIGRAM)
    for i, token in enumerate(tokens):
        if marks[i] is TokenMatch.WRONG and tokens_left[token] > 0:
            tokens_left[token] -= 1
            marks[i] = TokenMatch.UNIGRAM
    return "".join(marks)


def bag_pattern(tokens: Sequence[int], bag: Sequence[int]) -> str:
    """Return one `TokenMatch` for each token, compared with a bag of tokens.

    A bag has no order and no counts.

    >>> bag_pattern([4, 8, 4], [4, 5])
    'u.u'
    """
    known = set(bag)
    return "".join(TokenMatch.UNIGRAM if token in known else TokenMatch.WRONG for token in tokens)


def strip(pattern: str) -> str | None:
    """Return a pattern of any length as sixteen cells (`schema.Strip`).

    A cell covers a sixteenth of the sequence, parts of tokens included, and shows the share of it that came back, rounded up to
    quarters: a cell is empty only where nothing came back.

    Args:
        pattern: one `TokenMatch` for each token of the true sequence.

    Returns:
        Sixteen characters, or None for a sequence without tokens.

    >>> strip("bbbb...."), strip("u"), strip("")
    ('4444444400000000', 'dddddddddddddddd', None)
    """
    if not pattern:
        return None
    return "".join(_cell(pattern, index) for index in range(STRIP_CELLS))


def _cell(pattern: str, index: int) -> str:
    """Return one cell.

    Lengths are integers in sixteenths of a token, so a cell is as long as the sequence has tokens.
    """
    size = len(pattern)
    first, last = index * size, (index + 1) * size
    came_back = {TokenMatch.BIGRAM: 0, TokenMatch.UNIGRAM: 0}
    for place in range(first // STRIP_CELLS, -(-last // STRIP_CELLS)):
        shared = min(last, (place + 1) * STRIP_CELLS) - max(first, place * STRIP_CELLS)
        match = TokenMatch(pattern[place])
        if match in came_back:
            came_back[match] += shared
    quarters = -(-4 * sum(came_back.values()) // size)
    in_order = came_back[TokenMatch.BIGRAM] >= came_back[TokenMatch.UNIGRAM]
    return str(quarters) if in_order or not quarters else "abcd"[quarters - 1]
