"""Patterns: which tokens of one sequence another sequence also contains.

A token or bigram counts at most as often as it occurs in both sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from leakaudit.results.journal import TokenMatch
from leakaudit.results.schema import STRIP_CELLS


def token_pattern(tokens: Sequence[int], other: Sequence[int]) -> str:
    """Return one `TokenMatch` for each token of a sequence.

    If the other sequence has a bigram n times, the first n of it from the left are correct. A token outside correct bigrams is correct
    if the other sequence still has an occurrence of it that no earlier mark has used.

    Args:
        tokens: the sequence to mark.
        other: the sequence with which it is compared.

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

    A cell covers a sixteenth of the sequence, parts of tokens included. It shows which share of this part was recovered, rounded up to
    quarters, so it is 0 only if nothing was recovered. Letters a to d instead of 1 to 4 mean that most of it was not recovered in order.

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

    Lengths are integers in sixteenths of a token: a token has length 16, and a cell has length `len(pattern)`.
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
