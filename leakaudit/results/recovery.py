"""The recovery: what was recovered from the audited batches, under any policy.

A rule asks about one event, but a reader wants to know whether anything was recovered. These functions say that in words for the headline
of a
verdict, the report and the terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from leakaudit.results.schema import Attempt, Results, SequenceScore, StepRecord

LEAST_SHARE = 0.5
"""Least recall and precision of a text of which "most words" were recovered. Our choice: half of the words of a text, in any order,
reveal its subject. Half of the guess must be right, so a guess that names the whole vocabulary is not a leak."""

FOUND = 0.25
"""A text counts as found if its ROUGE-L is above this. Source: FILM (Gupta et al. 2022), Sec. 6.2, "strong leakage", and Table 3."""

_WORD_EVENTS = ("all_words", "most_words")


class Severity(IntEnum):
    """The severity of a leak, from nothing to a whole sentence."""

    NOTHING = 0
    LABELS = 1
    WORDS = 2
    SENTENCE = 3


@dataclass(frozen=True)
class Recovery:
    """Counts of recovered texts and labels, over all attacks together."""

    steps: int
    """Steps that were attacked."""
    texts: int
    """True texts for which at least one attack has a token recall."""
    exact: int
    """Texts that were recovered word for word."""
    all_words: int
    """Texts of which every word was recovered in any order, without those in `exact`."""
    most_words: int
    """Texts of at least `min_tokens` tokens of which at least half of the words were recovered in any order, without those counted
    above."""
    label_steps: int
    """Steps whose label counts were recovered exactly."""


def severity(attempts: Iterable[Attempt]) -> Severity:
    """Return the worst leak of any of `attempts`.

    Leaked words are found by the events and by the scores of every text that is long enough. Results before 1.2 have no event
    `most_words`, and they must not seem clean for that reason.
    """
    worst = Severity.NOTHING
    for attempt in attempts:
        if "exact_sentence" in attempt.events or "exact_sequence" in attempt.events:
            return Severity.SENTENCE
        if any(name in attempt.events for name in _WORD_EVENTS) or any(map(_has_most, attempt.sequences)):
            worst = max(worst, Severity.WORDS)
        elif "label_counts" in attempt.events:
            worst = max(worst, Severity.LABELS)
    return worst


def amount(found: SequenceScore) -> float | None:
    """Return how much of one text was recovered, 0 to 1.

    It is the larger of two measures: ROUGE-L for words in order, and the harmonic mean of recall and precision for words in any order.
    The latter is near zero for a bag of the whole vocabulary. Without a precision (results before 1.2) ROUGE-L alone counts, or the
    recall if there is no ROUGE-L. The result is None if nothing was guessed.
    """
    recall, precision, in_order = found.token_recall, found.token_precision, found.scores.get("rougeL")
    if recall is None:
        return in_order
    if precision is None:
        return recall if in_order is None else in_order
    words = 2 * recall * precision / (recall + precision) if recall + precision else 0.0
    return max(words, in_order or 0.0)


def is_silent(step: StepRecord, attempts: Iterable[Attempt]) -> bool:
    """Return whether a step is unverified and without a leak, so not evidence."""
    return not step.verification.status.bounds and severity(attempts) is Severity.NOTHING


def recovered(results: Results, defense: str = "none") -> Recovery:
    """Count what was recovered under one defence, over all attacked steps.

    `none` is the update as the run sends it.
    """
    attacked = {step.id for step in results.steps if step.verification.status.attacked}
    attempts = [a for a in results.attempts if a.defense == defense and a.step in attacked]
    by_text: dict[tuple[str, str], list[_Kind]] = {}
    for attempt in attempts:
        for sequence in attempt.sequences:
            if sequence.token_recall is not None:
                by_text.setdefault((attempt.step, sequence.id), []).append(_kind(sequence, attempt))
    kinds = [max(found) for found in by_text.values()]
    return Recovery(
        steps=len({a.step for a in attempts}),
        texts=len(kinds),
        exact=kinds.count(_Kind.EXACT),
        all_words=kinds.count(_Kind.ALL_WORDS),
        most_words=kinds.count(_Kind.MOST_WORDS),
        label_steps=len({a.step for a in attempts if "label_counts" in a.events}),
    )


def in_words(found: Recovery) -> str:
    """Return in words what was recovered, from most to least; empty for nothing.

    >>> in_words(Recovery(1, 8, exact=0, all_words=8, most_words=0, label_steps=1))
    'every word of 8 of 8 texts and all labels'
    """
    texts = f"of {found.texts} {'text' if found.texts == 1 else 'texts'}"
    parts = [f"{found.exact} {texts} word for word"] if found.exact else []
    if found.all_words:
        parts.append(f"every word of {found.all_words} {texts}")
    if found.most_words:
        parts.append(f"at least half of the words of {found.most_words} {texts}")
    if found.label_steps:
        where = "" if found.steps == 1 else f" of {found.label_steps} of {found.steps} steps"
        parts.append(f"all labels{where}")
    return join(parts)


def join(parts: Sequence[str]) -> str:
    """Return parts of a sentence joined: `a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


class _Kind(IntEnum):
    """How much of one text an attack recovered."""

    LESS = 0
    MOST_WORDS = 1
    ALL_WORDS = 2
    EXACT = 3


def _kind(found: SequenceScore, attempt: Attempt) -> _Kind:
    """Return how much of one text was recovered.

    If every word is named, the precision of the guess or the event `all_words` of the attempt decides.
    """
    if found.exact:
        return _Kind.EXACT
    if found.token_recall == 1.0 and (_precise(found) or "all_words" in attempt.events):
        return _Kind.ALL_WORDS
    return _Kind.MOST_WORDS if _has_most(found) else _Kind.LESS


def _has_most(found: SequenceScore) -> bool:
    return found.long_enough and (found.token_recall or 0.0) >= LEAST_SHARE and _precise(found)


def _precise(found: SequenceScore) -> bool:
    """Return whether at least half of the guess is right.

    Without a precision (results before 1.2) the overlap in order decides.
    """
    if found.token_precision is not None:
        return found.token_precision >= LEAST_SHARE
    return (found.scores.get("rougeL") or 0.0) >= LEAST_SHARE
