"""Guesses and true sequences are matched one-to-one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from leakaudit.audit.scoring.assignment import match
from leakaudit.plugins.attack_protocol import GuessedSequence
from leakaudit.plugins.overlap import rouge_f

WORDS = ["zero", "one", "two", "three", "four", "five"]
SPECIAL = frozenset({0})


def _decode(ids: Sequence[int]) -> str:
    return " ".join(WORDS[i] for i in ids)


def _guesses(*sequences: tuple[int, ...]) -> list[GuessedSequence]:
    return [GuessedSequence(ids, own_score=0.1 * n) for n, ids in enumerate(sequences)]


def test_order_of_the_guesses_does_not_matter() -> None:
    """Each true sequence finds its guess, and the guess keeps its score."""
    pairs = match(_guesses((3, 4), (1, 2)), [(1, 2), (3, 4)], _decode)
    assert [(p.true_ids, p.guess_ids, p.own_score) for p in pairs] == [((1, 2), (1, 2), 0.1), ((3, 4), (3, 4), 0.0)]


def test_no_guess_is_used_twice() -> None:
    """Two equal sentences need two guesses."""
    pairs = match(_guesses((1, 2)), [(1, 2), (1, 2)], _decode)
    assert sorted(p.guess_ids for p in pairs) == [(), (1, 2)]


def test_special_tokens_are_left_out_of_both_sides() -> None:
    """Padding and markers are nobody's merit."""
    (pair,) = match(_guesses((0, 1, 0)), [(0, 1, 0, 0)], _decode, SPECIAL)
    assert pair.true_ids == pair.guess_ids == (1,)
    assert pair.true_text == pair.guess_text == "one"


def test_exact_pairs_come_first_among_equally_like_ones() -> None:
    """ROUGE-1 ignores order: (2, 1) is as like (1, 2) as (1, 2) itself.

    Only the exact pair is an event.
    """
    pairs = match(_guesses((2, 1), (1, 2)), [(1, 2), (2, 1)], _decode)
    assert all(p.true_ids == p.guess_ids for p in pairs)


def test_surplus_guesses_are_dropped_and_missing_ones_are_empty() -> None:
    """There is one pair for each true sequence, always."""
    assert len(match(_guesses((1,), (2,), (3,)), [(2,)], _decode)) == 1
    assert [p.guess_ids for p in match([], [(2,), (3,)], _decode)] == [(), ()]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(*[st.integers(1, 5)] * 3), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_the_sum_of_likeness_is_the_best_of_all_assignments(truths: list[tuple[int, ...]], random: Random) -> None:
    """Brute force over all permutations, exact pairs counted first."""
    guesses = [tuple(random.choices(range(1, 6), k=3)) for _ in truths]

    def worth(assigned: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[int, float]:
        likeness = sum(rouge_f("rouge1", _decode(t), _decode(g)) or 0.0 for t, g in assigned)
        return sum(t == g for t, g in assigned), round(likeness, 6)

    best = max(worth(list(zip(truths, order, strict=True))) for order in permutations(guesses))
    pairs = match(_guesses(*guesses), truths, _decode)
    found = worth([(p.true_ids, p.guess_ids) for p in pairs])
    assert found[0] == best[0]
    assert found[1] >= best[1] - 4e-3  # the tie-break may trade that much for overlap on ids
