"""Rare words of the same sentence, found by merging.

Two signs are added. The gradient at a word's place depends on all words of its sentence, so two words of one sentence that are simulated
together agree better with their rows than each of them alone. And rows of one sentence are alike (`same_sentence`). Groups are merged in the
order of the sum. (Own derivation.)

Letters: U rare words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from leakaudit.algorithms.rare_rows.agreement import Agreement
from leakaudit.algorithms.rare_rows.same_sentence import SameSentence
from leakaudit.algorithms.rare_rows.sentences import Draft
from leakaudit.plugins.budget import Budget

SHIFT = 2.4
"""Added to the logarithm of the odds of two words. Chosen on training sentences; see docs/decisions/rare_rows.md."""

WEIGHT = 0.5
"""Agreement that one unit of the odds' logarithm is worth.
Chosen on training sentences by logistic regression on pairs of words."""

POWER = 1.0
"""Power of the groups' sizes by which the odds of their words are divided: the mean decides.
Chosen on training sentences: at 0.5 large groups are joined."""

PARTNERS = 12
"""Words that are tried with a word, and groups with a new group: those with the best odds.
Our choice: the best five hold a word of the same sentence for 95 % of the words."""

Group = frozenset[int]


@dataclass
class SimulatedGroups:
    """Agreements of groups of words with known places; each group is simulated once."""

    agreement: Agreement
    end: int
    """Place of the closing token while a sentence's length is not known: the largest that is possible."""
    known: dict[Group, float] = field(default_factory=dict, kw_only=True)
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

    def quality(self, group: Group) -> float:
        """Return the mean agreement of a group's words, times the root of their number."""
        return self.known[group] / math.sqrt(len(group))


@dataclass
class Grouping(SimulatedGroups):
    """Groups of rare words that are merged."""

    alike: SameSentence
    """Odds that rows were written by one sentence."""

    def __post_init__(self) -> None:
        """Compute the odds of all pairs of rare words."""
        rows = self.agreement.rows
        self._index = {word: turn for turn, word in enumerate(rows.rare)}
        self._odds = self.alike.log_odds(torch.stack([rows.sums[word] for word in rows.rare])).cpu() + SHIFT

    def groups(self, budget: Budget) -> list[Group]:
        """Return groups of all rare words that agree together, the best first.

        Args:
            budget: merging ends when it is used up.
        """
        words = [frozenset([word]) for word in self._index]
        self.simulate(words)
        merging = Merging(self, words)
        while not budget.exhausted() and merging.step():
            pass
        return sorted(merging.groups, key=lambda group: self.known[group], reverse=True)

    def fit(self, one: Group, other: Group) -> bool:
        """Return whether no two words of the groups have the same place."""
        places = self.agreement.rows.places
        return not {places[word] for word in one} & {places[word] for word in other}

    def gain(self, one: Group, other: Group) -> float:
        """Return by how much two simulated groups agree better together, with their odds."""
        return self.known[one | other] - self.known[one] - self.known[other] + WEIGHT * self.odds(one, other)

    def odds(self, one: Group, other: Group) -> float:
        """Return the shifted logarithm of the odds that two groups are of one sentence."""
        table = self._odds[[self._index[word] for word in one]][:, [self._index[word] for word in other]]
        total = float(table.sum())
        return total / math.pow(table.numel(), POWER)


class Merging:
    """Groups that are merged step by step."""

    def __init__(self, grouping: Grouping, groups: Sequence[Group]) -> None:
        """Begin with the gains of each group with its likely partners."""
        self.grouping, self.groups = grouping, set(groups)
        self.gains: dict[frozenset[Group], float] = {}
        self._try([(group, partner) for group in groups for partner in self._partners(group)])

    def step(self) -> bool:
        """Merge the two groups with the largest gain; return whether there were any."""
        pair, gain = max(self.gains.items(), key=lambda item: item[1], default=(frozenset[Group](), 0.0))
        if gain <= 0.0:
            return False
        one, other = pair
        self.groups -= pair
        self.gains = {others: gain for others, gain in self.gains.items() if not others & pair}
        merged = one | other
        self._try([(merged, partner) for partner in self._partners(merged)])
        self.groups.add(merged)
        return True

    def _try(self, pairs: Sequence[tuple[Group, Group]]) -> None:
        self.grouping.simulate([one | other for one, other in pairs])
        for one, other in pairs:
            self.gains[frozenset([one, other])] = self.grouping.gain(one, other)

    def _partners(self, group: Group) -> list[Group]:
        fitting = [other for other in self.groups if self.grouping.fit(group, other)]
        return sorted(fitting, key=lambda other: self.grouping.odds(group, other), reverse=True)[:PARTNERS]
