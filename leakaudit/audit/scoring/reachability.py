"""Reachability: which true tokens and sequences an attack could have found.

A token was in reach if it was among the candidates; a sequence, if it would have passed the attack's own test.

A recall of 40 % may mean that 60 % of the tokens cannot be read out of the update, or that the search stopped too early. The
first is protection, the second is not. An attack that can tell returns a `Reach` with its guess; it is asked here, about the
truth, after the attack has returned, and the answers stand beside the scores. They never go back into an attack.
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
    """As an attack returns it (`leakaudit.plugins.attack_protocol.Reach`)."""

    def tokens(self, ids: tuple[int, ...]) -> tuple[bool, ...]:
        """Return for each token whether it was a candidate at its place."""
        ...

    def passes(self, ids: tuple[int, ...]) -> bool | None:
        """Return whether the sequence would pass the attack's own test.

        None where the attack has no test.
        """
        ...


@dataclass(frozen=True)
class ReachedSequence:
    """What was in reach of one true sequence."""

    share: float | None
    """Share of its tokens, special ones aside, that were candidates; None without such tokens, or where unknown."""
    passes: bool | None
    """Whether it would have passed the attack's own test; None where there is none, or where unknown."""


@dataclass(frozen=True)
class Reached:
    """What was in reach of one attempt."""

    tokens: Measured
    """Mean of the sequences' shares, as `token_recall` is a mean over sequences."""
    sequences: Measured
    """Share of the sequences that would have passed; its `n` counts those that could be tested."""
    by_sequence: tuple[ReachedSequence, ...]
    """In the order of the batch."""


def reachability(
    reach: Reach | None, truth_sequences: Sequence[Sequence[int]], special_ids: AbstractSet[int]
) -> Reached:
    """Ask what was in reach.

    Args:
        reach: the attack's, None where it cannot say.
        truth_sequences: B true sequences without padding.
        special_ids: not counted among the tokens, as in `token_recall`.

    Raises:
        ValueError: an answer does not fit its question.
        Exception: whatever the attack's own code raises.

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
    """Return what is stored for `count` sequences where nothing could be found out."""
    return Reached(reason, reason, (ReachedSequence(None, None),) * count)


def _ask(reach: Reach, ids: tuple[int, ...], special_ids: AbstractSet[int]) -> ReachedSequence:
    answers, passes = reach.tokens(ids), reach.passes(ids)
    if len(answers) != len(ids):
        raise ValueError(f"asked about {len(ids)} tokens, got {len(answers)} answers")
    if passes is not None and not isinstance(passes, bool):
        raise ValueError(f"asked whether a sequence passes, got {type(passes).__name__}")
    words = [bool(answer) for answer, token in zip(answers, ids, strict=True) if token not in special_ids]
    return ReachedSequence(fmean(words) if words else None, passes)
