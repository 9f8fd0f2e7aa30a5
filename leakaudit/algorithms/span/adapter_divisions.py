"""Words with known places, divided among the sentences of an encoder's batch.

Words of one sentence that are simulated together agree better with their weights than apart, and two words of one place are in two
sentences. A beam over the places keeps the divisions that agree best. (Own derivation.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import chain, permutations

from leakaudit.algorithms.rare_rows.grouping import Group, SimulatedGroups
from leakaudit.plugins.budget import Budget

BEAM = 16
"""Divisions of the words among sentences that are kept. Our choice: four sentences then cost some hundred simulations a place."""

DIVISIONS = 4
"""Divisions whose groups are completed, the best first. Our choice: the best one may have two words exchanged."""


def divided(grouping: SimulatedGroups, places: Mapping[int, int], budget: Budget) -> list[Group]:
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
    best = (sorted(filter(None, each), key=grouping.quality, reverse=True) for each in divisions[:DIVISIONS])
    return list(dict.fromkeys(chain.from_iterable(best)))


def _divided(division: tuple[Group, ...], words: Sequence[int]) -> Iterator[tuple[Group, ...]]:
    """Yield the divisions in which every word went to another sentence."""
    for chosen in permutations(range(len(division)), len(words)):
        new = list(division)
        for index, word in zip(chosen, words, strict=True):
            new[index] = new[index] | {word}
        yield tuple(sorted(new, key=sorted))


def _in_order(division: tuple[Group, ...]) -> list[list[int]]:
    return [sorted(group) for group in division]


def _agreement(grouping: SimulatedGroups, division: tuple[Group, ...]) -> float:
    return sum(grouping.known[group] for group in division if group)
