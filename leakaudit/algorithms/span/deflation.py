"""The state of one clean update while its sequences are found: what it says of each pair, and what is left when some are taken out.

The ledger (`span_ledger`) says what each pair of token and position adds to the update. A sequence that was put together is
simulated alone (`span_contribution`): where its part of the update agrees with what the ledger says of its tokens, or lowers the
rank of what the feed-forward part receives (`span_context`), it is certain, and taken out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from leakaudit.algorithms.span.attention_evidence import AttentionEvidence, Group
from leakaudit.algorithms.span.attribution import VANISHED, Assignments, Attribution
from leakaudit.algorithms.span.candidates import Candidates
from leakaudit.algorithms.span.factoring import both_sides, keys_and_queries, padded
from leakaudit.algorithms.span.problem import SpanProblem
from leakaudit.algorithms.span.rank_reduction import FeedForwardSpan, feed_forward_span_of
from leakaudit.algorithms.span.sequence_gradient import SequenceGradient, sequence_gradients
from leakaudit.plugins.attack_protocol import GuessedSequence

AGREES = 1e-4
"""Relative error up to which a simulated sequence agrees with the update. Measured on a train split: 1e-6 for true sequences in a
pretrained encoder; one wrong word in a sentence of forty changes the others by 5e-3."""

REDUCES = 1e-2
"""Relative error up to which taking out a simulated sequence lowers the rank of the update by its length. Measured on a train split: 1e-6 to
1e-5 for true sequences; a wrong word leaves 0.1 and more."""

NOISY = 1.3
"""Factor over the expected norm of the noise up to which a difference is no more than that. Our choice."""

FLOOR = 3e-6
"""Share of the first size of an entry that taking out simulated sequences leaves behind. Measured on a train split: 1e-7 to 3e-6."""


@dataclass(frozen=True)
class Side:
    """One side of the ledger: what is read of each of K tokens, or of each of K positions."""

    directions: Tensor
    """(R, K): along which it is read."""
    first: Tensor
    """(K,) norm of what was there at first."""
    noise: Tensor
    """(K,) norm up to which it is no more than noise."""

    @classmethod
    def of(cls, directions: Tensor, update: Tensor, noise: float) -> Side:
        """Read an update (F, R) in which nothing is explained yet, whose noise has a norm of `noise` along a unit vector."""
        return cls(directions, (update @ directions).norm(dim=0), noise * directions.norm(dim=0))

    def remains(self, update: Tensor) -> Tensor:
        """Return (K,) booleans: there is something left in the update (F, R)."""
        left: Tensor = (update @ self.directions).norm(dim=0) > VANISHED * self.first + self.noise
        return left

    @property
    def floor(self) -> Tensor:
        """(K,) norm below which nothing can be said of what is left."""
        return FLOOR * self.first + self.noise


@dataclass
class Batch:
    """One update, out of which sequences are taken as they are found."""

    problem: SpanProblem
    pairs: Candidates
    """The N pairs that may be in it. Groups of `span_assembly` name their members by rows of these here."""
    coordinates: Tensor
    """(N, R) float64: their inputs, in an orthonormal basis of these."""
    vectors: Tensor
    """(2H, N, d_h + 1): their keys for every head, then their queries."""
    attribution: Attribution
    by_token: Side
    by_position: Side
    rest: Tensor
    """(F, R): the updates of all projections, one below the other, less the sequences that were taken out."""
    scale: Tensor
    """(F, 1): norm of each one's update at first, at its outputs."""
    feed_forward: FeedForwardSpan | None
    """Which words stand together, if that can be told."""
    found: list[GuessedSequence] = field(default_factory=list)
    """Sequences that were taken out."""
    rounds: int = 0
    """How often it was settled."""
    assignments: Assignments = field(init=False)
    """What the update says of each pair, as of when it was last settled."""

    @classmethod
    def of(cls, problem: SpanProblem, pairs: Candidates, noise: Mapping[str, float] | None = None) -> Batch:
        """Open the ledger, and compute keys and queries of every pair once.

        Args:
            problem: the observation.
            pairs: all pairs of the batch, and perhaps others that lie in its span as well.
            noise: parameter name -> standard deviation of the errors on each entry of its update, if known.
        """
        noise = noise or {}
        projections = problem.anatomy.projections
        axes = torch.linalg.svd(pairs.inputs, full_matrices=False)
        basis = axes.Vh[1e-9 * axes.S[0] < axes.S]  # (R, D): less the directions that rounding added
        coordinates = pairs.inputs @ basis.T
        attribution = Attribution.of(coordinates, pairs.tokens, pairs.positions)
        parts = [p.by_output(problem.seen.update[p.weight]).double() @ basis.T for p in projections]
        rest = torch.cat(parts)
        scale = torch.cat([part.norm().expand(len(part)) for part in parts]).clamp_min(1e-300)[:, None]
        errors = [noise.get(p.weight, 0.0) ** 2 * p.out_features for p in projections]
        sizes = [float(part.norm().clamp_min(1e-300)) for part in parts]
        level = NOISY * sum(error / size**2 for error, size in zip(errors, sizes, strict=True)) ** 0.5
        keys, queries = keys_and_queries(problem.weights, problem.anatomy, pairs.inputs)
        return cls(
            problem=problem,
            pairs=pairs,
            coordinates=coordinates,
            vectors=torch.cat([keys, padded(queries)]),
            attribution=attribution,
            by_token=Side.of(attribution.token_directions, rest / scale, level),
            by_position=Side.of(attribution.position_directions, rest / scale, level),
            rest=rest,
            scale=scale,
            feed_forward=feed_forward_span_of(problem.seen) if _can_simulate(problem) and not noise else None,
        )

    @property
    def can_simulate(self) -> bool:
        """Whether sequences can be simulated at all, and so be certain."""
        return _can_simulate(self.problem)

    @property
    def end(self) -> int | None:
        """The token that ends every sequence; None where they end with nothing in particular."""
        ends_with = self.problem.seen.facts.vocabulary.ends_with
        return ends_with[-1] if ends_with else None

    @cached_property
    def row_of(self) -> dict[tuple[int, int], int]:
        """(position, token) -> row of the pair."""
        pairs = zip(self.pairs.positions.tolist(), self.pairs.tokens.tolist(), strict=True)
        return {pair: row for row, pair in enumerate(pairs)}

    def ids(self, members: Sequence[int]) -> tuple[int, ...]:
        """Return the token ids of some pairs."""
        return tuple(self.pairs.tokens[list(members)].tolist())

    def is_empty(self) -> bool:
        """Return whether every token of the batch is in a sequence that was taken out, if their number is known."""
        return self.feed_forward is not None and self.feed_forward.tokens == 0

    def live(self) -> Tensor:
        """Return (N,) booleans: pairs whose token and position still have something in the update."""
        update = self.rest / self.scale
        tokens, positions = self.by_token.remains(update), self.by_position.remains(update)
        live: Tensor = tokens[self.attribution.tokens] & positions[self.attribution.positions]
        return live

    def solve(self) -> Assignments:
        """Settle what is left of the update, and keep what that says."""
        self.rounds += 1
        floors = (self.by_token.floor, self.by_position.floor)
        self.assignments = assignments = self.attribution.solve(self.rest / self.scale, self.live(), floors)
        first = (self.pairs.positions == 0).nonzero().flatten()
        if len(first) == 1:  # in every sequence, so its update is a sum
            own, assigned, certain = assignments.own.clone(), assignments.assigned.clone(), assignments.certain.clone()
            own[first], assigned[first], certain[first] = -1, False, False
            self.assignments = replace(assignments, own=own, assigned=assigned, certain=certain)
        return self.assignments

    def gradients_of(self, rows: Tensor) -> Tensor:
        """Return (m, F) what the update says of pairs, each layer's part at about the same norm; anything where it says nothing."""
        return self.assignments.gradients.T[self.assignments.own[rows]]

    def updates(self) -> Tensor:
        """Return (2H, K, d_h + 1): what the update says by head, dq then dk, for each column of `entries.gradients`."""
        return both_sides(self.scale * self.assignments.gradients, self.problem.anatomy)

    def evidence(self, rows: Tensor) -> AttentionEvidence:
        """Return what attention says of some pairs."""
        positions = self.pairs.positions[rows]
        closing = self.pairs.tokens[rows] == self.end if self.end is not None else None
        if closing is not None and not bool(closing.any()):
            closing = None
        return AttentionEvidence(
            self.vectors[:, rows], self.updates(), self.assignments.own[rows], positions, closing=closing
        )

    def simulate(self, sequences: Sequence[Sequence[int]]) -> list[SequenceGradient]:
        """Return what each of some sequences, given by their members, alone adds to the update."""
        layers = self.problem.anatomy.projections
        if self.feed_forward is not None:
            layers = (*layers, self.feed_forward.layer)
        return (
            sequence_gradients(self.problem.seen, layers, [self.ids(members) for members in sequences])
            if sequences
            else []
        )

    def take_confirmed(self, grown: Sequence[Sequence[Group]]) -> list[Group]:
        """Take out the sequences that agree with the update.

        Args:
            grown: hypotheses of each seed, best first.

        Returns:
            The best hypothesis of every seed that has none.
        """
        if not self.can_simulate:
            return [hypotheses[0] for hypotheses in grown]
        groups = list(dict.fromkeys(group for hypotheses in grown for group in hypotheses))
        parts = dict(zip(groups, self.simulate([group.members for group in groups]), strict=True))
        taken = (
            self._confirmed_by_gradients(parts)
            if self.feed_forward is None
            else self._confirmed_by_rank(parts, self.feed_forward)
        )
        return [hypotheses[0] for hypotheses in grown if not taken & set(hypotheses)]

    def _confirmed_by_rank(self, parts: Mapping[Group, SequenceGradient], feed_forward: FeedForwardSpan) -> set[Group]:
        """Take out, and return, the simulated sequences each of which lowers the rank of what is left by its length."""
        taken = set()
        width = len(self.rest)
        for group, part in parts.items():
            of_layer = part.gradients[:, :, width:]
            misfit, weights = feed_forward.fit(part.inputs, of_layer)
            if misfit < REDUCES:
                feed_forward.take(part.inputs, torch.einsum("c,clo->lo", weights, of_layer))
                self.take(group.members, torch.einsum("c,clf->lf", weights, part.gradients[:, :, :width]))
                taken.add(group)
        return taken

    def _confirmed_by_gradients(self, parts: Mapping[Group, SequenceGradient]) -> set[Group]:
        """Return the simulated sequences that fit; take out the best of them that share no settled pair."""
        fits = {group: fit for group, part in parts.items() if (fit := self.fit(group.members, part)) is not None}
        done: set[int] = set()  # settled pairs of sequences that were taken out
        for group in sorted(fits, key=lambda g: fits[g][0]):
            mine = {row for row in group.members if bool(self.assignments.assigned[row])}
            if not mine & done:
                done |= mine
                self.take(group.members, fits[group][1])
        return set(fits)

    def fit(self, members: Sequence[int], part: SequenceGradient) -> tuple[float, Tensor] | None:
        """Return how far a simulated sequence is off by the tokens that only it can have, and its gradients (L, F).

        A token may still occur several times at its one place, so each is asked alone, and a third have to agree: each one
        is a thousand equations for one unknown a class. None where it does not agree.
        """
        places = [n for n, row in enumerate(members) if int(self.assignments.own[row]) >= 0]
        if not places:
            return None
        rows = torch.tensor([members[n] for n in places], device=part.gradients.device)
        seen, claimed = self.gradients_of(rows), part.gradients[:, places] / self.scale.T
        alone = _misfit(claimed.transpose(0, 1), seen)  # (m,)
        noise = self.by_token.noise[self.attribution.tokens[rows]] / self.attribution.along_token[rows].abs()
        agree = alone < AGREES + noise / seen.norm(dim=1)
        if int(agree.sum()) * 3 < len(places):
            return None
        chosen = claimed[:, agree]
        weights = torch.linalg.lstsq(chosen.flatten(1).T, seen[agree].flatten()[:, None]).solution[:, 0]  # (C',)
        missed = (seen[agree] - torch.einsum("c,cmf->mf", weights, chosen)).norm() - noise[agree].norm()
        off = float(missed / seen[agree].norm())
        return (off, torch.einsum("c,clf->lf", weights, part.gradients)) if off < AGREES else None

    def misfits(self, members: Sequence[int], part: SequenceGradient) -> list[float]:
        """Return how far each member of a simulated sequence is off by its own update; a half where that is not known."""
        rows = torch.tensor(members, device=self.assignments.own.device)
        off = _misfit(part.gradients.transpose(0, 1) / self.scale.T, self.gradients_of(rows)).clamp_max(1.0)
        return torch.where(self.assignments.assigned[rows], off, 0.5).tolist()

    def take(self, members: Sequence[int], gradients: Tensor) -> None:
        """Book a sequence as found, and take its part out of the update, given the gradients (L, F) of its members."""
        self.found.append(GuessedSequence(self.ids(members), confidence=1.0))
        self.rest = self.rest - gradients.T @ self.coordinates[list(members)]


def _can_simulate(problem: SpanProblem) -> bool:
    return problem.seen.facts.task == "classification"


def _misfit(claimed: Tensor, seen: Tensor) -> Tensor:
    """Return (m,): the share of each row of `seen` (m, F) that its own claims (m, C', F) leave unexplained."""
    solved = torch.linalg.lstsq(claimed.transpose(1, 2), seen[..., None]).solution  # (m, C', 1)
    left = seen - (claimed.transpose(1, 2) @ solved)[..., 0]
    share: Tensor = left.norm(dim=1) / seen.norm(dim=1).clamp_min(1e-300)
    return share
