"""The events in results.json, computed again from the scores of an attempt."""

from __future__ import annotations

from leakaudit.results.recovery import LEAST_SHARE
from leakaudit.results.schema import Attempt, Score, SequenceScore

EVENTS = ("exact_sentence", "exact_sequence", "all_words", "most_words", "label_counts")
"""Events that scoring writes into an attempt. `leakaudit.gate.events` has these and the events that only the gate computes."""


def shown_events(attempt: Attempt) -> dict[str, bool]:
    """Return for each event whether it follows from the scores of an attempt."""
    exact = [sequence for sequence in attempt.sequences if sequence.exact]
    return {
        "exact_sentence": any(sequence.long_enough for sequence in exact),
        "exact_sequence": bool(exact),
        "all_words": _all_words(attempt),
        "most_words": any(map(_most_words, attempt.sequences)),
        "label_counts": _label_counts(attempt),
    }


def _most_words(sequence: SequenceScore) -> bool:
    recall, precision = sequence.token_recall, sequence.token_precision
    return sequence.long_enough and (recall or 0.0) >= LEAST_SHARE and (precision or 0.0) >= LEAST_SHARE


def _all_words(attempt: Attempt) -> bool:
    """Return whether every word is in a guess that is at least half right.

    In results without a precision (before 1.2) recall alone decides.
    """
    half_right = "token_precision" not in attempt.scores or at_least(attempt, "token_precision", LEAST_SHARE)
    return at_least(attempt, "token_recall", 1.0) and half_right


def _label_counts(attempt: Attempt) -> bool:
    """Return whether the label counts were recovered exactly.

    `label_exact` is a `Missing` if an exact match could be chance.
    """
    return at_least(attempt, counts_metric(attempt), 1.0)


def counts_metric(attempt: Attempt) -> str:
    """Return the metric that decides whether the label counts were recovered.

    It is `label_exact`, or `label_accuracy` in results that do not have it.
    """
    return "label_exact" if "label_exact" in attempt.scores else "label_accuracy"


def at_least(attempt: Attempt, metric: str, least: float) -> bool:
    """Return whether an attempt has a score of at least `least`."""
    score = attempt.scores.get(metric)
    return isinstance(score, Score) and score.value >= least
