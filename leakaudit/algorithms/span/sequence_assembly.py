"""Sequences from pairs in the span, without dropout masks.

If there is one pair at each position, they are one sequence. Otherwise three steps repeat until nothing remains:

1. gradients are assigned to pairs, which tells real pairs from ghosts (`attribution`);
2. attention says which pairs belong together (`attention_evidence`);
3. each sequence is simulated alone; if its part of the update agrees, it is confirmed and subtracted (`deflation`).

A sequence that does not agree is completed by its context (`completion`). If the context gives no information, the
sequence is repaired (`repair`). If the task is no classification, no sequence can be simulated alone, and only attention
decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.algorithms.resimulation import prove
from leakaudit.algorithms.span.attention_evidence import COMPLETE, AttentionEvidence, Group
from leakaudit.algorithms.span.candidates import Candidates
from leakaudit.algorithms.span.completion import Completion
from leakaudit.algorithms.span.deflation import RemainingUpdate
from leakaudit.algorithms.span.grouping import by_position, own_score_of
from leakaudit.algorithms.span.problem import SpanProblem
from leakaudit.algorithms.span.reachability import span_reach
from leakaudit.algorithms.span.repair import repair, repair_group
from leakaudit.plugins.attack_protocol import GuessedSequence, Reconstruction

FARTHEST_INSIDE = 0.03
"""Largest distance at which a pair can be in the span.
Chosen on training sentences; see docs/decisions/span_constants.md."""

HYPOTHESES = 3
"""Incomplete sequences per seed that are simulated.
Our choice: a wrong first hypothesis mostly differs from the right one in one token."""

LIKELY: tuple[float, ...] = (0.05, -1.0, 0.15)
"""Least coefficients of open pairs that are tried, one after the other.
The next one is used when nothing more is found. Chosen on training sentences; see docs/decisions/span_constants.md."""

MOST_INCOMPLETE = 4
"""Most incomplete guesses.
Our choice: with more, they consist of pairs that are not in the batch."""

UNTESTED = 5
"""Dimensions of a head that a sequence grown by attention must leave free.
Our choice: with fewer, further members mostly belong to other sequences. `repair` completes longer sequences."""

GROWN = 16
"""Most members that attention adds to a sequence which `completion` can complete.
Our choice: beyond them a few members may belong to other sequences."""


def read_pairs(problem: SpanProblem, pairs: Candidates, rank: int) -> Reconstruction | None:
    """Return the sequences that the pairs in the span form; None if no pair is inside.

    Args:
        problem: the observation with its parts.
        pairs: candidates, nearest first.
        rank: directions of the span.
    """
    inside = pairs.take(torch.arange(count_inside(pairs.distance, rank), device=pairs.distance.device))
    return read_inside(problem, inside) if len(inside) else None


def read_inside(problem: SpanProblem, inside: Candidates, noise: Mapping[str, float] | None = None) -> Reconstruction:
    """Return the sequences that these pairs form, proved where possible.

    Args:
        problem: the observation with its parts.
        inside: pairs in the span, nearest first: all pairs of the batch, and perhaps others.
        noise: parameter name -> standard deviation of the errors on each entry of its update, if known.
    """
    diagnostics = {"candidates": float(len(inside))}
    if _one_per_position(inside.positions):
        order = inside.positions.argsort()
        guess = [GuessedSequence(tuple(inside.tokens[order].tolist()), own_score=1.0)]
    elif problem.anatomy.heads and all(p.weight in problem.seen.update for p in problem.anatomy.projections):
        remaining = RemainingUpdate.of(problem, _possible(inside, problem.seen.facts.vocabulary.starts_with), noise)
        guess = _sequences(remaining)
        diagnostics["rounds"] = float(remaining.rounds)
    else:
        guess = _guesses(by_position(inside.positions), inside)
    proved = prove(problem.seen, guess, problem.budget)
    reach = span_reach(problem, inside, FARTHEST_INSIDE)
    diagnostics |= proved.diagnostics
    return Reconstruction(
        sequences=proved.sequences, label_counts=proved.label_counts, diagnostics=diagnostics, reach=reach
    )


def _sequences(remaining: RemainingUpdate) -> list[GuessedSequence]:
    """Return every sequence that could be assembled, confirmed ones first."""
    left = _search(remaining)
    while remaining.feed_forward is None and any(repair_group(remaining, group) for group in _disjoint(left)):
        left = _search(remaining)
    return [*remaining.found, *_guesses(_disjoint(left), remaining.pairs)]


def _search(remaining: RemainingUpdate) -> list[Group]:
    """Subtract sequences until no more are confirmed; return those that are not.

    Nothing is returned if the whole batch was subtracted.
    """
    left: list[Group] = []
    for likely in LIKELY:
        while True:
            if remaining.is_empty() or not bool(remaining.live().any()):
                return []
            if remaining.problem.budget.exhausted():
                return left
            before = len(remaining.found)
            left = _round(remaining, likely)
            if len(remaining.found) == before:
                break
    return left


def _round(remaining: RemainingUpdate, likely: float) -> list[Group]:
    """Assemble sequences from the remaining update and subtract the confirmed ones.

    Returns:
        The sequences that were not confirmed.
    """
    remaining.solve()
    start = _start(remaining)
    candidates = _in_question(remaining, start, likely)
    rows = candidates.nonzero().flatten()
    where = remaining.pairs.positions[rows]
    if _one_per_position(where):
        # By elimination there is one sequence. Its residual is not known, so it is set to 0.5.
        return remaining.take_confirmed([[Group(tuple(rows[where.argsort()].tolist()), residual=0.5)]])
    completion = _completion_among(remaining, candidates)
    before = len(remaining.found)
    doubtful = _grow_all(remaining, _Growth.of(remaining, rows, start), completion)
    if len(remaining.found) > before or remaining.problem.budget.exhausted():
        return doubtful
    if completion is None:
        return repair(remaining, _disjoint(doubtful))
    open_ = _disjoint(doubtful)
    for group in open_:
        _complete_from(remaining, completion, group, unlikely_too=True)
        if len(remaining.found) > before:
            return [other for other in open_ if other is not group]
        if remaining.problem.budget.exhausted():
            break
    return doubtful


def _start(remaining: RemainingUpdate) -> list[int]:
    """Return the pair that stands first in every sequence, if there is one."""
    first = ((remaining.pairs.positions == 0) & remaining.live()).nonzero().flatten().tolist()
    return first if len(first) == 1 else []


def _in_question(remaining: RemainingUpdate, start: Sequence[int], likely: float) -> Tensor:
    """Return (N,) booleans: pairs that sequences are assembled from.

    These are the pairs that are assigned, stand first, or have a coefficient of at least `likely`. At each position with
    open pairs there is at least one.
    """
    assignments = remaining.assignments
    chosen = (assignments.open & (assignments.coefficient >= likely)) | assignments.assigned
    chosen[list(start)] = True
    positions = remaining.pairs.positions
    without = set(positions[assignments.open].tolist()) - set(positions[chosen].tolist())
    for position in without:
        here = (assignments.open & (positions == position)).nonzero().flatten()
        chosen[here[assignments.coefficient[here].argmax()]] = True
    return chosen


@dataclass
class _Growth:
    """Growth of sequences by attention, from one seed each."""

    remaining: RemainingUpdate
    """The remaining update."""
    evidence: AttentionEvidence
    """Attention evidence for the pairs in `rows`."""
    rows: Tensor
    """(n,) int64: the pairs that may be used."""
    start: list[int]
    """Pairs that stand first in every sequence: one or none."""
    seeds: list[int]
    """Pairs with a gradient of their own, the largest first."""
    longest: int
    """Most members."""
    tried: set[int]
    """Seeds that are not tried again."""

    @classmethod
    def of(cls, remaining: RemainingUpdate, rows: Tensor, start: list[int]) -> _Growth:
        """Sort the seeds among the pairs.

        Args:
            remaining: the remaining update.
            rows: (n,) int64: the pairs that may be used.
            start: pairs that stand first in every sequence.
        """
        own = remaining.assignments.own
        strength = remaining.updates().square().sum((0, 2))
        seeds = [row for row in rows.tolist() if int(own[row]) >= 0]
        width = remaining.vectors.shape[2]
        return cls(
            remaining=remaining,
            evidence=remaining.evidence(rows),
            rows=rows,
            start=start,
            seeds=sorted(seeds, key=lambda row: -float(strength[own[row]])),
            longest=min(
                int(remaining.pairs.positions[rows].max()) + 1,
                width - UNTESTED if remaining.feed_forward is None else GROWN,
            ),
            tried=set(start),
        )

    def untried(self) -> list[int]:
        """Return the seeds that were not tried yet."""
        return [seed for seed in self.seeds if seed not in self.tried]

    def from_untried(self) -> Iterator[list[Group]]:
        """Yield the hypotheses of each untried seed, best first.

        A seed that is already in another seed's sequence is left out.
        """
        claimed: set[int] = set()
        for seed in self.untried():
            if seed in claimed or self.remaining.is_empty() or self.remaining.problem.budget.exhausted():
                continue
            self.tried.add(seed)
            hypotheses = self._from(seed)
            claimed |= set(hypotheses[0].members)
            if hypotheses[0].residual < COMPLETE:
                self.tried |= set(hypotheses[0].members)
            yield hypotheses

    def _from(self, seed: int) -> list[Group]:
        place = {row: n for n, row in enumerate(self.rows.tolist())}
        members = [place[row] for row in dict.fromkeys([*self.start, seed])]
        everyone = torch.ones(len(self.rows), dtype=torch.bool, device=self.rows.device)
        grown = self.evidence.grow(members, everyone, self.remaining.problem.beam, self.longest)
        return [Group(tuple(self.rows[list(g.members)].tolist()), g.residual) for g in grown[:HYPOTHESES]]


def _grow_all(remaining: RemainingUpdate, growth: _Growth, completion: Completion | None) -> list[Group]:
    """Subtract the sequences that attention or their context completes.

    Returns:
        The other sequences.
    """
    before = len(remaining.found)
    doubtful: list[Group] = []
    # One seed per sequence first; further seeds of the same sequences only if nothing was confirmed.
    while growth.untried():
        complete: list[list[Group]] = []
        open_: list[list[Group]] = []
        for hypotheses in growth.from_untried():
            if hypotheses[0].residual < COMPLETE:
                complete.append(hypotheses[:1])
            elif completion is None:
                open_.append(hypotheses)
            else:
                doubtful += remaining.take_confirmed(complete) + _complete_from(
                    remaining, completion, hypotheses[0], unlikely_too=False
                )
                complete = []
                if len(remaining.found) > before and doubtful:
                    return doubtful  # without the confirmed sequence the rest is easier
        doubtful += remaining.take_confirmed(complete)
        if len(remaining.found) > before:
            return doubtful + [hypotheses[0] for hypotheses in open_]
        doubtful += remaining.take_confirmed(open_)
        if len(remaining.found) > before or remaining.problem.budget.exhausted():
            return doubtful
    return doubtful


def _completion_among(remaining: RemainingUpdate, candidates: Tensor) -> Completion | None:
    """Return the completion among the remaining pairs, or None without its span.

    Args:
        remaining: the remaining update.
        candidates: (N,) booleans: pairs that are tried first.
    """
    if remaining.feed_forward is None:
        return None
    pairs, live = remaining.pairs, remaining.live()
    closing = live & (pairs.tokens == remaining.end) if remaining.end is not None else torch.zeros_like(live)
    inner = live & ~closing & (pairs.positions > 0)
    ends = pairs.positions[closing if remaining.end is not None else inner].unique().tolist()
    return Completion(
        remaining.feed_forward, pairs.tokens[inner], pairs.positions[inner], candidates[inner], ends, remaining.end
    )


def _complete_from(
    remaining: RemainingUpdate, completion: Completion, group: Group, *, unlikely_too: bool
) -> list[Group]:
    """Complete a sequence by its context and subtract it if it is confirmed.

    Returns:
        The completed sequence if it is not confirmed, else nothing.
    """
    known = dict(
        zip(remaining.pairs.positions[list(group.members)].tolist(), remaining.ids(group.members), strict=True)
    )
    reached = completion.complete(known, remaining.problem.budget, unlikely_too=unlikely_too)
    if reached is None:
        return [group]
    members = tuple(remaining.row_of[place, token] for place, token in enumerate(reached.ids))
    return remaining.take_confirmed([[Group(members, reached.off)]])


def _possible(inside: Candidates, starts_with: tuple[int, ...]) -> Candidates:
    """Return the pairs that the tokenizer allows.

    If the tokenizer puts a token at a position of every text, no other token can stand there.
    """
    keep = torch.ones(len(inside), dtype=torch.bool, device=inside.tokens.device)
    for position, token in enumerate(starts_with):
        here, is_token = inside.positions == position, inside.tokens == token
        if bool((here & is_token).any()):
            keep &= ~here | is_token
    return inside.take(keep.nonzero().flatten())


def _disjoint(groups: Sequence[Group]) -> list[Group]:
    """Return the best sequences that differ in at least half of their members.

    Several seeds of one sequence lead to the same hypothesis or to similar ones. Complete sequences are kept, and
    `MOST_INCOMPLETE` others.
    """
    chosen: list[Group] = []
    for group in sorted(groups, key=lambda g: g.residual):
        near = any(len(set(group.members) & set(c.members)) > len(group.members) / 2 for c in chosen)
        if not near and (group.residual < COMPLETE or len(chosen) < MOST_INCOMPLETE):
            chosen.append(group)
    return chosen


def _guesses(groups: Sequence[Group], pairs: Candidates) -> list[GuessedSequence]:
    return [
        GuessedSequence(tuple(pairs.tokens[list(group.members)].tolist()), own_score=own_score_of(group))
        for group in groups
    ]


def count_inside(distance: Tensor, rank: int) -> int:
    """Return how many of the ranked pairs lie in the span: up to the widest gap.

    There are at least as many pairs in the span as directions, and more if ghosts lie in it. So the gap is searched from
    the rank on.

    Args:
        distance: (N,) float64, ascending.
        rank: directions of the span.
    """
    near = int((distance < FARTHEST_INSIDE).sum())
    if near < rank or near == 0:
        return near
    steps = (distance[1:].clamp_min(1e-9) / distance[:-1].clamp_min(1e-9)).tolist()
    cuts = range(rank, min(near, len(steps)) + 1)
    return max(cuts, key=lambda cut: steps[cut - 1] if cut <= len(steps) else 0.0)


def _one_per_position(positions: Tensor) -> bool:
    """Return whether there is exactly one pair at every position from 0 on."""
    ordered = positions.sort().values
    return bool(torch.equal(ordered, torch.arange(len(ordered), device=ordered.device)))
