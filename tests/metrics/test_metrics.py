"""Each metric by hand."""

from __future__ import annotations

import pytest

from leakaudit.metrics.best_rl import BestRougeL
from leakaudit.metrics.exact import Exact
from leakaudit.metrics.label_accuracy import LabelAccuracy
from leakaudit.metrics.longest_run import LongestRun
from leakaudit.metrics.nerr import NamedEntityRecovery
from leakaudit.metrics.nerr_f1 import NamedEntityAgreement
from leakaudit.metrics.rouge1 import Rouge1
from leakaudit.metrics.rouge2 import Rouge2
from leakaudit.metrics.rouge_l import RougeL
from leakaudit.metrics.sentence_precision import SentencePrecision
from leakaudit.metrics.sentences_found import SentencesFound
from leakaudit.metrics.token_recall import TokenRecall, bag_recall
from leakaudit.plugins.metric_protocol import Batch, LabelCounts, Pair, TaggedEntities
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


WORDS = "Ann Lee of Orpington met Ann Lee and Zoë"
NAMED = ("Ann Lee", "Orpington", "Zoë", "cut off")


@pytest.mark.parametrize(
    ("guess", "recovered"),
    [
        (WORDS, 1.0),
        ("ann lee went to orpington", 2 / 3),
        ("lee ann met zoe", 1 / 3),
        ("anna leeds", 0.0),
        ("", 0.0),
    ],
)
def test_named_entity_recovery_is_the_recall_of_whole_entities(guess: str, recovered: float) -> None:
    """Each counts once; `cut off` is not in the text, nor Ann Lee in `lee ann`."""
    pair = Pair((1,), (1,), WORDS, guess, entities=NAMED)
    assert NamedEntityRecovery()(pair) == pytest.approx(recovered)


@pytest.mark.parametrize("entities", [None, (), ("Brighton",), (" ",)])
def test_without_a_known_entity_the_recovery_is_missing(entities: tuple[str, ...] | None) -> None:
    """An entity that the true text does not hold cannot be recovered from it."""
    assert NamedEntityRecovery()(Pair((1,), (1,), WORDS, WORDS, entities=entities)) is None


@pytest.mark.parametrize(
    ("true", "guess", "agreement"),
    [
        (("Ann Lee", "Orpington", "Ann Lee"), ("ann lee", "Bo"), 0.5),
        (("Ann Lee",), (), 0.0),
        (("Ann Lee",), ("Ann Lee",), 1.0),
        (("Ann Lee",), ("Ann",), 0.0),
        ((), ("Ann Lee",), None),
    ],
)
def test_agreement_of_named_entities_is_the_f1_of_two_sets(
    true: tuple[str, ...], guess: tuple[str, ...], agreement: float | None
) -> None:
    """Of two true and two guessed entities one is common: both shares are 1 / 2."""
    pair = Pair((1,), (1,), "", "", tagged=TaggedEntities(true, guess))
    assert NamedEntityAgreement()(pair) == agreement


def test_without_a_tagger_the_agreement_is_missing() -> None:
    """Entities in the data say nothing about what a guess holds."""
    assert NamedEntityAgreement()(Pair((1,), (1,), WORDS, WORDS, entities=NAMED)) is None


@pytest.mark.parametrize(("guess", "found"), [("a x y z", 0.0), ("a b c z", 1.0), ("", 0.0)])
def test_a_text_is_found_above_a_quarter(guess: str, found: float) -> None:
    """One of four words in order is exactly a quarter, which is not above it."""
    assert SentencesFound()(_texts("a b c d", guess)) == found


def test_one_recovered_text_of_a_batch_shows() -> None:
    """The mean of 128 texts would be below 0.01. Two of five guesses found a text."""
    pairs = (_texts("a b c d", "a b c d"), _texts("e f g h", "e f g z"), *[_texts("i j k l", "")] * 126)
    batch = Batch(pairs, guesses=5)
    assert BestRougeL()(batch) == 1.0
    assert SentencePrecision()(batch) == 2 / 5


def test_a_batch_without_words_or_guesses_has_no_number() -> None:
    """Missing is no zero: a guess can be wrong, and only words can come back."""
    assert BestRougeL()(Batch((_texts("жук", "жук"),), 1)) is None
    assert SentencePrecision()(Batch((_texts("жук", "жук"),), 1)) is None
    assert SentencePrecision()(Batch((_texts("a b", ""),), 0)) is None
    assert BestRougeL()(Batch((_texts("a b", ""),), 0)) == 0.0
