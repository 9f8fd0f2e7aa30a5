"""Tokens and bigrams are counted no more often than they occur."""

from __future__ import annotations

import pytest

from leakaudit.metrics.ngrams import bag_pattern, clipped_overlap, token_pattern


@pytest.mark.parametrize(
    ("tokens", "other", "pattern"),
    [
        ([1, 2, 3], [1, 2, 3], "bbb"),
        ([1, 2, 3], [3, 2, 1], "uuu"),
        ([1, 2, 3], [], "..."),
        ([], [1], ""),
        ([7, 7, 7], [7], "u.."),
        ([1, 2, 1, 2], [1, 2], "bb.."),
        ([1, 2, 9, 3], [3, 8, 1, 2], "bb.u"),
    ],
)
def test_patterns_by_hand(tokens: list[int], other: list[int], pattern: str) -> None:
    """One mark a token: bigram, unigram or wrong."""
    assert token_pattern(tokens, other) == pattern


def test_overlap_is_clipped() -> None:
    """Repeating a right token does not pay."""
    assert clipped_overlap([4, 4, 4], [4]) == 1


def test_a_bag_knows_neither_order_nor_counts() -> None:
    """Every token that it names is marked."""
    assert bag_pattern([5, 6, 5], (5,)) == "u.u"
