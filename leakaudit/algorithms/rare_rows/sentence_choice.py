"""The beginnings of sentences that a search keeps.

Beginnings are in groups: those of a group have the same first tokens. A group has a limited number of places, so that the variants of one sentence do not
take all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from leakaudit.algorithms.rare_rows.sentence_scores import Scored, SentenceScores

RIVALS, LATE_RIVALS = 4, 2
"""Groups that may share a token that occurs once, up to four tokens and behind them. Our choice: a beginning with a wrong first token is soon worse."""

T = TypeVar("T")
Item = tuple[float, tuple[int, ...], T]
"""A beginning's value, its tokens, and what belongs to it."""


@dataclass(frozen=True)
class Widths:
    """How many beginnings a search goes through."""

    kept: int
    """Most beginnings of one length that are kept."""
    simulated: int
    """Most beginnings of one length that are simulated."""
    first_simulated: int
    """The same for beginnings of two and of three tokens."""
    near: int
    """Next tokens of each beginning that its state proposes."""
    kept_alike: int
    """Most beginnings of a group that are kept."""
    simulated_alike: int
    """Most beginnings of a group that are simulated."""


UNTIED = Widths(kept=1024, simulated=3072, first_simulated=3072, near=8, kept_alike=8, simulated_alike=16)
"""For tables that are not tied. Chosen on training texts: a true next token is nearly always the first, so that groups are small."""

TIED = Widths(kept=512, simulated=768, first_simulated=2304, near=8, kept_alike=8, simulated_alike=32)
"""For tied tables. Chosen on training texts: searches of three times this width find no more sentences in the same time."""


def best_of(items: Iterable[Item[T]], most: int, alike: int, begin: int) -> list[T]:
    """Return what belongs to the best beginnings.

    Args:
        items: the beginnings.
        most: beginnings to return.
        alike: most beginnings of a group.
        begin: number of first tokens that make a group.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    kept: list[T] = []
    for _, tokens, item in sorted(items, key=lambda one: -one[0]):
        if counts[tokens[:begin]] < alike:
            counts[tokens[:begin]] += 1
            kept.append(item)
        if len(kept) == most:
            break
    return kept


def without_rivals(scores: SentenceScores, items: Iterable[Item[T]], begin: int, rivals: int) -> Iterator[Item[T]]:
    """Yield beginnings, the best first, without those whose rows better ones explain.

    A token that follows one prefix only is in one sentence, so it is left to the best few groups.

    Args:
        scores: the rows.
        items: the beginnings.
        begin: number of first tokens that make a group.
        rivals: most groups for one such token.
    """
    users: dict[int, set[tuple[int, ...]]] = {}
    for item in sorted(items, key=lambda one: -one[0]):
        group = item[1][:begin]
        single = [users.setdefault(token, set()) for token in item[1][1:] if scores.count(token) == 1]
        if all(group in known or len(known) < rivals for known in single):
            for known in single:
                known.add(group)
            yield item


class TakenStates:
    """The states of the rows that found sentences take."""

    def __init__(self, scores: SentenceScores) -> None:
        """Start without sentences.

        Args:
            scores: the rows.
        """
        self._scores = scores
        self._left: dict[tuple[int, ...], float] = {}
        self._used: Counter[int] = Counter()

    def add(self, found: Scored) -> None:
        """Take the states of a found sentence, unless others took them.

        It replaces a sentence that it continues if it agrees better.
        """
        shorter = self._continued(found.tokens)
        if self.leave(found.tokens) and found.left < self._left.get(shorter, inf):
            if shorter:
                del self._left[shorter]
                self._used.subtract(shorter[1:])
            self._left[found.tokens] = found.left
            self._used.update(found.tokens[1:])

    def leave(self, tokens: tuple[int, ...]) -> bool:
        """Return whether a beginning finds enough states.

        It may use those of the found sentence that it continues.
        """
        own = self._continued(tokens)
        return self._scores.fits(self._used - Counter(own[1:]), tokens)

    def _continued(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return the found sentence that a beginning continues, or nothing."""
        ends = (tokens[:end] for end in range(len(tokens), 1, -1))
        return next((part for part in ends if part in self._left), ())
