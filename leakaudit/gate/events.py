"""The events that a policy may limit: what may be recovered from a client step.

An entry of `EVENTS` defines one event: the test whether it happened, the attempts that could have shown it, and its words. Policy,
evaluation, report and the last line of training read this table, so a new event is one more entry (docs/write_a_plugin.md).

Scoring records five events in results.json (`Attempt.events`). Other events, such as `in_reach`, are computed here from the
sequences of an attempt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from leakaudit.results.events import counts_metric
from leakaudit.results.recovery import LEAST_SHARE
from leakaudit.results.schema import Attempt, Kind, Score, SequenceScore


@dataclass(frozen=True)
class Event:
    """Something that may be recovered from a client step.

    In `clause`, `inverted` and `denial`, `{tokens}` stands for the least number of tokens of a sentence (`min_tokens` of the audit), and
    `{any_length}` for the least length that a rule asks for, such as ` of 3+ tokens`, or for nothing.
    """

    happened: Callable[[Attempt], bool]
    """Whether an attempt had the event."""
    decided: Callable[[Attempt], bool]
    """Whether a finished attempt could have shown the event.

    A bag of words cannot show that a sentence was recovered in order, and an attack on text says nothing about labels. If such an
    attempt counted, its step would seem clean."""
    clause: str
    """What happened, as a main clause: `every word of the batch was named`."""
    inverted: str
    """The same after `In none of 59 steps`: `was every word of the batch named`."""
    denial: str
    """What did not happen in the only step: `not every word of the batch was named`."""
    short: str
    """What happened, in a heading of the report: `every word came back`."""
    noun: str
    """What leaked, in a cell of the report: `every word`."""
    verb: str
    """What the step did, in the last line of training: `leaked every word of the batch`."""
    tells: str
    """What one learns from the event, in a sentence of `leakaudit explain`."""
    tells_not: str
    """What one does not learn if it did not happen, in a sentence of `leakaudit explain`."""
    kind: Kind = "text"
    """What an attack must have recovered from its canary step, so that it counts when it does not show the event."""
    any_length: bool = False
    """Whether a text of any length can have the event, so that a rule may say from which length a text counts."""
    long_texts: bool = False
    """Whether only texts of at least `min_tokens` tokens can have the event. If so, steps without such a text are not counted."""
    of_texts: bool = True
    """Whether the event is about texts. If so, a search for a text that gave up leaves the comparison of two defences open."""
    every_word: bool = False
    """Whether every word of a text or of the batch takes part in the event. If so, a step of which some words were not kept cannot show that it
    did not happen."""
    tells_reach: bool = False
    """Whether the sentences about a rule also say how many texts were in reach and not recovered."""
    undecided: str = ""
    """Reason to give if attacks finished and there is still no evidence; empty for the general reason."""


def _recorded(name: str) -> Callable[[Attempt], bool]:
    """Return the test for an event that scoring wrote into the attempt."""
    return lambda attempt: name in attempt.events


def _scored(metric: str) -> Callable[[Attempt], bool]:
    return lambda attempt: isinstance(attempt.scores.get(metric), Score)


def _any_sequence(decides: Callable[[SequenceScore], bool]) -> Callable[[Attempt], bool]:
    return lambda attempt: any(map(decides, attempt.sequences))


def _every_sequence(decides: Callable[[SequenceScore], bool]) -> Callable[[Attempt], bool]:
    """Return the test whether every text is decided that holds a token."""

    def decided(attempt: Attempt) -> bool:
        texts = [sequence for sequence in attempt.sequences if sequence.min_tokens_bucket != "0"]
        return bool(texts) and all(map(decides, texts))

    return decided


def _every_long_one(decides: Callable[[SequenceScore], bool]) -> Callable[[Attempt], bool]:
    """Return the test whether every long text is decided.

    Without a long one, the step is left out anyway, so one decided text is enough.
    """

    def decided(attempt: Attempt) -> bool:
        found = [decides(sequence) for sequence in attempt.sequences if sequence.long_enough]
        return all(found) if found else any(map(decides, attempt.sequences))

    return decided


def _guessed(sequence: SequenceScore) -> bool:
    return sequence.exact is not None


def _most_words_decided(sequence: SequenceScore) -> bool:
    """Return whether recall and precision decide the event.

    With a recall below `LEAST_SHARE`, precision does not matter.
    """
    recall = sequence.token_recall
    return recall is not None and (sequence.token_precision is not None or recall < LEAST_SHARE)


def _in_reach(sequence: SequenceScore) -> bool:
    return sequence.long_enough and sequence.outcome in ("recovered", "search gave up")


EVENTS: dict[str, Event] = {
    "exact_sentence": Event(
        happened=_recorded("exact_sentence"),
        every_word=True,
        decided=_every_long_one(_guessed),
        clause="at least one sentence of {tokens}+ tokens was recovered exactly",
        inverted="was a sentence of {tokens}+ tokens recovered exactly",
        denial="no sentence of {tokens}+ tokens was recovered exactly",
        short="a sentence came back",
        noun="a sentence",
        verb="leaked a sentence",
        tells="A long text of the batch stands word for word in what the attack returned.",
        tells_not="That nothing leaked: shorter texts, single words and paraphrases do not count here.",
        long_texts=True,
        tells_reach=True,
    ),
    "exact_sequence": Event(
        happened=_recorded("exact_sequence"),
        every_word=True,
        decided=_every_sequence(_guessed),
        clause="at least one whole text{any_length} was recovered exactly",
        inverted="was a whole text{any_length} recovered exactly",
        denial="no whole text{any_length} was recovered exactly",
        short="a whole text came back",
        noun="a whole text",
        verb="leaked a whole text",
        tells="A text of the batch stands word for word in what the attack returned, whatever its length.",
        tells_not="Much, if the text has one or two words: those may come back by luck, so let a rule ask for a length (`min_tokens: 3`).",
        any_length=True,
        tells_reach=True,
    ),
    "all_words": Event(
        happened=_recorded("all_words"),
        every_word=True,
        kind="words",
        decided=_scored("token_recall"),
        clause="every word of the batch was named",
        inverted="was every word of the batch named",
        denial="not every word of the batch was named",
        short="every word came back",
        noun="every word",
        verb="leaked every word of the batch",
        tells="Whoever sees the update can list the words of the batch, such as names and diagnoses, in any order.",
        tells_not="That nothing leaked: an attack may name most of the words, or recover one text of many.",
    ),
    "most_words": Event(
        happened=_recorded("most_words"),
        kind="words",
        decided=_every_long_one(_most_words_decided),
        clause="at least half of the words of a text of {tokens}+ tokens came back",
        inverted="did half of the words of a text of {tokens}+ tokens come back",
        denial="less than half of the words of each text of {tokens}+ tokens came back",
        short="most words of a text came back",
        noun="most words of a text",
        verb="leaked most words of a text",
        tells="Enough of a text is known to say what it is about.",
        tells_not="That nothing leaked: fewer words may be the ones that matter, such as a name.",
        long_texts=True,
    ),
    "in_reach": Event(
        happened=_any_sequence(_in_reach),
        every_word=True,
        decided=_every_long_one(lambda sequence: sequence.outcome is not None),
        clause="a text of {tokens}+ tokens was in reach of an attack",
        inverted="was a text of {tokens}+ tokens in reach of an attack",
        denial="no text of {tokens}+ tokens was in reach of an attack",
        short="a text was in reach",
        noun="a text in reach",
        verb="had a text in reach of an attack",
        tells="The update held enough evidence for a text, whether or not the search found it. The text is not protected.",
        tells_not="That a text is safe if it was out of reach: another attack may reach it.",
        long_texts=True,
        undecided="no attack that finished can tell what was in reach of its search",
    ),
    "label_counts": Event(
        happened=_recorded("label_counts"),
        kind="labels",
        decided=lambda attempt: isinstance(attempt.scores.get(counts_metric(attempt)), Score),
        clause="the label counts were recovered exactly",
        inverted="were the label counts recovered exactly",
        denial="the label counts were not recovered exactly",
        short="the label counts came back",
        noun="the label counts",
        verb="leaked its label counts",
        tells="How many examples of each class the batch has is known, for instance how many patients with a diagnosis.",
        tells_not="Which example has which label, and nothing about the texts.",
        of_texts=False,
    ),
}
"""Name in a policy -> event. `in_reach`: a text was recovered, or a search that would have accepted it gave up."""


def could_show(attempt: Attempt, name: str) -> bool:
    """Return whether a finished attempt could have shown an event."""
    event = EVENTS[name]
    return event.happened(attempt) or event.decided(attempt)
