"""Rare words of the same sentence, found by merging.

The gradient at a word's place depends on all words of its sentence. So two words of one sentence that are simulated together agree
better with their rows than each of them alone. Groups are merged in the order of that gain. (Own derivation.)

Letters: U rare words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch

from leakaudit.algorithms.rare_rows.agreement import Agreement
from leakaudit.algorithms.rare_rows.sentences import Draft
from leakaudit.plugins.budget import Budget

GAIN = 0.15
"""Smallest gain of the agreement at which two groups are merged.
Chosen on training sentences; see docs/decisions/rare_rows.md."""

PARTNERS = 40
"""Groups that are tried with a new group: those with the largest gains of their pairs of words.
Our choice: ten times as many as are right."""

MOST_PAIRS = 120_000
"""Largest number of pairs that are simulated.
Our choice: half an hour on two processor cores. Of more pairs, a part is drawn."""

Group = frozenset[int]


@dataclass
class Grouping:
    """Agreements of groups of rare words; each group is simulated once."""

    agreement: Agreement
    end: int
    """Place of the closing token while a sentence's length is not known: the largest that is possible."""
    known: dict[Group, float] = field(default_factory=dict)
    """Agreement of every group that was simulated."""
    least_gain: float = GAIN
    """Smallest gain at which two groups are merged."""

    def groups(self, words: Sequence[int], rng: torch.Generator, budget: Budget) -> list[Group]:
        """Return groups of words that agree together, the best first.

        Args:
            words: rare words.
            rng: draws pairs if there are too many.
            budget: merging ends when it is used up.
        """
        self._simulate([frozenset([word]) for word in words], budget)
        self._simulate(self._pairs(words, rng), budget)
        merging = Merging(self, [frozenset([word]) for word in words if frozenset([word]) in self.known])
        while not budget.exhausted() and merging.step():
            pass
        return sorted(merging.groups, key=lambda group: self.known[group], reverse=True)

    def draft(self, group: Group) -> Draft:
        """Return the draft that holds a group's words at their places."""
        places = self.agreement.rows.places
        return Draft({places[word]: word for word in group}, len(self.agreement.simulator.before), self.end)

    def fit(self, one: Group, other: Group) -> bool:
        """Return whether no two words of the groups have the same place."""
        places = self.agreement.rows.places
        return not {places[word] for word in one} & {places[word] for word in other}

    def _pairs(self, words: Sequence[int], rng: torch.Generator) -> list[Group]:
        pairs = [
            frozenset(pair) for pair in combinations(words, 2) if self.fit(frozenset(pair[:1]), frozenset(pair[1:]))
        ]
        if len(pairs) <= MOST_PAIRS:
            return pairs
        return [pairs[index] for index in torch.randperm(len(pairs), generator=rng)[:MOST_PAIRS].tolist()]

    def simulate(self, groups: Sequence[Group]) -> None:
        """Compute the agreement of groups that are not known yet."""
        new = [group for group in dict.fromkeys(groups) if group not in self.known]
        if new:
            scores = self.agreement.scores([self.draft(group) for group in new]).tolist()
            self.known.update(zip(new, scores, strict=True))

    def _simulate(self, groups: Sequence[Group], budget: Budget) -> None:
        for start in range(0, len(groups), 1_000):
            if budget.exhausted():
                return
            self.simulate(groups[start : start + 1_000])

    def gain(self, one: Group, other: Group) -> float | None:
        """Return by how much two groups agree better together; None if unknown."""
        together = self.known.get(one | other)
        return None if together is None else together - self.known[one] - self.known[other]


class Merging:
    """Groups that are merged step by step."""

    def __init__(self, grouping: Grouping, groups: Sequence[Group]) -> None:
        """Begin with groups whose pairs were simulated where possible."""
        self.grouping, self.groups = grouping, set(groups)
        self.gains: dict[tuple[Group, Group], float] = {}
        for one, other in combinations(groups, 2):
            gain = grouping.gain(one, other)
            if gain is not None and gain > 0.0:
                self.gains[one, other] = gain

    def step(self) -> bool:
        """Merge the two groups with the largest gain; return whether there were any."""
        (one, other), gain = max(
            self.gains.items(), key=lambda item: item[1], default=((frozenset(), frozenset()), 0.0)
        )
        if gain < self.grouping.least_gain:
            return False
        self.groups -= {one, other}
        self.gains = {pair: gain for pair, gain in self.gains.items() if one not in pair and other not in pair}
        merged = one | other
        partners = self._partners(merged)
        self.grouping.simulate([merged | partner for partner in partners])
        for partner in partners:
            self.gains[partner, merged] = self.grouping.gain(partner, merged) or 0.0
        self.groups.add(merged)
        return True

    def _partners(self, group: Group) -> list[Group]:
        fitting = [other for other in self.groups if self.grouping.fit(group, other)]
        return sorted(fitting, key=lambda other: self._pair_gain(group, other), reverse=True)[:PARTNERS]

    def _pair_gain(self, group: Group, other: Group) -> float:
        """Return the gains of pairs across two groups, over the other's root size."""
        gains = (self.grouping.gain(frozenset([a]), frozenset([b])) for a in group for b in other)
        total: float = sum(gain for gain in gains if gain is not None)
        return total / math.sqrt(len(other))
