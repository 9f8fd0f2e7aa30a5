"""Scores of one attempt: every metric has a number, or a reason for none."""

from __future__ import annotations

import pytest

from leakaudit.audit.scoring.score import Scored, score
from leakaudit.plugins.attack_protocol import GuessedSequence, Reconstruction
from leakaudit.plugins.metric_protocol import LabelCounts
from leakaudit.registry import metrics
from leakaudit.results.schema import Missing, Score
from tests.support import tiny

TEXTS = ["the old dog chased a cat", "a bird"]
TOKENIZER = tiny.bert_tokenizer()
TRUTH = [tuple(TOKENIZER(text)["input_ids"]) for text in TEXTS]
SPECIAL = frozenset(TOKENIZER.all_special_ids)


def _score(guess: Reconstruction, labels: list[int] | None = None, min_tokens: int = 6) -> Scored:
    return score(guess, TRUTH, labels, 2, TOKENIZER, SPECIAL, min_tokens)


def _sequences(*sequences: tuple[int, ...]) -> Reconstruction:
    return Reconstruction(sequences=tuple(GuessedSequence(ids) for ids in sequences))


def test_a_perfect_guess_scores_one_and_is_an_event() -> None:
    """Order of the guesses and padding do not matter."""
    scored = _score(_sequences((*TRUTH[1], 0, 0), TRUTH[0]))
    values = [
        scored.scores[name]
        for name, kind in metrics
        if kind.level == "sequence" and not kind.missing_because and not kind.needs_model
    ]
    assert values == [Score(value=1.0, n=2)] * len(values)
    assert scored.events == ("exact_sentence", "exact_sequence", "all_words", "most_words")
    assert [s.true_pattern for s in scored.sequences] == ["bbbbbb", "bb"]
    assert [s.numbers["longest_run"] for s in scored.sequences] == [1.0, 1.0]


def test_a_short_exact_sequence_is_no_sentence() -> None:
    """Two tokens may come back by chance."""
    scored = _score(_sequences(TRUTH[1]))
    assert scored.events == ("exact_sequence",)
    assert [s.long_enough for s in scored.sequences] == [True, False]
    assert scored.scores["exact"] == Score(value=0.5, n=2)


def test_a_guess_of_nothing_scores_zero() -> None:
    """The attack did guess sequences: none. That is a zero and not missing."""
    scored = _score(_sequences())
    assert scored.scores["rouge1"] == Score(value=0.0, n=2)
    assert scored.scores["token_precision"] == Missing(missing="the attack named no token, so none is right or wrong")
    assert [s.guess_pattern for s in scored.sequences] == ["", ""]


def test_a_bag_of_words_has_token_recall_and_precision_only() -> None:
    """They are over the distinct tokens of the batch, seven here."""
    bag = tuple(sorted(set(TRUTH[0]) - SPECIAL))
    scored = _score(Reconstruction(tokens=bag))
    assert scored.scores["token_recall"] == Score(value=6 / 7, n=2)
    assert scored.scores["rouge1"] == Missing(missing="the attack guesses a bag of words and no sequences")
    assert [s.true_pattern for s in scored.sequences] == ["uuuuuu", "u."]
    assert [s.numbers["token_recall"] for s in scored.sequences] == [1.0, 0.5]
    assert scored.scores["token_precision"] == Score(value=1.0, n=2)
    assert [s.numbers["token_precision"] for s in scored.sequences] == [1.0, 1.0]
    assert scored.sequences[0].guess_pattern is None and scored.sequences[0].numbers["longest_run"] is None
    assert scored.events == ("most_words",)


def test_naming_the_whole_vocabulary_is_no_event() -> None:
    """Every word of the batch is among them, but seven of 47 named ones are true."""
    scored = _score(Reconstruction(tokens=tuple(range(len(tiny.VOCABULARY)))))
    assert scored.scores["token_recall"] == Score(value=1.0, n=2)
    assert scored.scores["token_precision"] == Score(value=7 / len(tiny.VOCABULARY), n=2)
    assert scored.events == ()


def test_every_word_with_as_many_wrong_ones_is_the_least_that_counts() -> None:
    """Precision 7 / 14 is an event on all words, 7 / 15 is none."""
    true = {token for ids in TRUTH for token in ids} - SPECIAL
    wrong = sorted(set(range(len(tiny.VOCABULARY))) - true - SPECIAL)
    assert "all_words" in _score(Reconstruction(tokens=(*true, *wrong[:7]))).events
    assert _score(Reconstruction(tokens=(*true, *wrong[:8]))).events == ()


def test_most_words_asks_for_half_of_a_long_enough_sequence_in_any_order() -> None:
    """Three of six are enough, two are not, and neither is a sequence of two tokens."""
    long, short = (tuple(token for token in ids if token not in SPECIAL) for ids in TRUTH)
    wrong = tiny.VOCABULARY["river"]
    assert _score(_sequences((*long[2::-1], wrong, wrong, wrong))).events == ("most_words",)
    assert _score(_sequences((*long[1::-1], wrong, wrong, wrong))).events == ()
    assert _score(_sequences((*long[2::-1], *(wrong,) * 4))).events == ()
    assert _score(_sequences((short[0], wrong))).events == ()


def test_an_empty_bag_has_a_recall_of_zero_and_no_precision() -> None:
    """Nothing was named, so nothing named is wrong: missing is not zero."""
    scored = _score(Reconstruction(tokens=()))
    assert scored.scores["token_recall"] == Score(value=0.0, n=2)
    assert scored.scores["token_precision"] == Missing(missing="the attack named no token, so none is right or wrong")
    assert [s.numbers["token_precision"] for s in scored.sequences] == [None, None]


def test_a_batch_without_words_has_neither() -> None:
    """There is nothing to find, so naming words is neither right nor wrong."""
    scored = score(Reconstruction(tokens=(7,)), [tuple(SPECIAL)], None, None, TOKENIZER, SPECIAL, 6)
    assert isinstance(scored.scores["token_recall"], Missing) and isinstance(scored.scores["token_precision"], Missing)
    assert scored.events == ()


def test_precision_counts_each_token_as_often_as_the_sequence_has_it() -> None:
    """The guess says `the` twice, the sequence once."""
    the = tiny.VOCABULARY["the"]
    assert _score(_sequences((the, the))).scores["token_precision"] == Score(value=0.5, n=1)


def test_counts_that_may_be_chance_are_an_estimate() -> None:
    """Their success rate is scored; an exact hit is neither a number nor an event."""
    scored = _score(Reconstruction(label_counts=(1, 1), counts_told=False), labels=[1, 0])
    assert scored.scores["label_accuracy"] == Score(value=1.0, n=2)
    assert isinstance(scored.scores["label_exact"], Missing)
    assert scored.events == ()


def test_labels_are_scored_by_counts() -> None:
    """Which sequence has which label is nobody's claim."""
    scored = _score(Reconstruction(label_counts=(1, 1)), labels=[1, 0])
    assert scored.scores["label_accuracy"] == Score(value=1.0, n=2)
    assert scored.events == ("label_counts",)
    assert scored.labels == LabelCounts(true=(1, 1), guess=(1, 1))
    assert scored.scores["rouge1"] == Missing(missing="the attack guesses no text")


@pytest.mark.parametrize(
    ("guess", "labels", "accuracy"), [((0, 1), [1] * 4, 1.0), ((1, 2), [0, 1, 1, 0, 1, 1], 1.0), ((0, 1), [0, 1], 0.5)]
)
def test_counts_of_a_batch_of_unknown_size_are_scored_as_shares(
    guess: tuple[int, int], labels: list[int], accuracy: float
) -> None:
    """One label for a batch of one class is right, whatever the size is."""
    scored = _score(Reconstruction(label_counts=guess, counts_are_shares=True), labels=labels)
    assert scored.scores["label_accuracy"] == Score(value=accuracy, n=len(labels))
    assert scored.events == (("label_counts",) if accuracy == 1.0 else ())
    assert scored.labels is not None and scored.labels.guess == guess


def test_wrong_counts_are_no_event() -> None:
    """Half of the labels are right."""
    scored = _score(Reconstruction(label_counts=(2, 0)), labels=[1, 0])
    assert scored.scores["label_accuracy"] == Score(value=0.5, n=2)
    assert scored.events == ()


def test_labels_are_missing_where_nobody_guessed_them_or_there_are_none() -> None:
    """Two different reasons."""
    guessed = _score(Reconstruction(label_counts=(1, 1)), labels=None)
    silent = _score(_sequences(), labels=[0, 1])
    assert guessed.scores["label_accuracy"] == Missing(missing="the batch has no labels of one class a sequence")
    assert silent.scores["label_accuracy"] == Missing(missing="the attack guesses no labels")


def test_means_are_over_the_sequences_that_a_metric_applies_to() -> None:
    """A one-word sentence has no bigram, so it does not count as a zero in ROUGE-2."""
    truth = [TRUTH[0], tuple(TOKENIZER("bird")["input_ids"])]
    guess = _sequences(*truth)
    scored = score(guess, truth, None, None, TOKENIZER, SPECIAL, 8)
    assert scored.scores["rouge2"] == Score(value=1.0, n=1)
    assert scored.scores["rouge1"] == Score(value=1.0, n=2)
    only = score(_sequences(truth[1]), truth[1:], None, None, TOKENIZER, SPECIAL, 8)
    assert only.scores["rouge2"] == Missing(missing="no true sequence is long enough for this metric")
