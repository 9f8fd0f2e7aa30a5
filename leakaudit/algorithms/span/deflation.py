"""The remaining update: the update without the sequences that are confirmed.

A guessed sequence is simulated alone (`sequence_gradient`). If a feed-forward layer's update has a clear rank, the
sequence is confirmed if subtracting it lowers this rank by its length (`rank_reduction`). Otherwise it is confirmed if
its simulated gradients agree with the gradients of its tokens (`attribution`). A confirmed sequence is subtracted, so
that the next round reads a smaller batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from leakaudit.algorithms.least_squares import solve_least_squares
from leakaudit.algorithms.span.attention_evidence import AttentionEvidence, Group
from leakaudit.algorithms.span.attribution import VANISHED, Assignments, Attribution
from leakaudit.algorithms.span.candidates import Candidates
from leakaudit.algorithms.span.factoring import both_sides, keys_and_queries, padded
from leakaudit.algorithms.span.problem import SpanProblem
from leakaudit.algorithms.span.rank_reduction import FeedForwardSpan, feed_forward_span_of
from leakaudit.algorithms.span.sequence_gradient import SequenceGradient, sequence_gradients
from leakaudit.plugins.attack_protocol import GuessedSequence

AGREES = 1e-4
"""Largest relative error at which a simulated sequence agrees with the update.
Chosen on training sentences; see docs/decisions/span_constants.md."""

REDUCES = 1e-2
"""Largest relative error at which subtracting a sequence counts as lowering the rank by its length.
Chosen on training sentences; see docs/decisions/span_constants.md."""

NOISY = 1.3
"""A difference counts as noise up to this multiple of the expected norm of the noise.
Our choice."""

CLEAR = 0.25
"""Largest noise of a gradient, as a share of the gradient, at which it can confirm a sequence.
Our choice: a wrong sequence explains more than a quarter of a gradient only by chance."""

FLOOR = 3e-6
"""Share of its first size that subtracting simulated sequences leaves of a gradient.
Measured; see docs/decisions/span_constants.md."""


@dataclass(frozen=True)
class Side:
    """The reading of K tokens, or of K positions: directions, and norms at the start."""

    directions: Tensor
    """(R, K) float64: directions along which the gradients are read."""
    first: Tensor
    """(K,) float64: norm of each gradient before any sequence is subtracted."""
    noise: Tensor
    """(K,) float64: norm up to which a gradient is noise."""

    @classmethod
    def of(cls, directions: Tensor, update: Tensor, noise: float) -> Side:
        """Read an update from which nothing is subtracted yet.

        Args:
            directions: (R, K) float64.
            update: (F, R) float64.
            noise: norm of the noise along a unit vector.
        """
        return cls(directions, (update @ directions).norm(dim=0), noise * directions.norm(dim=0))

    def remains(self, update: Tensor) -> Tensor:
        """Return (K,) booleans: whether a gradient remains in the update (F, R)."""
        left: Tensor = (update @ self.directions).norm(dim=0) > VANISHED * self.first + self.noise
        return left

    @property
    def floor(self) -> Tensor:
        """(K,) float64: norm below which a remaining gradient is not known."""
        return FLOOR * self.first + self.noise


@dataclass
class RemainingUpdate:
    """The remaining update of one batch, and the sequences that were found."""

    problem: SpanProblem
    pairs: Candidates
    """The N pairs that may be in the batch; members of a `Group` are rows of these."""
    coordinates: Tensor
    """(N, R) float64: inputs of the pairs, in an orthonormal basis of these inputs."""
    vectors: Tensor
    """(2H, N, d_h + 1) float64: keys of the pairs for every head, then queries."""
    attribution: Attribution
    """The directions that read single tokens and positions."""
    by_token: Side
    """The reading of the tokens."""
    by_position: Side
    """The reading of the positions."""
    update: Tensor
    """(F, R) float64: the stacked updates of all projections, without the parts of the sequences that were found."""
    scale: Tensor
    """(F, 1) float64: norm of the first update of the projection that an output belongs to."""
    feed_forward: FeedForwardSpan | None
    """The span behind the first attention; None where it gives no information."""
    found: list[GuessedSequence] = field(default_factory=list)
    """Sequences that were confirmed and subtracted."""
    rounds: int = 0
    """How often gradients were assigned."""
    assignments: Assignments = field(init=False)
    """The gradient of each pair, as of the last call of `solve`."""

    @classmethod
    def of(cls, problem: SpanProblem, pairs: Candidates, noise: Mapping[str, float] | None = None) -> RemainingUpdate:
        """Find the directions, and compute keys and queries of every pair.

        Args:
            problem: the observation with its parts.
            pairs: all pairs of the batch, and perhaps others in its span.
            noise: parameter name -> standard deviation of the errors on each entry of its update, if known.
        """
        noise = noise or {}
        projections = problem.anatomy.projections
        axes = torch.linalg.svd(pairs.inputs, full_matrices=False)
        basis = axes.Vh[1e-9 * axes.S[0] < axes.S]  # (R, D): without the directions that rounding added
        coordinates = pairs.inputs @ basis.T
        attribution = Attribution.of(coordinates, pairs.tokens, pairs.positions)
        parts = [p.by_output(problem.seen.update[p.weight]).double() @ basis.T for p in projections]
        update = torch.cat(parts)
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
            by_token=Side.of(attribution.token_directions, update / scale, level),
            by_position=Side.of(attribution.position_directions, update / scale, level),
            update=update,
            scale=scale,
            feed_forward=feed_forward_span_of(problem.seen) if _can_simulate(problem) and not noise else None,
        )

    @property
    def can_simulate(self) -> bool:
        """Whether sequences can be simulated; only then can they be confirmed."""
        return _can_simulate(self.problem)

    @property
    def end(self) -> int | None:
        """The token that ends every sequence; None if sequences end with any token."""
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
        """Return whether no token remains, as far as the number of tokens is known."""
        return self.feed_forward is not None and self.feed_forward.tokens == 0

    def live(self) -> Tensor:
        """Return (N,) booleans: whether token and position of the pair both remain."""
        update = self.update / self.scale
        tokens, positions = self.by_token.remains(update), self.by_position.remains(update)
        live: Tensor = tokens[self.attribution.tokens] & positions[self.attribution.positions]
        return live

    def solve(self) -> Assignments:
        """Assign gradients to pairs in the remaining update, and keep the result."""
        self.rounds += 1
        floors = (self.by_token.floor, self.by_position.floor)
        assignments = self.attribution.solve(self.update / self.scale, self.live(), floors)
        noise = _noise_of_own(assignments, self.attribution, self.by_token)
        unclear = (assignments.own >= 0) & ~assignments.assigned & (noise >= CLEAR)
        self.assignments = assignments = replace(assignments, own=torch.where(unclear, -1, assignments.own))
        first = (self.pairs.positions == 0).nonzero().flatten()
        if len(first) == 1:  # the first token is in every sequence, so its gradient is a sum
            own, assigned, certain = assignments.own.clone(), assignments.assigned.clone(), assignments.certain.clone()
            own[first], assigned[first], certain[first] = -1, False, False
            self.assignments = replace(assignments, own=own, assigned=assigned, certain=certain)
        return self.assignments

    def gradients_of(self, rows: Tensor) -> Tensor:
        """Return (m, F): the gradients of some pairs; arbitrary where they are not known.

        Each layer's part has about the same norm.

        Args:
            rows: (m,) int64.
        """
        return self.assignments.gradients.T[self.assignments.own[rows]]

    def updates(self) -> Tensor:
        """Return (2H, K, d_h + 1): dq, then dk, by head, of each assigned gradient."""
        return both_sides(self.scale * self.assignments.gradients, self.problem.anatomy)

    def evidence(self, rows: Tensor) -> AttentionEvidence:
        """Return the attention evidence for some pairs (n,)."""
        positions = self.pairs.positions[rows]
        closing = self.pairs.tokens[rows] == self.end if self.end is not None else None
        if closing is not None and not bool(closing.any()):
            closing = None
        return AttentionEvidence(
            self.vectors[:, rows],
            self.updates(),
            self.assignments.own[rows],
            positions,
            closing=closing,
            noise=_median_noise(self.assignments, self.attribution, self.by_token),
        )

    def simulate(self, sequences: Sequence[Sequence[int]]) -> list[SequenceGradient]:
        """Return the simulated gradients of each sequence alone.

        Args:
            sequences: members of each sequence.
        """
        layers = self.problem.anatomy.projections
        if self.feed_forward is not None:
            layers = (*layers, self.feed_forward.layer)
        return (
            sequence_gradients(self.problem.seen, layers, [self.ids(members) for members in sequences])
            if sequences
            else []
        )

    def take_confirmed(self, grown: Sequence[Sequence[Group]]) -> list[Group]:
        """Subtract the hypotheses that agree with the update.

        Args:
            grown: hypotheses of each seed, best first.

        Returns:
            The best hypothesis of every seed for which no hypothesis is confirmed.
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
        """Subtract and return the sequences that lower the rank by their length."""
        taken = set()
        width = len(self.update)
        for group, part in parts.items():
            of_layer = part.gradients[:, :, width:]
            misfit, weights = feed_forward.fit(part.inputs, of_layer)
            if misfit < REDUCES:
                feed_forward.take(part.inputs, torch.einsum("c,clo->lo", weights, of_layer))
                self.take(group.members, torch.einsum("c,clf->lf", weights, part.gradients[:, :, :width]))
                taken.add(group)
        return taken

    def _confirmed_by_gradients(self, parts: Mapping[Group, SequenceGradient]) -> set[Group]:
        """Return the sequences that agree, and subtract the best of them.

        Those that are subtracted share no assigned pair.
        """
        fits = {group: fit for group, part in parts.items() if (fit := self.fit(group.members, part)) is not None}
        done: set[int] = set()  # assigned pairs of sequences that were subtracted
        for group in sorted(fits, key=lambda g: fits[g][0]):
            mine = {row for row in group.members if bool(self.assignments.assigned[row])}
            if not mine & done:
                done |= mine
                self.take(group.members, fits[group][1])
        return set(fits)

    def fit(self, members: Sequence[int], part: SequenceGradient) -> tuple[float, Tensor] | None:
        """Return a simulated sequence's relative error, and its gradients (L, F).

        Only members with a known gradient are compared. A token may occur several times at its position. So each member
        is compared alone, and a third of them must agree. Each member gives about a thousand equations, with one unknown
        per class.

        Returns:
            The relative error and the gradients, or None where the sequence does not agree.
        """
        places = [n for n, row in enumerate(members) if int(self.assignments.own[row]) >= 0]
        if not places:
            return None
        rows = torch.tensor([members[n] for n in places], device=part.gradients.device)
        noise = self.by_token.noise[self.attribution.tokens[rows]] / self.attribution.along_token[rows].abs()
        seen, claimed = self.gradients_of(rows), part.gradients[:, places] / self.scale.T
        alone = _misfit(claimed.transpose(0, 1), seen)  # (m,)
        agree = alone < AGREES + noise / seen.norm(dim=1)
        if int(agree.sum()) * 3 < len(places):
            return None
        chosen = claimed[:, agree]
        weights = solve_least_squares(chosen.flatten(1).T, seen[agree].flatten()[:, None])[:, 0]  # (C',)
        missed = (seen[agree] - torch.einsum("c,cmf->mf", weights, chosen)).norm() - noise[agree].norm()
        off = float(missed / seen[agree].norm())
        return (off, torch.einsum("c,clf->lf", weights, part.gradients)) if off < AGREES else None

    def misfits(self, members: Sequence[int], part: SequenceGradient) -> list[float]:
        """Return each member's relative error, 0 to 1; 0.5 if it is not assigned."""
        rows = torch.tensor(members, device=self.assignments.own.device)
        off = _misfit(part.gradients.transpose(0, 1) / self.scale.T, self.gradients_of(rows)).clamp_max(1.0)
        return torch.where(self.assignments.assigned[rows], off, 0.5).tolist()

    def take(self, members: Sequence[int], gradients: Tensor) -> None:
        """Add a sequence to those found, and subtract its part from the update.

        Args:
            members: of the sequence, L of them.
            gradients: (L, F) float64.
        """
        self.found.append(GuessedSequence(self.ids(members), own_score=1.0))
        self.update = self.update - gradients.T @ self.coordinates[list(members)]


def _noise_of_own(assignments: Assignments, attribution: Attribution, side: Side) -> Tensor:
    """Return (N,): the noise of each pair's own gradient, as a share of it.

    It is 0 where the gradient is not known.
    """
    size = assignments.gradients.norm(dim=0)  # (K,)
    if not len(size):
        return torch.zeros_like(attribution.along_token)
    noise = side.noise[attribution.tokens] / attribution.along_token.abs().clamp_min(1e-300)
    share = noise / size[assignments.own.clamp_min(0)].clamp_min(1e-300)
    return torch.where(assignments.own >= 0, share, 0.0)


def _median_noise(assignments: Assignments, attribution: Attribution, side: Side) -> float:
    """Return the median share of noise in the energy of the known gradients."""
    share = _noise_of_own(assignments, attribution, side)[assignments.own >= 0]
    return float(share.median().square()) if len(share) else 0.0


def _can_simulate(problem: SpanProblem) -> bool:
    return problem.seen.facts.task == "classification"


def _misfit(claimed: Tensor, seen: Tensor) -> Tensor:
    """Return (m,): share of each gradient that its simulated ones leave unexplained.

    Args:
        claimed: (m, C', F) simulated gradients, one per class.
        seen: (m, F) gradients from the update.
    """
    solved = solve_least_squares(claimed.transpose(1, 2), seen[..., None])  # (m, C', 1)
    left = seen - (claimed.transpose(1, 2) @ solved)[..., 0]
    share: Tensor = left.norm(dim=1) / seen.norm(dim=1).clamp_min(1e-300)
    return share
