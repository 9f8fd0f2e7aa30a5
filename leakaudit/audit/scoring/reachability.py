"""Reachability: which true tokens and sequences an attack could have found.

A token was in reach if it was among the candidates. A sequence was in reach if it would have passed the attack's own test.

A recall of 40 % may mean that 60 % of the tokens cannot be read out of the update, or that the search stopped too early. The
first is protection, the second is not. An attack that can tell the difference returns a `Reach` with its guess. After the attack has
returned, this module asks the `Reach` about the truth. The answers are stored with the scores, and no attack ever gets them.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from leakaudit.results.schema import Measured, Missing, Score

NO_REACH = Missing(missing="the attack does not say what it could have reached")
NO_TEST = Missing(missing="this attack has no test that a whole sequence could pass")
NO_WORDS = Missing(missing="the batch holds special tokens only")


class Reach(Protocol):
    """Account of what an attack could have found.

    `leakaudit.plugins.attack_protocol.Reach` is the type that an attack returns.
    """

    def tokens(self, ids: tuple[int, ...]) -> tuple[bool, ...]:
        """Return for each token whether it was a candidate at its place."""
        ...

    def passes(self, ids: tuple[int, ...]) -> bool | None:
        """Return whether the sequence would pass the attack's own test.

        None if the attack has no test.
        """
        ...


@dataclass(frozen=True)
class ReachedSequence:
    """What was in reach of one true sequence."""

    share: float | None
    """Share of its tokens that were candidates; special tokens do not count. None if it has only special tokens or the share is unknown."""
    passes: bool | None
    """Whether it would have passed the attack's own test; None if there is no test or the answer is unknown."""


@dataclass(frozen=True)
class Reached:
    """What was in reach of one attempt."""

    tokens: Measured
    """Mean of the sequences' shares, as `token_recall` is a mean over sequences."""
    sequences: Measured
    """Share of the tested sequences that would have passed; `n` is the number of tested sequences."""
    by_sequence: tuple[ReachedSequence, ...]
    """In the order of the batch."""


def reachability(
    reach: Reach | None, truth_sequences: Sequence[Sequence[int]], special_ids: AbstractSet[int]
) -> Reached:
    """Return what was in reach of an attack.

    Args:
        reach: the attack's answers; None if it gives no answers.
        truth_sequences: B true sequences without padding.
        special_ids: not counted among the tokens, as in `token_recall`.

    Raises:
        ValueError: an answer does not fit its question.
        Exception: any exception of the attack's own code.

    >>> class Even:
    ...     def tokens(self, ids): return tuple(i % 2 == 0 for i in ids)
    ...     def passes(self, ids): return None
    >>> reachability(Even(), [(2, 5, 7), (6,)], special_ids={7}).tokens
    Score(value=0.75, n=2)
    """
    if reach is None:
        return unknown(NO_REACH, len(truth_sequences))
    found = tuple(_ask(reach, tuple(ids), special_ids) for ids in truth_sequences)
    shares = [sequence.share for sequence in found if sequence.share is not None]
    tested = [sequence.passes for sequence in found if sequence.passes is not None]
    return Reached(
        tokens=Score(value=fmean(shares), n=len(shares)) if shares else NO_WORDS,
        sequences=Score(value=fmean(tested), n=len(tested)) if tested else NO_TEST,
        by_sequence=found,
    )


def unknown(reason: Missing, count: int) -> Reached:
    """Return the record of `count` sequences whose reach is unknown."""
    return Reached(reason, reason, (ReachedSequence(None, None),) * count)


def _ask(reach: Reach, ids: tuple[int, ...], special_ids: AbstractSet[int]) -> ReachedSequence:
    answers, passes = reach.tokens(ids), reach.passes(ids)
    if len(answers) != len(ids):
        raise ValueError(f"asked about {len(ids)} tokens, got {len(answers)} answers")
    if passes is not None and not isinstance(passes, bool):
        raise ValueError(f"asked whether a sequence passes, got {type(passes).__name__}")
    words = [bool(answer) for answer, token in zip(answers, ids, strict=True) if token not in special_ids]
    return ReachedSequence(fmean(words) if words else None, passes)
