"""Sequences out of pairs in the span."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.algorithms.resimulation import prove
from leakaudit.algorithms.span.attention_evidence import COMPLETE, AttentionEvidence, Group
from leakaudit.algorithms.span.candidates import Candidates
from leakaudit.algorithms.span.completion import Completion
from leakaudit.algorithms.span.deflation import Batch
from leakaudit.algorithms.span.grouping import by_position, confidence_of
from leakaudit.algorithms.span.problem import SpanProblem
from leakaudit.algorithms.span.reachability import span_reach
from leakaudit.algorithms.span.repair import repair, repair_group
from leakaudit.plugins.attack_protocol import GuessedSequence, Reconstruction

FARTHEST_INSIDE = 0.03
"""Distance beyond which no pair counts as in the span of a clean update, however the others rank. Measured: true pairs at 1e-7
to 1e-6 in a pretrained encoder, up to 5e-4 in untrained tiny ones, whose weak directions drown in rounding; the nearest false
pair at 1e-1 and more."""


HYPOTHESES = 3
"""Incomplete sequences of one seed that are simulated. Our choice: a wrong first one mostly differs from the right one in a token."""


LIKELY: tuple[float, ...] = (0.05, -1.0, 0.15)
"""Coefficients from which pairs of tokens that occur several times are considered, in the order in which they are tried: whenever
nothing more is found with one, the next is used. Measured on a train split at B = 8 to 24: nine in ten true ones are above 0.05, a
third of the false ones."""


MOST_INCOMPLETE = 4
"""Incomplete guesses that are worth their time. Our choice: beyond a few they are made of pairs that are not in the batch."""


UNTESTED = 5
"""Dimensions of a head that a sequence grown by attention has to leave. Our choice: what is added with fewer left is mostly of other
sequences; sequences that are longer are completed by their balance."""


GROWN = 16
"""Members up to which attention grows a sequence that its context can complete. Our choice: a few may be of other sequences by then."""


def read_pairs(problem: SpanProblem, pairs: Candidates, rank: int) -> Reconstruction | None:
    """Return what those of the ranked `pairs` that lie in a span of `rank` directions make up; None where none does."""
    inside = pairs.take(torch.arange(count_inside(pairs.distance, rank), device=pairs.distance.device))
    return read_inside(problem, inside) if len(inside) else None


def read_inside(problem: SpanProblem, inside: Candidates, noise: Mapping[str, float] | None = None) -> Reconstruction:
    """Return what these pairs make up, all of the batch's among them, and perhaps others that lie in its span as well.

    Args:
        problem: the observation.
        inside: pairs in the span, nearest first.
        noise: parameter name -> standard deviation of the errors on each entry of its update, if known.
    """
    facts = {"candidates": float(len(inside))}
    if _one_per_position(inside.positions):
        order = inside.positions.argsort()
        guess = [GuessedSequence(tuple(inside.tokens[order].tolist()), confidence=1.0)]
    elif problem.anatomy.heads and all(p.weight in problem.seen.update for p in problem.anatomy.projections):
        batch = Batch.of(problem, _possible(inside, problem.seen.facts.vocabulary.starts_with), noise)
        guess = _sequences(batch)
        facts["rounds"] = float(batch.rounds)
    else:
        guess = _guesses(by_position(inside.positions), inside)
    proved = prove(problem.seen, guess, problem.budget)
    reach = span_reach(problem, inside, FARTHEST_INSIDE)
    facts |= proved.facts
    return Reconstruction(sequences=proved.sequences, label_counts=proved.label_counts, diagnostics=facts, reach=reach)


def _sequences(batch: Batch) -> list[GuessedSequence]:
    """Return every sequence that could be put together, certain ones first."""
    left = _search(batch)
    while batch.feed_forward is None and any(repair_group(batch, group) for group in _disjoint(left)):
        left = _search(batch)
    return [*batch.found, *_guesses(_disjoint(left), batch.pairs)]


def _search(batch: Batch) -> list[Group]:
    """Take out sequences until no more are found; return what else was put together, or nothing where the batch is used up."""
    left: list[Group] = []
    for likely in LIKELY:
        while True:
            if batch.is_empty() or not bool(batch.live().any()):
                return []
            if batch.problem.budget.exhausted():
                return left
            before = len(batch.found)
            left = _round(batch, likely)
            if len(batch.found) == before:
                break
    return left


def _round(batch: Batch, likely: float) -> list[Group]:
    """Put sequences together from what is left, and take out those that are certain; return the others."""
    batch.solve()
    start = _start(batch)
    candidates = _in_question(batch, start, likely)
    rows = candidates.nonzero().flatten()
    where = batch.pairs.positions[rows]
    if _one_per_position(where):
        # By elimination: nothing yet says that it explains itself.
        return batch.take_confirmed([[Group(tuple(rows[where.argsort()].tolist()), residual=0.5)]])
    completion = _completion_among(batch, candidates)
    before = len(batch.found)
    doubtful = _grow_all(batch, _Growth.of(batch, rows, start), completion)
    if len(batch.found) > before or batch.problem.budget.exhausted():
        return doubtful
    if completion is None:
        return repair(batch, _disjoint(doubtful))
    open_ = _disjoint(doubtful)
    for group in open_:
        _complete_from(batch, completion, group, unlikely_too=True)
        if len(batch.found) > before:
            return [other for other in open_ if other is not group]
        if batch.problem.budget.exhausted():
            break
    return doubtful


def _start(batch: Batch) -> list[int]:
    """Return the pair that stands first in every sequence, if there is one."""
    first = ((batch.pairs.positions == 0) & batch.live()).nonzero().flatten().tolist()
    return first if len(first) == 1 else []


def _in_question(batch: Batch, start: Sequence[int], likely: float) -> Tensor:
    """Return (N,) booleans: pairs that start a sequence, are settled, or have a coefficient of `likely` or more; one at least a position."""
    assignments = batch.assignments
    chosen = (assignments.open & (assignments.coefficient >= likely)) | assignments.assigned
    chosen[list(start)] = True
    positions = batch.pairs.positions
    without = set(positions[assignments.open].tolist()) - set(positions[chosen].tolist())
    for position in without:
        here = (assignments.open & (positions == position)).nonzero().flatten()
        chosen[here[assignments.coefficient[here].argmax()]] = True
    return chosen


@dataclass
class _Growth:
    """Sequences that attention grows out of the pairs in question, from one seed each."""

    batch: Batch
    evidence: AttentionEvidence
    rows: Tensor
    """(n,) the pairs in question, as the evidence numbers them."""
    start: list[int]
    """Of the pairs, what stands first in every sequence."""
    seeds: list[int]
    """Of the pairs, those whose own update is known, the largest first."""
    longest: int
    """Members up to which sequences grow."""
    tried: set[int]
    """Seeds that need not be tried any more."""

    @classmethod
    def of(cls, batch: Batch, rows: Tensor, start: list[int]) -> _Growth:
        """Sort the seeds among the pairs in question (n,)."""
        own = batch.assignments.own
        strength = batch.updates().square().sum((0, 2))
        seeds = [row for row in rows.tolist() if int(own[row]) >= 0]
        width = batch.vectors.shape[2]
        return cls(
            batch=batch,
            evidence=batch.evidence(rows),
            rows=rows,
            start=start,
            seeds=sorted(seeds, key=lambda row: -float(strength[own[row]])),
            longest=min(
                int(batch.pairs.positions[rows].max()) + 1, width - UNTESTED if batch.feed_forward is None else GROWN
            ),
            tried=set(start),
        )

    def untried(self) -> list[int]:
        """Return the seeds that were not tried yet."""
        return [seed for seed in self.seeds if seed not in self.tried]

    def from_untried(self) -> Iterator[list[Group]]:
        """Yield the hypotheses, best first, of each seed that was not tried yet and is not in the sequence of another by now."""
        claimed: set[int] = set()
        for seed in self.untried():
            if seed in claimed or self.batch.is_empty() or self.batch.problem.budget.exhausted():
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
        grown = self.evidence.grow(members, everyone, self.batch.problem.beam, self.longest)
        return [Group(tuple(self.rows[list(g.members)].tolist()), g.residual) for g in grown[:HYPOTHESES]]


def _grow_all(batch: Batch, growth: _Growth, completion: Completion | None) -> list[Group]:
    """Take out the sequences that attention completes, or their context does; return what else was put together."""
    before = len(batch.found)
    doubtful: list[Group] = []
    # One seed a sequence first; the others of those that did not come out only where nothing did.
    while growth.untried():
        complete: list[list[Group]] = []
        open_: list[list[Group]] = []
        for hypotheses in growth.from_untried():
            if hypotheses[0].residual < COMPLETE:
                complete.append(hypotheses[:1])
            elif completion is None:
                open_.append(hypotheses)
            else:
                doubtful += batch.take_confirmed(complete) + _complete_from(
                    batch, completion, hypotheses[0], unlikely_too=False
                )
                complete = []
                if len(batch.found) > before and doubtful:
                    return doubtful  # with what was found gone, the rest is easier
        doubtful += batch.take_confirmed(complete)
        if len(batch.found) > before:
            return doubtful + [hypotheses[0] for hypotheses in open_]
        doubtful += batch.take_confirmed(open_)
        if len(batch.found) > before or batch.problem.budget.exhausted():
            return doubtful
    return doubtful


def _completion_among(batch: Batch, candidates: Tensor) -> Completion | None:
    """Return the search among the pairs that are left, candidates (N,) first, if it can be told which words stand together."""
    if batch.feed_forward is None:
        return None
    pairs, live = batch.pairs, batch.live()
    closing = live & (pairs.tokens == batch.end) if batch.end is not None else torch.zeros_like(live)
    inner = live & ~closing & (pairs.positions > 0)
    ends = pairs.positions[closing if batch.end is not None else inner].unique().tolist()
    return Completion(
        batch.feed_forward, pairs.tokens[inner], pairs.positions[inner], candidates[inner], ends, batch.end
    )


def _complete_from(batch: Batch, completion: Completion, group: Group, *, unlikely_too: bool) -> list[Group]:
    """Complete a sequence by its context, and take it out if it fits; return what becomes of it if not."""
    known = dict(zip(batch.pairs.positions[list(group.members)].tolist(), batch.ids(group.members), strict=True))
    reached = completion.complete(known, batch.problem.budget, unlikely_too=unlikely_too)
    if reached is None:
        return [group]
    members = tuple(batch.row_of[place, token] for place, token in enumerate(reached.ids))
    return batch.take_confirmed([[Group(members, reached.off)]])


def _possible(inside: Candidates, starts_with: tuple[int, ...]) -> Candidates:
    """Return the pairs that the tokenizer allows: what it puts before every text stands there, and nothing else does."""
    keep = torch.ones(len(inside), dtype=torch.bool, device=inside.tokens.device)
    for position, token in enumerate(starts_with):
        here, is_token = inside.positions == position, inside.tokens == token
        if bool((here & is_token).any()):
            keep &= ~here | is_token
    return inside.take(keep.nonzero().flatten())


def _disjoint(groups: Sequence[Group]) -> list[Group]:
    """Return the best of the sequences that no proof settled: those whose seeds say they are complete, and a few more.

    Several seeds of one sequence end on the same hypothesis, or on ones that differ in a token.
    """
    chosen: list[Group] = []
    for group in sorted(groups, key=lambda g: g.residual):
        near = any(len(set(group.members) & set(c.members)) > len(group.members) / 2 for c in chosen)
        if not near and (group.residual < COMPLETE or len(chosen) < MOST_INCOMPLETE):
            chosen.append(group)
    return chosen


def _guesses(groups: Sequence[Group], pairs: Candidates) -> list[GuessedSequence]:
    return [
        GuessedSequence(tuple(pairs.tokens[list(group.members)].tolist()), confidence=confidence_of(group))
        for group in groups
    ]


def count_inside(distance: Tensor, rank: int) -> int:
    """Return how many of the ranked pairs lie in the span: up to the widest gap, from as many pairs as directions on.

    There are at least as many true pairs as directions, and more where equal tokens stand at equal positions.

    Args:
        distance: (N,) ascending.
        rank: directions of the span.
    """
    near = int((distance < FARTHEST_INSIDE).sum())
    if near < rank or near == 0:
        return near
    steps = (distance[1:].clamp_min(1e-9) / distance[:-1].clamp_min(1e-9)).tolist()
    cuts = range(rank, min(near, len(steps)) + 1)
    return max(cuts, key=lambda cut: steps[cut - 1] if cut <= len(steps) else 0.0)


def _one_per_position(positions: Tensor) -> bool:
    """Return whether there is exactly one pair at every position from 0: then it is one sentence, and ordered."""
    ordered = positions.sort().values
    return bool(torch.equal(ordered, torch.arange(len(ordered), device=ordered.device)))
