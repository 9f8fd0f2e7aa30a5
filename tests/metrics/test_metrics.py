"""Each metric by hand."""

from __future__ import annotations

import pytest

from leakaudit.metrics.exact import Exact
from leakaudit.metrics.label_accuracy import LabelAccuracy
from leakaudit.metrics.longest_run import LongestRun
from leakaudit.metrics.rouge1 import Rouge1
from leakaudit.metrics.rouge2 import Rouge2
from leakaudit.metrics.rouge_l import RougeL
from leakaudit.metrics.token_recall import TokenRecall, bag_recall
from leakaudit.plugins.metric_protocol import LabelCounts, Pair
from leakaudit.plugins.overlap import longest_common_run


def _texts(true: str, guess: str) -> Pair:
    return Pair((1,), (1,), true, guess)


def _ids(true: tuple[int, ...], guess: tuple[int, ...]) -> Pair:
    return Pair(true, guess, "", "")


def test_rouge_by_hand() -> None:
    """Words a b c d against b a d.

    Words: 3 of 4 and 3 of 3. Pairs ab bc cd against ba ad: 0. Longest common subsequence: b d or a d.
    """
    pair = _texts("a b c d", "b a d")
    assert Rouge1()(pair) == pytest.approx(2 * (3 / 4) * 1 / (3 / 4 + 1))
    assert Rouge2()(pair) == 0.0
    assert RougeL()(pair) == pytest.approx(2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3))


def test_rouge_of_a_text_too_short_for_an_ngram_is_missing() -> None:
    """One-word texts would score a ROUGE-2 of 0 however well they came back."""
    assert Rouge2()(_texts("good", "good")) is None
    assert Rouge1()(_texts("good", "good")) == 1.0
    assert Rouge1()(_texts("...", "...")) is None


def test_rouge_of_a_guess_too_short_is_zero() -> None:
    """The true text has bigrams, and none came back."""
    assert Rouge2()(_texts("a good film", "good")) == 0.0
    assert Rouge1()(_texts("a good film", "")) == 0.0


def test_no_stemming() -> None:
    """A wrong ending is a wrong word."""
    assert Rouge1()(_texts("dogs", "dog")) == 0.0


def test_exact_is_about_order() -> None:
    """The same tokens in another order are not the sentence."""
    assert (Exact()(_ids((1, 2), (1, 2))), Exact()(_ids((1, 2), (2, 1)))) == (1.0, 0.0)


def test_token_recall_is_clipped() -> None:
    """Three of the four true tokens, of which one was guessed too often."""
    assert TokenRecall()(_ids((1, 1, 2, 3), (1, 1, 1, 2))) == 0.75


def test_a_sequence_of_special_tokens_only_has_nothing_to_measure() -> None:
    """Missing, not perfect and not zero."""
    assert [metric()(_ids((), ())) for metric in (Exact, TokenRecall, LongestRun)] == [None] * 3


def test_bag_recall_counts_distinct_tokens() -> None:
    """A bag does not say how often."""
    assert bag_recall((1, 1, 1, 2), (1,)) == 0.5
    assert bag_recall((), (1,)) is None


def test_longest_run_by_hand() -> None:
    """2 3 4 in one piece of five tokens."""
    assert longest_common_run((1, 2, 3, 4, 5), (5, 2, 3, 4, 1)) == 3
    assert LongestRun()(_ids((1, 2, 3, 4, 5), (5, 2, 3, 4, 1))) == 0.6


@pytest.mark.parametrize(
    ("true", "guess", "accuracy"),
    [((3, 1), (3, 1), 1.0), ((3, 1), (1, 3), 0.5), ((4, 0), (1, 0), 0.25), ((1, 1), (8, 8), 0.125)],
)
def test_label_accuracy_rewards_neither_silence_nor_over_guessing(
    true: tuple[int, ...], guess: tuple[int, ...], accuracy: float
) -> None:
    """Hits over the larger of both totals."""
    assert LabelAccuracy()(LabelCounts(true, guess)) == accuracy


def test_a_batch_without_labels_has_no_label_accuracy() -> None:
    """Every label may have been masked out."""
    assert LabelAccuracy()(LabelCounts((0, 0), (1, 0))) is None
