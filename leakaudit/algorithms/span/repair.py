"""Repair of sequences that attention assembled wrongly.

It is used if the feed-forward span gives no information. `attention_evidence` cannot test a sequence with more tokens
than a head has dimensions, so such a sequence often contains words of other sequences. The repairs, from fast to slow:

1. members are exchanged by attention;
2. a sequence that satisfies the attention identity is searched (`attention_identity`);
3. nearly right sequences are simulated, and changed at the places with the largest error (`repair_group`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.algorithms.span.attention_evidence import Group
from leakaudit.algorithms.span.attention_identity import SATISFIED, AttentionIdentity
from leakaudit.algorithms.span.deflation import RemainingUpdate
from leakaudit.algorithms.span.factoring import both_sides

EXCHANGES, EXCHANGEABLE = 3, 30
"""Exchanges by attention per sequence, and the longest sequence for which they are tried.
Our choice: in a head of 32 dimensions, 33 members or more explain any gradient."""

SHARE = 0.2
"""Share of the remaining budget for one search by the attention identity.
Our choice."""

ENDS = 3
"""Number of possible ends of a sequence for which the full search is run.
Our choice: a wrong end mostly shows in the first improvement."""

MOST_ROUNDS, MOST_CHANGES = 10, 24
"""Rounds in which a nearly right sequence is changed, and single changes simulated per round.
Our choice: a change costs one short forward and backward pass, and all changes that help are made at once."""


def repair(remaining: RemainingUpdate, groups: Sequence[Group]) -> list[Group]:
    """Subtract the sequences that agree after exchanges, or after the identity search.

    Args:
        remaining: `solve` was called on it, and nothing was subtracted since.
        groups: sequences that do not agree with the update.

    Returns:
        The sequences that still do not agree. If the identity search gives none, those from before it.
    """
    before = len(remaining.found)
    left = remaining.take_confirmed(
        [[group] for group in _exchanged(remaining, [g for g in groups if len(g.members) <= EXCHANGEABLE])]
    )
    left += [group for group in groups if len(group.members) > EXCHANGEABLE]
    if len(remaining.found) > before or remaining.problem.budget.exhausted():
        return left
    return remaining.take_confirmed(_satisfying_identity(remaining, left)) or left


def _exchanged(remaining: RemainingUpdate, groups: Sequence[Group]) -> list[Group]:
    """Return the sequences after exchanges by attention with any remaining pair."""
    rows = remaining.live().nonzero().flatten()
    evidence = remaining.evidence(rows)
    place = {row: n for n, row in enumerate(rows.tolist())}
    exchanged = []
    for group in groups:
        changed = evidence.exchanged(Group(tuple(place[row] for row in group.members), group.residual), EXCHANGES)
        exchanged.append(Group(tuple(rows[list(changed.members)].tolist()), changed.residual))
    return exchanged


def _satisfying_identity(remaining: RemainingUpdate, groups: Sequence[Group]) -> list[list[Group]]:
    """Return the best hypotheses for each sequence by the attention identity.

    Sequences without any hypothesis are left out.
    """
    options = _Options.of(remaining)
    budget = remaining.problem.budget.part(SHARE)
    better: list[list[Group]] = []
    ends = set(options.ends)
    done: set[int] = set()
    for group in groups:
        if len(done & set(group.members)) > len(group.members) / 2:
            continue
        starts = [options.start(group, end) for end in ends or options.last_of(group)]
        first = [options.identity.improve(start, options.inner, budget) for start in starts]
        tries: list[Group] = []
        for choice in sorted(first, key=lambda choice: choice.violation)[:ENDS]:
            found = options.identity.search(choice.options, options.inner, budget)
            if -1 not in found.options:
                tries.append(Group(tuple(options.rows[list(found.options)].tolist()), found.violation))
                if found.violation < SATISFIED:
                    ends.discard(found.options[-1])
                    done |= set(tries[-1].members)
                    break
        if tries:
            better.append(sorted(tries, key=lambda group: group.residual))
    return better


@dataclass(frozen=True)
class _Options:
    """The options for each place of a sequence, and the search among them."""

    rows: Tensor
    """(n,) int64: pairs; a pair may occur twice, with and without a known gradient."""
    places: list[int]
    """Position of each option."""
    identity: AttentionIdentity
    """The search by the attention identity."""
    inner: Tensor
    """(n,) booleans: options that do not end a sequence."""
    ends: list[int]
    """Options that may end a sequence."""

    @classmethod
    def of(cls, remaining: RemainingUpdate) -> _Options:
        """Find the options in a remaining update that was solved."""
        attribution, pairs, assignments = remaining.attribution, remaining.pairs, remaining.assignments
        at = attribution.positions
        # A token whose assignment is doubtful or uncertain may stand elsewhere as well.
        elsewhere = torch.zeros(int(attribution.tokens.max()) + 1, dtype=torch.bool, device=at.device)
        elsewhere[attribution.tokens[assignments.assigned & (assignments.doubtful[at] | ~assignments.certain)]] = True
        possible = (
            assignments.open
            | assignments.assigned
            | (remaining.live() & elsewhere[attribution.tokens] & ~assignments.explained[at])
        )
        if int((pairs.positions == 0).sum()) == 1:
            possible |= pairs.positions == 0
        rows = possible.nonzero().flatten()
        # An assigned gradient may contain another token's gradient: then the place is known, but the gradient is not.
        again = rows[assignments.assigned[rows] & (assignments.doubtful | assignments.shared)[at[rows]]]
        assigned = torch.cat([assignments.assigned[rows], torch.zeros_like(again, dtype=torch.bool)])
        rows = torch.cat([rows, again])
        single = assignments.single[at[rows]] & ~assigned & assignments.open[rows]
        gradients = torch.where(
            single, assignments.residual[:, at[rows]] / attribution.along_position[rows], remaining.gradients_of(rows).T
        )
        updates = both_sides(remaining.scale * gradients, remaining.problem.anatomy)
        is_end = torch.zeros_like(assigned) if remaining.end is None else pairs.tokens[rows] == remaining.end
        return cls(
            rows=rows,
            places=pairs.positions[rows].tolist(),
            identity=AttentionIdentity(remaining.vectors[:, rows], updates, assigned | single, pairs.positions[rows]),
            inner=~is_end,
            ends=(is_end & assignments.last[at[rows]]).nonzero().flatten().tolist(),
        )

    def start(self, group: Group, end: int) -> list[int]:
        """Return the option of a group's member at each place, -1 where there is none.

        Args:
            group: the sequence.
            end: the option that ends it.
        """
        start = [-1] * self.places[end] + [end]
        members = set(group.members)
        for option, row in reversed(list(enumerate(self.rows.tolist()))):
            if row in members and self.places[option] < self.places[end] and bool(self.inner[option]):
                start[self.places[option]] = option
        return start

    def last_of(self, group: Group) -> list[int]:
        """Return the option of a group's last member, where no fixed token ends sequences."""
        return (self.rows == group.members[-1]).nonzero().flatten().tolist()[:1]


def repair_group(remaining: RemainingUpdate, group: Group) -> bool:
    """Exchange words of a nearly right sequence until it agrees, and subtract it.

    If the sequence is simulated alone, each member with an assigned gradient has a relative error. Wrong members have
    the largest errors, so they are exchanged first.

    Args:
        remaining: `solve` was called on it, and nothing was subtracted since.
        group: the sequence.

    Returns:
        Whether it agrees and was subtracted.
    """
    if not remaining.can_simulate:
        return False
    others = _others(remaining)
    best, members = float("inf"), group.members
    for _ in range(MOST_ROUNDS):
        if remaining.problem.budget.exhausted():
            return False
        (part,) = remaining.simulate([members])
        misfits = remaining.misfits(members, part)
        changes = [
            (place, row)
            for place in sorted(range(1, len(members)), key=lambda place: -misfits[place])
            for row in others.get(place, [])
            if row != members[place]
        ][:MOST_CHANGES]
        variants = [(*members[:place], row, *members[place + 1 :]) for place, row in changes]
        parts = remaining.simulate(variants)
        for variant, simulated in zip([members, *variants], [part, *parts], strict=True):
            if (fit := remaining.fit(variant, simulated)) is not None:
                remaining.take(variant, fit[1])
                return True
        off = _mean(misfits)
        offs = [_mean(remaining.misfits(variant, part)) for variant, part in zip(variants, parts, strict=True)]
        gains = sorted((off_then, *change) for off_then, change in zip(offs, changes, strict=True) if off_then < off)
        if off >= best or not gains:
            return False
        best, members = off, _all_made(members, gains)
    return False


def _others(remaining: RemainingUpdate) -> dict[int, list[int]]:
    """Return the pairs that may stand at each position, the most likely first.

    Assigned pairs come before the others.
    """
    assignments = remaining.assignments
    others: dict[int, list[int]] = {}
    in_question = (assignments.open | assignments.assigned).nonzero().flatten().tolist()
    for row in sorted(
        in_question, key=lambda r: (not bool(assignments.assigned[r]), -float(assignments.coefficient[r]))
    ):
        others.setdefault(int(remaining.pairs.positions[row]), []).append(row)
    return others


def _mean(misfits: Sequence[float]) -> float:
    """Return the mean error of all members but the first, which is in every sequence."""
    return sum(misfits[1:]) / max(1, len(misfits) - 1)


def _all_made(members: Sequence[int], gains: Sequence[tuple[float, int, int]]) -> tuple[int, ...]:
    """Return a sequence with the best helpful change made at each place.

    Args:
        members: of the sequence.
        gains: (error after the change, place, row), best first.
    """
    changed: dict[int, int] = {}
    for _, place, row in gains:
        changed.setdefault(place, row)
    return tuple(changed.get(place, row) for place, row in enumerate(members))
