"""Reachability: asked about the truth, and missing where nobody can tell."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from leakaudit.audit.scoring.reachability import reachability, unknown
from leakaudit.results.schema import Missing, Score

TRUTH = [(1, 10, 11, 12, 13, 2), (1, 10, 20, 2)]
SPECIAL = frozenset({1, 2})


@dataclass(frozen=True)
class Known:
    """A reach by token ids; sequences pass as `verdicts` says, by their length."""

    candidates: frozenset[int]
    verdicts: dict[int, bool | None]

    def tokens(self, ids: tuple[int, ...]) -> tuple[bool, ...]:
        return tuple(token in self.candidates for token in ids)

    def passes(self, ids: tuple[int, ...]) -> bool | None:
        return self.verdicts[len(ids)]


def test_tokens_in_reach_are_counted_without_special_ones_and_sequences_weigh_alike() -> None:
    """Three of four and none of two; special tokens do not count."""
    found = reachability(Known(frozenset({1, 2, 11, 12, 13}), {6: True, 4: False}), TRUTH, SPECIAL)
    assert [sequence.share for sequence in found.by_sequence] == [0.75, 0.0]
    assert found.tokens == Score(value=0.375, n=2)
    assert found.sequences == Score(value=0.5, n=2)
    assert [sequence.passes for sequence in found.by_sequence] == [True, False]


def test_sequences_that_could_not_be_tested_are_left_out_of_the_share() -> None:
    """One of one that could be tested passed: not one of two."""
    found = reachability(Known(frozenset(), {6: True, 4: None}), TRUTH, SPECIAL)
    assert found.sequences == Score(value=1.0, n=1)
    assert found.by_sequence[1].passes is None


def test_an_attack_without_a_test_has_no_share_of_sequences() -> None:
    """Missing with a reason, not zero; its tokens count all the same."""
    found = reachability(Known(frozenset({10}), {6: None, 4: None}), TRUTH, SPECIAL)
    assert isinstance(found.sequences, Missing) and "no test" in found.sequences.missing
    assert found.tokens == Score(value=0.375, n=2)


def test_an_attack_that_cannot_say_what_was_in_reach_leaves_both_missing() -> None:
    """There are as many unknowns as sequences, to stand beside the scores."""
    found = reachability(None, TRUTH, SPECIAL)
    assert found.tokens == found.sequences == Missing(missing="the attack does not say what it could have reached")
    assert [(s.share, s.passes) for s in found.by_sequence] == [(None, None)] * 2
    assert unknown(Missing(missing="why"), 3).by_sequence == (found.by_sequence[0],) * 3


def test_a_batch_of_special_tokens_has_no_share_of_tokens() -> None:
    """Nothing to count is not nothing in reach."""
    found = reachability(Known(frozenset(), {2: True}), [(1, 2)], SPECIAL)
    assert isinstance(found.tokens, Missing) and found.sequences == Score(value=1.0, n=1)


@pytest.mark.parametrize("verdict", [1, "yes", 0.5])
def test_an_answer_that_is_no_answer_is_refused(verdict: object) -> None:
    """A truthy value of another kind would count as in reach."""
    with pytest.raises(ValueError, match="asked whether a sequence passes, got"):
        reachability(Known(frozenset(), {6: verdict}), TRUTH[:1], SPECIAL)  # type: ignore[dict-item]


def test_answers_that_do_not_fit_the_tokens_are_refused() -> None:
    """One too few: which token it leaves out nobody knows."""

    class Short(Known):
        def tokens(self, ids: tuple[int, ...]) -> tuple[bool, ...]:
            return super().tokens(ids)[:-1]

    with pytest.raises(ValueError, match="asked about 6 tokens, got 5 answers"):
        reachability(Short(frozenset(), {6: True}), TRUTH[:1], SPECIAL)
