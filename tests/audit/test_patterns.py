"""Tokens and bigrams are counted no more often than they occur."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leakaudit.audit.scoring.patterns import bag_pattern, strip, token_pattern
from leakaudit.plugins.overlap import clipped_overlap
from leakaudit.results.schema import STRIP_CELLS


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


@pytest.mark.parametrize(
    ("pattern", "cells"),
    [
        ("b" * 21, "4" * 16),
        ("." * 3, "0" * 16),
        ("bu", "44444444dddddddd"),
        ("b" + "." * 63, "1" + "0" * 15),  # one token of the four in the first cell
        ("..u.", "00000000dddd0000"),
        ("", None),
    ],
)
def test_a_strip_shows_where_a_sequence_leaked(pattern: str, cells: str | None) -> None:
    """It has sixteen cells, and letters where words came back alone."""
    assert strip(pattern) == cells


@given(st.text(alphabet="bu.", min_size=1, max_size=200))
def test_a_strip_is_empty_only_where_nothing_came_back(pattern: str) -> None:
    """One token of two hundred is seen; the strip does not tell the length."""
    drawn = strip(pattern)
    assert drawn is not None and re.fullmatch(rf"[0-4a-d]{{{STRIP_CELLS}}}", drawn)
    assert (set(drawn) == {"0"}) == (set(pattern) == {"."})
    assert strip(pattern * 3) is not None and len(strip(pattern * 3) or "") == STRIP_CELLS
