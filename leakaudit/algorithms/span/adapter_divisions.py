"""Words with known places, divided among the sentences of an encoder's batch.

Words of one sentence that are simulated together agree better with their weights than apart, and two words of one place are in two
sentences. A beam over the places keeps the divisions that agree best. (Own derivation.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import permutations

from leakaudit.algorithms.rare_rows.agreement import Agreement
from leakaudit.algorithms.rare_rows.sentences import Draft
from leakaudit.plugins.budget import Budget

BEAM = 16
"""Divisions of the words among sentences that are kept. Our choice: four sentences then cost some hundred simulations a place."""

DIVISIONS = 4
"""Divisions whose groups are completed, the best first. Our choice: the best one may have two words exchanged."""

Group = frozenset[int]


@dataclass
class Groups:
    """Groups of words with known places; each is simulated once."""

    agreement: Agreement
    end: int
    """Place of the closing token while a sentence's length is not known: the largest that is possible."""
    known: dict[Group, float] = field(default_factory=dict)
    """Agreement of every group that was simulated."""

    def draft(self, group: Group) -> Draft:
        """Return the draft that holds a group's words at their places."""
        places = self.agreement.rows.places
        return Draft({places[word]: word for word in group}, len(self.agreement.simulator.before), self.end)

    def simulate(self, groups: Sequence[Group]) -> None:
        """Compute the agreement of groups that are not known yet."""
        new = [group for group in dict.fromkeys(groups) if group not in self.known]
        if new:
            scores = self.agreement.scores([self.draft(group) for group in new]).tolist()
            self.known.update(zip(new, scores, strict=True))


def divided(grouping: Groups, places: Mapping[int, int], budget: Budget) -> list[Group]:
    """Return the groups of the best divisions of the words among the sentences.

    Two words of one place are in two sentences. So the words of one place after the other are given to the sentences in all ways, and those
    divisions are kept whose groups agree best.

    Args:
        grouping: knows the agreement of groups.
        places: token id -> place.
        budget: places are left out when it is used up.
    """
    at: dict[int, list[int]] = {}
    for word, place in places.items():
        at.setdefault(place, []).append(word)
    count = max(map(len, at.values()))
    divisions: list[tuple[Group, ...]] = [(frozenset[int](),) * count]
    for place in sorted(at, key=lambda place: (-len(at[place]), place)):
        if budget.exhausted():
            break
        grown = {new for division in divisions for new in _divided(division, at[place])}
        grouping.simulate([group for division in grown for group in division if group])
        divisions = nlargest(BEAM, sorted(grown, key=_in_order), key=lambda new: _agreement(grouping, new))
    groups = [group for division in divisions[:DIVISIONS] for group in _best_first(grouping, division)]
    return list(dict.fromkeys(groups))


def _best_first(grouping: Groups, division: tuple[Group, ...]) -> list[Group]:
    return sorted(filter(None, division), key=lambda group: grouping.known[group] / math.sqrt(len(group)), reverse=True)


def _divided(division: tuple[Group, ...], words: Sequence[int]) -> Iterator[tuple[Group, ...]]:
    """Yield the divisions in which every word went to another sentence."""
    for chosen in permutations(range(len(division)), len(words)):
        new = list(division)
        for index, word in zip(chosen, words, strict=True):
            new[index] = new[index] | {word}
        yield tuple(sorted(new, key=sorted))


def _in_order(division: tuple[Group, ...]) -> list[list[int]]:
    return [sorted(group) for group in division]


def _agreement(grouping: Groups, division: tuple[Group, ...]) -> float:
    return sum(grouping.known[group] for group in division if group)
