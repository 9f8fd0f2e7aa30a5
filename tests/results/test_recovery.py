"""What came back, in words."""

from __future__ import annotations

import pytest

from leakaudit.results.recovery import Recovery, Severity, in_words, is_silent, join, recovered, severity
from leakaudit.results.schema import Attempt, VerificationStatus
from tests.support.factories import attempt, results, sequence, step, with_scores


def got(
    *, recall: float, precision: float | None, bag: bool = True, long_enough: bool = True, **extra: object
) -> Attempt:
    """Build an attempt on one text with the recall and precision of its words."""
    found = sequence(recall=recall, bag=bag, long_enough=long_enough)
    found = with_scores(found, token_precision=precision, **({} if bag else {"exact": 0.0}))
    return attempt(0, "rows").model_copy(update={"sequences": (found,), "events": (), **extra})


@pytest.mark.parametrize(
    ("done", "expected"),
    [
        (attempt(0, leaks=True), Severity.SENTENCE),
        (got(recall=1.0, precision=1.0), Severity.WORDS),
        (got(recall=0.5, precision=0.5), Severity.WORDS),
        (got(recall=1.0, precision=0.01), Severity.NOTHING),  # a bag of the whole vocabulary
        (got(recall=1.0, precision=None), Severity.NOTHING),  # a bag that nobody weighed
        (got(recall=1.0, precision=None, events=("all_words",)), Severity.WORDS),
        (got(recall=0.9, precision=None, bag=False), Severity.WORDS),  # results before 1.2: ROUGE-L 0.9
        (got(recall=0.9, precision=0.9, long_enough=False), Severity.NOTHING),
        (got(recall=0.4, precision=1.0), Severity.NOTHING),
        (attempt(0, kind="labels", leaks=True), Severity.LABELS),
        (attempt(0), Severity.NOTHING),
    ],
)
def test_labels_are_less_than_words_and_words_are_less_than_a_sentence(done: Attempt, expected: Severity) -> None:
    """Words need precision: a bag of everything names every word."""
    assert severity([attempt(0), done]) is expected


def test_each_text_is_counted_once_by_the_attack_that_got_most() -> None:
    """Texts under another defence or from another batch are not counted."""
    attempts = [
        got(recall=1.0, precision=1.0),
        attempt(0, "span"),
        attempt(0, "llg", kind="labels", leaks=True),
        attempt(1, leaks=True),
        attempt(2, leaks=True),
        attempt(3, defense="prune", leaks=True),
    ]
    found = recovered(results([step(0), step(1), step(2, VerificationStatus.MISMATCH), step(3)], attempts))
    assert found == Recovery(steps=2, texts=2, exact=1, all_words=1, most_words=0, label_steps=1)
    assert in_words(found) == "1 of 2 texts word for word, every word of 1 of 2 texts and all labels of 1 of 2 steps"
    assert in_words(recovered(results())) == "" and join(["a"]) == "a"


def test_an_unverifiable_step_is_silent_until_something_comes_back() -> None:
    """A verified step speaks either way."""
    unverifiable = step(0, VerificationStatus.UNVERIFIABLE)
    assert is_silent(unverifiable, [attempt(0)]) and not is_silent(unverifiable, [attempt(0, leaks=True)])
    assert not is_silent(step(0), [attempt(0)])
