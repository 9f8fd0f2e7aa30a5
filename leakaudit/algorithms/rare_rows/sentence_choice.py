"""The beginnings of sentences that a search keeps.

Beginnings are in groups: those of a group have the same first tokens. Each group has its own places, so that a sentence whose rows say little is not pushed out by the
variants of another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from leakaudit.algorithms.rare_rows.sentence_scores import SentenceScores

EACH = 16
"""Beginnings of a group that come before the next ones of any other. Our choice: half of a group's places."""

RIVALS, LATE_RIVALS = 4, 2
"""Groups that may share a token that occurs once, up to four tokens and behind them. Our choice: a beginning with a wrong first token is soon worse."""

T = TypeVar("T")
Item = tuple[float, tuple[int, ...], T]
"""A beginning's value, its tokens, and what belongs to it."""


@dataclass(frozen=True)
class Widths:
    """How many beginnings a search goes through."""

    near: int
    """Next tokens of each beginning that its state proposes."""
    kept: int
    """Most beginnings of a group that are kept."""
    simulated: int
    """Most beginnings of a group that are simulated."""
    late_kept: int
    """The same for long beginnings, which many rows tell apart."""
    late_simulated: int
    """The same for long beginnings."""


UNTIED = Widths(near=8, kept=8, simulated=16, late_kept=8, late_simulated=12)
"""For tables that are not tied. Chosen on training texts: a true next token is nearly always the first."""

TIED = Widths(near=16, kept=16, simulated=48, late_kept=8, late_simulated=12)
"""For tied tables. Chosen on training texts: of true next tokens that occur several times, nine in ten are among the first sixteen."""


def best_of(items: Iterable[Item[T]], most: int, alike: int, begin: int, each: int) -> list[T]:
    """Return what belongs to the best beginnings.

    Args:
        items: the beginnings.
        most: beginnings to return.
        alike: most beginnings of a group.
        begin: number of first tokens that make a group.
        each: beginnings of a group that come before the next ones of any other.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    ranked: list[tuple[int, T]] = []
    for _, tokens, item in sorted(items, key=lambda one: -one[0]):
        place = counts[tokens[:begin]]
        if place < alike:
            counts[tokens[:begin]] += 1
            ranked.append((place // each, item))
    ranked.sort(key=lambda one: one[0])
    return [item for _, item in ranked[:most]]


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
        self._sentences: set[tuple[int, ...]] = set()
        self._used: Counter[int] = Counter()

    def add(self, tokens: tuple[int, ...]) -> None:
        """Take the states of a found sentence, unless others took them.

        It replaces a sentence that it continues.
        """
        if self.leave(tokens):
            if shorter := self._continued(tokens):
                self._sentences.remove(shorter)
                self._used.subtract(shorter[1:])
            self._sentences.add(tokens)
            self._used.update(tokens[1:])

    def leave(self, tokens: tuple[int, ...]) -> bool:
        """Return whether a beginning finds enough states.

        It may use those of the found sentence that it continues.
        """
        own = self._continued(tokens)
        return self._scores.fits(self._used - Counter(own[1:]), tokens)

    def _continued(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return the found sentence that a beginning continues, or nothing."""
        ends = (tokens[:end] for end in range(len(tokens), 1, -1))
        return next((part for part in ends if part in self._sentences), ())
