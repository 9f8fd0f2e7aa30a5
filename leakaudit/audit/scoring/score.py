"""Scores of one attempt by the registered metrics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from leakaudit.audit.scoring.assignment import match
from leakaudit.audit.scoring.patterns import bag_pattern, token_pattern
from leakaudit.metrics.masked_token_recall import MaskedTokenRecall, masked_bag_recall
from leakaudit.metrics.nerr import bag_nerr
from leakaudit.metrics.semantic_similarity import SemanticSimilarity
from leakaudit.metrics.token_precision import bag_precision
from leakaudit.metrics.token_recall import bag_recall
from leakaudit.plugins.metric_protocol import Batch, Guess, LabelCounts, Pair, TaggedEntities
from leakaudit.registry import metrics
from leakaudit.results.recovery import LEAST_SHARE
from leakaudit.results.schema import Measured, Missing, Score

NO_TEXT = Missing(missing="the attack guesses no text")
ONLY_WORDS = Missing(missing="the attack guesses a bag of words and no sequences")
TOO_SHORT = Missing(missing="no true sequence is long enough for this metric")
NO_GUESSED_LABELS = Missing(missing="the attack guesses no labels")
NO_TRUE_LABELS = Missing(missing="the batch has no labels of one class a sequence")
NOTHING_MASKED = Missing(missing=MaskedTokenRecall.missing_because)
NOTHING_NAMED = Missing(missing="the attack named no token, so none is right or wrong")
CHANCE_COUNTS = Missing(
    missing="the attack cannot tell its label counts from chance, so that an exact hit would say nothing"
)


Tagger = Callable[[Sequence[str]], list[tuple[str, ...]]]
"""Returns the named entities of each text, in its spelling."""


class Guesses(Protocol):
    """What an attack returns; a property is None if the attack does not guess it."""

    @property
    def sequences(self) -> Sequence[Guess] | None:
        """Whole sequences."""
        ...

    @property
    def tokens(self) -> tuple[int, ...] | None:
        """A bag of token ids."""
        ...

    @property
    def label_counts(self) -> tuple[int, ...] | None:
        """(C,) number of sequences of each class."""
        ...

    @property
    def counts_told(self) -> bool:
        """Whether the attack can tell its counts from chance.

        If not, the counts are an estimate, and exact counts are no event.
        """
        ...

    @property
    def counts_are_shares(self) -> bool:
        """Whether only the proportions of the counts are meant."""
        ...


@dataclass(frozen=True)
class ScoredSequence:
    """How much of one true sequence was recovered."""

    pair: Pair
    """The guess side is empty for an attack that guesses a bag of tokens or no text."""
    numbers: Mapping[str, float | None]
    """Sequence-level metric -> number; None if the metric does not apply to this sequence."""
    long_enough: bool
    """Whether it has at least as many tokens as a sentence event requires."""
    true_pattern: str
    """One `TokenMatch` for each token of `pair.true_ids`."""
    guess_pattern: str | None
    """One for each token of `pair.guess_ids`; None for an attack that guesses a bag of tokens or no text."""


@dataclass(frozen=True)
class Scored:
    """Numbers of one attempt, with the private text that they compare.

    Results and reports decide which part of the text they show.
    """

    sequences: tuple[ScoredSequence, ...]
    """In the order of the batch."""
    scores: Mapping[str, Measured]
    """Name of each applied metric -> its value for the step, or why there is no value.

    Metrics that need a model of their own are applied only if the audit names the model.
    """
    events: tuple[str, ...] = ()
    """Names of events as in `leakaudit.results.schema.Attempt.events`."""
    labels: LabelCounts | None = field(default=None)
    """True and guessed counts; None unless both are known."""


def score(
    reconstruction: Guesses,
    truth_sequences: Sequence[Sequence[int]],
    truth_labels: Sequence[int] | None,
    num_labels: int | None,
    tokenizer: Any,
    special_ids: AbstractSet[int],
    min_tokens: int,
    masked: Sequence[Sequence[int]] | None = None,
    entities: Sequence[tuple[str, ...] | None] | None = None,
    tagger: Tagger | None = None,
) -> Scored:
    """Score one reconstruction.

    Guessed and true sequences are matched one-to-one. A sequence-level metric of the step is the mean over the sequences to which it
    applies. A bag of tokens has only token recall, token precision, masked-token recall and named entities. The recall of a step is computed over the
    distinct tokens of the batch, the recall of a sequence over its own distinct tokens. Step and sequences have the same precision: the
    share of the bag that occurs anywhere in the batch.

    Counts that are meant as shares are compared with the shares of the true counts: both are multiplied up to the same number of labels.

    Args:
        reconstruction: the attack's guess.
        truth_sequences: B true sequences without padding.
        truth_labels: B classes; None if the task has no classes.
        num_labels: C; None if the task has no classes.
        tokenizer: decodes ids to text.
        special_ids: token ids that are left out everywhere.
        min_tokens: number of tokens that a sequence must have to count as a sentence in an event; special tokens do not count.
        masked: for each true sequence, the tokens that a mask hid from the model; None if no token was hidden.
        entities: for each true sequence, its named entities as the data spells them, or None; None if the data names none.
        tagger: finds the named entities of texts; None if nobody named a tagger.
    """

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    pairs = match(reconstruction.sequences or (), truth_sequences, decode, special_ids, masked)
    pairs = _with_entities(pairs, entities, tagger)
    labels = _label_counts(reconstruction.label_counts, truth_labels, num_labels)
    scores: dict[str, Measured] = _label_scores(labels, truth_labels, reconstruction.counts_are_shares)
    if labels is not None and not reconstruction.counts_told:
        scores["label_exact"] = CHANCE_COUNTS
    if reconstruction.sequences is not None:
        sequences = tuple(_scored_sequence(pair, min_tokens) for pair in pairs)
        scores |= {name: _mean(name, sequences) for name in _names("sequence")}
        scores |= _of_batch(Batch(tuple(pairs), len(reconstruction.sequences)))
    elif reconstruction.tokens is not None:
        sequences, of_bag = _scored_bag(pairs, reconstruction.tokens, min_tokens, decode)
        scores |= of_bag
    else:
        sequences = tuple(_unordered(pair, (), {}, min_tokens) for pair in pairs)
        scores |= {name: NO_TEXT for name in (*_names("sequence"), *_names("batch"))}
    return Scored(sequences, scores, _events(sequences, scores), labels)


def applied_metrics(sentence_model: Path | None) -> list[tuple[str, type]]:
    """Return name and class of the metrics that score an attempt.

    Args:
        sentence_model: folder of the model for `semantic_similarity`; None leaves that metric out.
    """
    return [(name, kind) for name, kind in metrics if not kind.needs_model or sentence_model is not None]


def _names(level: str) -> list[str]:
    """Return the names of a level's metrics that need no model of their own."""
    return [name for name, kind in metrics if kind.level == level and not kind.needs_model]


def _scored_sequence(pair: Pair, min_tokens: int) -> ScoredSequence:
    return ScoredSequence(
        pair=pair,
        numbers={name: metrics[name]()(pair) for name in _names("sequence")},
        long_enough=len(pair.true_ids) >= min_tokens,
        true_pattern=token_pattern(pair.true_ids, pair.guess_ids),
        guess_pattern=token_pattern(pair.guess_ids, pair.true_ids),
    )


def _scored_bag(
    pairs: Sequence[Pair], bag: Sequence[int], min_tokens: int, decode: Callable[[Sequence[int]], str]
) -> tuple[tuple[ScoredSequence, ...], dict[str, Measured]]:
    """Score a bag of tokens against each sequence and against the whole batch."""
    batch = tuple(chain.from_iterable(pair.true_ids for pair in pairs))
    precision = bag_precision(batch, bag) if batch else None
    sequences = tuple(
        _unordered(
            pair,
            bag,
            {
                "token_recall": bag_recall(pair.true_ids, bag),
                "token_precision": precision,
                "nerr": bag_nerr(pair, bag, decode),
            },
            min_tokens,
        )
        for pair in pairs
    )
    scores: dict[str, Measured] = {name: ONLY_WORDS for name in (*_names("sequence"), *_names("batch"))}
    scores["token_recall"] = _bag_score(bag_recall(batch, bag), TOO_SHORT, len(pairs))
    scores["token_precision"] = _bag_score(precision, NOTHING_NAMED if batch else TOO_SHORT, len(pairs))
    scores["nerr"] = _mean("nerr", sequences)
    scores["masked_token_recall"] = _bag_score(_masked_recall(pairs, bag), NOTHING_MASKED, len(pairs))
    return sequences, scores


def _unordered(pair: Pair, bag: Sequence[int], numbers: Mapping[str, float | None], min_tokens: int) -> ScoredSequence:
    """Return the score of a sequence that was not guessed as a sequence."""
    return ScoredSequence(
        pair=pair,
        numbers=dict.fromkeys(_names("sequence")) | dict(numbers),
        long_enough=len(pair.true_ids) >= min_tokens,
        true_pattern=bag_pattern(pair.true_ids, bag),
        guess_pattern=None,
    )


def _mean(name: str, sequences: Sequence[ScoredSequence]) -> Measured:
    values = [value for sequence in sequences if (value := sequence.numbers[name]) is not None]
    if values:
        return Score(value=fmean(values), n=len(values))
    if reason := metrics[name].missing_because:
        return Missing(missing=reason)
    unguessed = name == "token_precision" and any(sequence.pair.true_ids for sequence in sequences)
    return NOTHING_NAMED if unguessed else TOO_SHORT


def _of_batch(batch: Batch) -> dict[str, Measured]:
    """Return the metrics of level `batch`."""
    values = {name: metrics[name]()(batch) for name in _names("batch")}
    reasons = {name: metrics[name].missing_because if not batch.guesses else "" for name in values}
    return {
        name: Score(value=value)
        if value is not None
        else Missing(missing=reasons[name])
        if reasons[name]
        else TOO_SHORT
        for name, value in values.items()
    }


def _with_entities(
    pairs: Sequence[Pair], entities: Sequence[tuple[str, ...] | None] | None, tagger: Tagger | None
) -> list[Pair]:
    """Add the named entities of each true text, from the data or else from a tagger."""
    named = entities if entities is not None and len(entities) == len(pairs) else [None] * len(pairs)
    if tagger is None:
        return [replace(pair, entities=given) for pair, given in zip(pairs, named, strict=True)]
    true, guess = tagger([pair.true_text for pair in pairs]), tagger([pair.guess_text for pair in pairs])
    return [
        replace(pair, entities=of_true if given is None else given, tagged=TaggedEntities(of_true, of_guess))
        for pair, given, of_true, of_guess in zip(pairs, named, true, guess, strict=True)
    ]


def _masked_recall(pairs: Sequence[Pair], bag: Sequence[int]) -> float | None:
    """Return the share of the masked words that a bag names.

    Only words count that are not visible anywhere in the batch.
    """
    masked = [token for pair in pairs for token in pair.masked_ids]
    visible: Counter[int] = Counter()
    for pair in pairs:
        visible += Counter(pair.true_ids) - Counter(pair.masked_ids)
    return masked_bag_recall(masked, list(visible), bag)


def _bag_score(value: float | None, reason: Missing, n: int) -> Measured:
    return reason if value is None else Score(value=value, n=n)


def _label_counts(
    guess: Sequence[int] | None, truth_labels: Sequence[int] | None, num_labels: int | None
) -> LabelCounts | None:
    if guess is None or truth_labels is None or num_labels is None:
        return None
    return LabelCounts(true=tuple(truth_labels.count(c) for c in range(num_labels)), guess=tuple(guess))


def _label_scores(labels: LabelCounts | None, truth_labels: Sequence[int] | None, shares: bool) -> dict[str, Measured]:
    if labels is None:
        reason = NO_TRUE_LABELS if truth_labels is None else NO_GUESSED_LABELS
        return {name: reason for name in _names("step")}
    compared = _as_shares(labels) if shares else labels
    values = {name: metrics[name]()(compared) for name in _names("step")}
    n = sum(labels.true)
    return {name: NO_TRUE_LABELS if v is None else Score(value=v, n=n) for name, v in values.items()}


def _as_shares(labels: LabelCounts) -> LabelCounts:
    """Return the same shares as counts of equally many labels.

    >>> _as_shares(LabelCounts(true=(0, 4), guess=(0, 1)))
    LabelCounts(true=(0, 4), guess=(0, 4))
    """
    true, guess = sum(labels.true), sum(labels.guess)
    if not true or not guess:
        return labels
    whole = math.lcm(true, guess)
    return LabelCounts(
        tuple(count * (whole // true) for count in labels.true),
        tuple(count * (whole // guess) for count in labels.guess),
    )


def _events(sequences: Sequence[ScoredSequence], scores: Mapping[str, Measured]) -> tuple[str, ...]:
    """Return the leak events that the scores show.

    The scores of the step and of its sequences are enough to compute every event again.
    """
    exact = [sequence for sequence in sequences if sequence.numbers["exact"] == 1.0]
    happened = {
        "exact_sentence": any(sequence.long_enough for sequence in exact),
        "exact_sequence": bool(exact),
        "all_words": _at_least(scores["token_recall"], 1.0) and _at_least(scores["token_precision"], LEAST_SHARE),
        "most_words": any(sequence.long_enough and _most_words(sequence) for sequence in sequences),
        "label_counts": _at_least(scores["label_exact"], 1.0),
    }
    return tuple(name for name, yes in happened.items() if yes)


def _most_words(sequence: ScoredSequence) -> bool:
    recall, precision = sequence.numbers["token_recall"], sequence.numbers["token_precision"]
    return recall is not None and precision is not None and recall >= LEAST_SHARE and precision >= LEAST_SHARE


def _at_least(measured: Measured, bar: float) -> bool:
    return isinstance(measured, Score) and measured.value >= bar


def with_similarity(scored: Scored, metric: SemanticSimilarity) -> Scored:
    """Add semantic similarity to every sequence and, as their mean, to the step.

    If no sequence was guessed, it is missing for the same reason as `exact`.

    Raises:
        ModelError: the sentence model does not exist.
    """
    measured = scored.scores["exact"]
    if not isinstance(measured, Score):
        return replace(scored, scores={**scored.scores, metric.name: measured})
    sequences = tuple(replace(s, numbers={**s.numbers, metric.name: metric(s.pair)}) for s in scored.sequences)
    return replace(scored, sequences=sequences, scores={**scored.scores, metric.name: _mean(metric.name, sequences)})
