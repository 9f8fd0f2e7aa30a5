"""Which inputs belong to one sequence: the update says who attends to whom.

With the n input vectors known as rows of X (n, D), the update of a linear layer factors: G = dY^T X gives dY = (G X^+)^T,
exact while the rows are independent. For every head, by the softmax Jacobian,

    dq_i = sum_j a_ij k_j,   sum_j a_ij = 0,        dk_i = sum_j b_ij q_j,

where j runs over the tokens of i's own sequence only, and k_j = W_K x_j + b_K is computable. So a sequence S is the joint
support of two sparse regressions per head, and a hypothesis is tested exactly: the residual of dq_i on {k_j : j in S} and of
dk_i on {q_j : j in S} is zero if nothing is missing. That replaces a search over combinations of tokens, exponential in the
length (DAGER, Petrov et al. 2024, Sec. 4.3, for encoders), by a beam that adds one token at a time. (Own derivation.)

Query and key must be linear in the input: not so with rotary positions, where they are rotated afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.models.structure import Anatomy, Projection
from leakaudit.plugins.attack_protocol import GuessedSequence
from leakaudit.plugins.budget import Budget

COMPLETE = 1e-6
"""Residual, as a share of the seed's own |dq|^2 + |dk|^2, below which a support counts as complete. Measured on a train split:
1e-14 to 1e-12 for whole sequences in a pretrained encoder, down to 6e-5 for wrong ones among ghosts."""


SPARE_DIMENSIONS = 2
"""Dimensions per head that a support must leave open to be tested by its residual. Our choice: with twelve heads that leaves
24 equations that chance would have to satisfy."""


@dataclass(frozen=True)
class AttentionFactors:
    """What every input says about its neighbours, by head."""

    keys: Tensor
    """(H, n, d_h + 1) float64: k_j and a constant one, which carries the constraint that coefficients sum to zero."""
    queries: Tensor
    """(H, n, d_h)."""
    query_updates: Tensor
    """(H, n, d_h + 1): dq_i with a zero appended."""
    key_updates: Tensor
    """(H, n, d_h)."""
    missing: Tensor | None = None
    """(2H, m, d_h + 1) orthonormal: where inputs of the span that are not among the n may have left their mark on these updates."""

    @property
    def vectors(self) -> Tensor:
        """(2H, n, d_h + 1): keys of every head, then queries."""
        return torch.cat([self.keys, padded(self.queries)])

    @property
    def updates(self) -> Tensor:
        """(2H, n, d_h + 1): dq of every head, then dk."""
        return torch.cat([self.query_updates, padded(self.key_updates)])


def padded(vectors: Tensor) -> Tensor:
    """Return vectors (..., d) with a zero appended: what has no part in the constraint on coefficients."""
    return torch.cat([vectors, torch.zeros_like(vectors[..., :1])], dim=-1)


@dataclass(frozen=True)
class Group:
    """One assembled sequence."""

    members: tuple[int, ...]
    """Rows of X, by position."""
    residual: float
    """What the members leave unexplained of their own updates, on average, 0 to 1."""


MOST_MISSING = 8
"""Directions per head that are given up to inputs that were not found. Our choice: a quarter of a head of 32 dimensions; the rest
still tests sequences of twenty."""


def factor(
    update: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    anatomy: Anatomy,
    inputs: Tensor,
    span: Tensor | None = None,
) -> AttentionFactors | None:
    """Factor the update into per-token parts.

    Args:
        update: parameter name -> update.
        weights: parameter name -> weights before the step.
        anatomy: parts of the model, with its heads.
        inputs: (n, D) float64, the inputs as the layer saw them.
        span: (R, D) float64, orthonormal rows: the span of all inputs, where some of them may be missing from `inputs`.

    Returns:
        The witnesses, or None where heads are unknown, or neither query and key are shared nor an adapter beside one of them
        that has as many dimensions as there are inputs.
    """
    changes = _changes(update, weights, anatomy, inputs) if anatomy.heads else None
    if changes is None:
        return None
    keys, queries = keys_and_queries(weights, anatomy, inputs)
    query_updates, key_updates = by_head(changes, anatomy)
    return AttentionFactors(
        keys=keys,
        queries=queries,
        query_updates=padded(query_updates),
        key_updates=key_updates,
        missing=None if span is None else _directions_of_missing(update, anatomy, inputs, span),
    )


def _directions_of_missing(
    update: Mapping[str, Tensor], anatomy: Anatomy, inputs: Tensor, span: Tensor
) -> Tensor | None:
    """Return (2H, m, d_h + 1): per head, the directions that the updates of missing inputs may have.

    The direction that reads one input is only known up to what is orthogonal to all known inputs, N. So what it reads is
    dq_i plus a combination of the columns of G N^T, the same for all heads; here each head is allowed a combination of its own.
    """
    width = span.shape[0] - len(inputs)
    if width <= 0 or any(p.weight not in update for p in anatomy.projections):
        return None
    known = torch.linalg.svd(inputs @ span.T, full_matrices=True).Vh  # (R, R)
    outside = known[len(inputs) :] @ span  # (m, D)
    terms = torch.cat([p.by_output(update[p.weight]).double() @ outside.T for p in anatomy.projections])  # (F, m)
    directions: Tensor = torch.linalg.svd(both_sides(terms, anatomy), full_matrices=False).Vh[:, :MOST_MISSING]
    return directions


def _changes(
    update: Mapping[str, Tensor], weights: Mapping[str, Tensor], anatomy: Anatomy, inputs: Tensor
) -> Tensor | None:
    """Return (F, n) the updates of all outputs of the projections, per input; zeros where a projection has no say.

    From the projections' own updates or, where adapters are all that is shared, from that of B, which is dY^T X A^T.
    """
    if all(p.weight in update for p in anatomy.projections):
        inverse = torch.linalg.pinv(inputs)  # (D, n)
        return torch.cat([p.by_output(update[p.weight]).double() @ inverse for p in anatomy.projections])
    parts = {}
    for adapter in anatomy.adapters:
        if adapter.up.weight in update and adapter.rank >= len(inputs):
            down = adapter.down.by_output(weights[adapter.down.weight]).double()  # (R, D)
            images = torch.linalg.pinv(inputs @ down.T)  # (R, n)
            parts[adapter.beside] = adapter.up.by_output(update[adapter.up.weight]).double() @ images
    if not parts:
        return None
    silent = [inputs.new_zeros(p.out_features, len(inputs)) for p in anatomy.projections]
    return torch.cat([parts.get(index, none) for index, none in enumerate(silent)])


def by_head(features: Tensor, anatomy: Anatomy) -> tuple[Tensor, Tensor]:
    """Split features (F, n) of all projections into those of queries and of keys, (H, n, d_h) each."""
    heads = [h for h in anatomy.heads if len(h.query) == len(anatomy.heads[0].query)]
    query = torch.stack([h.query for h in heads]).to(features.device)
    key = torch.stack([h.key for h in heads]).to(features.device)
    return features[query].transpose(1, 2), features[key].transpose(1, 2)


def both_sides(updates: Tensor, anatomy: Anatomy) -> Tensor:
    """Return updates (F, n) of all projections as (2H, n, d_h + 1): those of queries for every head, then those of keys."""
    return torch.cat([padded(side) for side in by_head(updates, anatomy)])


def keys_and_queries(weights: Mapping[str, Tensor], anatomy: Anatomy, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys (H, n, d_h + 1), the last entry a constant one that carries the sum over coefficients, and queries (H, n, d_h)."""
    queries, keys = by_head(torch.cat([_outputs(p, weights, inputs) for p in anatomy.projections]), anatomy)
    one = keys.abs().mean() * torch.ones_like(keys[..., :1])
    return torch.cat([keys, one], dim=2), queries


def _outputs(projection: Projection, weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Return (out, n): what the layer makes of the inputs."""
    made = projection.by_output(weights[projection.weight]).double() @ inputs.T
    bias = weights.get(projection.weight.removesuffix("weight") + "bias")
    return made if bias is None else made + bias.double()[:, None]


@dataclass(frozen=True)
class _Supports:
    """S growing sequences of k members each, and what is unexplained of their witnesses, per head and side."""

    members: list[tuple[int, ...]]
    basis: Tensor
    """(S, 2H, k, d) orthonormal: the span of the members' vectors."""
    left: Tensor
    """(S, 2H, d, w): what is unexplained of each witness; zero columns where a sequence has fewer."""
    witnesses: Tensor
    """(S,) how many."""
    outside: Tensor
    """(S, 2H, N): squared length of every vector outside the span."""
    end: Tensor
    """(S,) position of the member that closes the sequence, or one that no sequence reaches."""

    def residuals(self) -> Tensor:
        """Return (S,): the unexplained share, averaged over the better half of the witnesses.

        The update of a token that stands in several places is a sum, which no single one explains, and it is not always told
        from one that stands in one.
        """
        return _better_half(self.left.square().sum((1, 2)), self.witnesses)


def _better_half(by_witness: Tensor, witnesses: Tensor) -> Tensor:
    """Return (...): the mean of the smaller half of each row of by_witness (..., w), of which `witnesses` (...) count, the others 0."""
    width = by_witness.shape[-1]
    if width == 0:
        return torch.ones_like(witnesses)
    counted = witnesses - witnesses.div(2, rounding_mode="floor")
    last = width - witnesses + counted
    columns = torch.arange(width, device=last.device)
    ordered = by_witness.sort(dim=-1).values  # those that do not count come first
    return (ordered * (columns < last[..., None])).sum(-1) / counted.clamp_min(1)


class AttentionEvidence:
    """Which inputs could explain which updates, for all heads and both sides at once.

    Args:
        vectors: (2H, N, d) float64: keys of every input for each head, then its queries.
        updates: (2H, M, d): dq for each head, then dk, of the M inputs that are read alone.
        witness: (N,) row among the M for each input, -1 where its update is not known.
        positions: (N,) position of each input.
        missing: (2H, m, d) orthonormal directions that explain nothing and do not count, or None.
        closing: (N,) booleans: inputs with which a sequence ends, and every sequence ends with one of them; None where
            sequences end anyhow.
    """

    def __init__(
        self,
        vectors: Tensor,
        updates: Tensor,
        factors: Tensor,
        positions: Tensor,
        missing: Tensor | None = None,
        closing: Tensor | None = None,
    ) -> None:
        """Put both sides on one scale, and take the directions of missing inputs out."""
        if missing is not None:
            vectors = vectors - (vectors @ missing.transpose(1, 2)) @ missing
            updates = updates - (updates @ missing.transpose(1, 2)) @ missing
        self._vectors = vectors
        self._rough = vectors.float()
        self._size = vectors.square().sum(2).clamp_min(1e-300)  # (2H, N)
        # Both sides count alike, whatever their scale.
        heads = vectors.shape[0] // 2
        scale = torch.cat(
            [side.square().sum((0, 2)).clamp_min(1e-300).rsqrt().expand(heads, -1) for side in updates.split(heads)]
        )
        self._updates = updates * (scale * 0.5**0.5)[..., None]
        self._witness = factors
        self.positions = positions
        self._places = positions.tolist()
        self._closing = closing
        self._beyond = int(positions.max()) + 1

    def grow(self, start: Sequence[int], available: Tensor, beam: int, longest: int) -> list[Group]:
        """Grow sequences from some members, one per position, keeping the `beam` best at each step.

        Every member whose own update is known becomes a witness: what explains one token of a sequence has to explain all.

        Args:
            start: rows that belong to the sequence.
            available: (N,) booleans: rows that may be added.
            beam: hypotheses kept.
            longest: stop at this many members.

        Returns:
            Every hypothesis on the way whose positions run from 0 without a gap, best first; where there is none, the best one.
        """
        supports = self._empty()
        for row in start:
            supports = self._extend(supports, [0], [row])
        whole: list[Group] = []
        best = Group(supports.members[0], float("inf"))
        for _ in range(longest - len(start)):
            parents, rows = self._choices(supports, available, beam)
            if not rows:
                break
            supports = self._extend(supports, parents, rows)
            groups = [
                Group(tuple(sorted(members, key=self._places.__getitem__)), residual)
                for members, residual in zip(supports.members, supports.residuals().tolist(), strict=True)
            ]
            best = min([best, *groups], key=lambda group: group.residual)
            whole += [group for group in groups if self._is_whole(group)]
            if any(group.residual < COMPLETE for group in whole):
                break
        return sorted((self._shortened(group) for group in whole or [best]), key=lambda group: group.residual)

    def exchanged(self, group: Group, times: int) -> Group:
        """Exchange one member at a time for the input at its position that leaves least unexplained, until nothing is.

        What a beam takes early it never gives back; and with all other members in place, even an input that is hardly
        attended to stands out.

        Args:
            group: rows by position, from 0 without a gap.
            times: exchanges to make at most.
        """
        members, residual = list(group.members), group.residual
        for _ in range(times):
            if residual < COMPLETE:
                break
            left, place, row = min(self._exchanges(members), default=(float("inf"), 0, 0))
            if left >= residual:
                break
            members[place], residual = row, left
        return Group(tuple(members), residual)

    def _exchanges(self, members: list[int]) -> Iterator[tuple[float, int, int]]:
        """Yield for every place in a sequence what its best input would leave unexplained, the place and that input."""
        rows = torch.tensor(members, device=self.positions.device)
        for place in range(1, len(members)):
            others = torch.cat([rows[:place], rows[place + 1 :]])
            basis = torch.linalg.qr(self._vectors[:, others].transpose(1, 2)).Q  # (2H, d, k)
            factors = self._witness[others]
            updates = self._updates[:, factors[factors >= 0]].transpose(1, 2)  # (2H, d, w)
            if updates.shape[2] == 0:
                continue
            left = updates - basis @ (basis.transpose(1, 2) @ updates)
            choices = (self.positions == self.positions[rows[place]]).nonzero().flatten()
            vectors = self._vectors[:, choices].transpose(1, 2)
            outside = vectors - basis @ (basis.transpose(1, 2) @ vectors)
            size = outside.square().sum(1)  # (2H, c)
            fresh = size > 1e-8 * self._size[:, choices]
            inner = (outside.transpose(1, 2) @ left).square()  # (2H, c, w)
            gains = torch.where(fresh, size.clamp_min(1e-300).reciprocal(), 0.0)[..., None] * inner
            by_witness = (left.square().sum((0, 1)) - gains.sum(0)).clamp_min(0.0)  # (c, w)
            counted = by_witness.new_full((len(choices),), by_witness.shape[1])
            least, best = _better_half(by_witness, counted).min(dim=0)
            yield float(least), place, int(choices[best])

    def _shortened(self, group: Group) -> Group:
        """Return a complete sequence without what stands behind its end: a member too many explains as much."""
        if group.residual >= COMPLETE:
            return group
        supports = self._empty()
        for row in group.members[:-1]:
            supports = self._extend(supports, [0], [row])
            left = float(supports.residuals()[0])
            if int(supports.witnesses[0]) and left < COMPLETE:
                return Group(supports.members[0], left)
        return group

    def _empty(self) -> _Supports:
        sides, _, width = self._vectors.shape
        none = self._vectors.new_zeros
        end = torch.full((1,), self._beyond, dtype=torch.long, device=self.positions.device)
        return _Supports([()], none(1, sides, 0, width), none(1, sides, width, 0), none(1), self._size[None], end)

    def _choices(self, supports: _Supports, available: Tensor, beam: int) -> tuple[list[int], list[int]]:
        """Return the best extensions of all supports, each set of members once: which support, and the row to add."""
        scores = self._promises(supports, available)
        value, rows = scores.topk(min(beam, scores.shape[1]), dim=1, largest=False)
        ranked: dict[frozenset[int], tuple[float, int, int]] = {}
        for number, (promised, added) in enumerate(zip(value.tolist(), rows.tolist(), strict=True)):
            for score, row in zip(promised, added, strict=True):
                if score == float("inf"):
                    break
                key = frozenset((*supports.members[number], row))
                if key not in ranked or score < ranked[key][0]:
                    ranked[key] = (score, number, row)
        chosen = sorted(ranked.values())[:beam]
        return [number for _, number, _ in chosen], [row for _, _, row in chosen]

    def _promises(self, supports: _Supports, available: Tensor) -> Tensor:
        """Return (S, N): what each vector would leave unexplained; inf where its position is taken, or it explains nothing."""
        count, sides, width, witnesses = supports.left.shape
        left = supports.left.permute(1, 2, 0, 3).reshape(sides, width, count * witnesses)
        # To rank, single precision is enough. What is left is orthogonal to the members.
        inner = torch.bmm(self._rough, left.to(self._rough.dtype)).square_().view(sides, -1, count, witnesses)
        fresh = supports.outside > 1e-8 * self._size  # else numerically inside the span already: nothing to gain
        share = torch.where(fresh, supports.outside.clamp_min(1e-300).reciprocal(), 0.0).permute(1, 2, 0).float()
        gains = inner.mul_(share[..., None]).sum(0).transpose(0, 1).double()  # (S, N, w)
        now = supports.left.square().sum((1, 2))[:, None]  # (S, 1, w)
        promises = _better_half((now - gains).clamp_min(0.0), supports.witnesses[:, None].expand(-1, gains.shape[1]))
        taken = self.positions[torch.tensor(supports.members, device=self.positions.device)]  # (S, k)
        free = available[None] & ~(self.positions[None, :, None] == taken[:, None]).any(2)
        free &= self.positions[None] < supports.end[:, None]
        if self._closing is not None:
            free &= ~self._closing[None] | (self.positions[None] > taken.max(dim=1).values[:, None])
        return torch.where(free & (gains.sum(2) > 0.0), promises, torch.inf)

    def _extend(self, supports: _Supports, parents: list[int], rows: list[int]) -> _Supports:
        """Add the member `rows[i]` to the support `parents[i]`."""
        parent = torch.tensor(parents, device=self.positions.device)
        row = torch.tensor(rows, device=self.positions.device)
        basis, left = supports.basis[parent], supports.left[parent]
        vector = _outside(self._vectors[:, row].transpose(0, 1), basis)  # (S, 2H, d)
        length = vector.norm(dim=2, keepdim=True)
        fresh = length.square() > 1e-10 * self._size[:, row].T[..., None]
        unit = torch.where(fresh, vector / length.clamp_min(1e-300), 0.0)
        basis = torch.cat([basis, unit[:, :, None]], dim=2)
        left = left - unit[..., None] * (unit[..., None] * left).sum(2, keepdim=True)
        factors = self._witness[row]
        own = torch.where((factors >= 0)[:, None, None], self._updates[:, factors.clamp_min(0)].transpose(0, 1), 0.0)
        left = torch.cat([left, _outside(own, basis)[..., None]], dim=3)
        shadow = torch.bmm(self._vectors, unit.permute(1, 2, 0)).square().permute(2, 0, 1)  # (S, 2H, N)
        return _Supports(
            members=[(*supports.members[p], r) for p, r in zip(parents, rows, strict=True)],
            basis=basis,
            left=left,
            witnesses=supports.witnesses[parent] + (factors >= 0),
            outside=supports.outside[parent] - shadow,
            end=supports.end[parent] if self._closing is None else self._ends(supports.end[parent], row),
        )

    def _ends(self, end: Tensor, row: Tensor) -> Tensor:
        """Return (S,) where sequences end, now that they have the members `row`."""
        assert self._closing is not None
        return torch.where(self._closing[row], self.positions[row].minimum(end), end)

    def _is_whole(self, group: Group) -> bool:
        """Return whether the members' positions run from 0 without a gap, to one that closes a sequence."""
        closed = self._closing is None or bool(self._closing[group.members[-1]])
        return closed and [self._places[row] for row in group.members] == list(range(len(group.members)))


def _outside(vectors: Tensor, basis: Tensor) -> Tensor:
    """Return vectors (S, 2H, d) less their part in the span of orthonormal rows (S, 2H, k, d); twice, for the rounding."""
    for _ in range(2):  # sums, not matrix products: hundreds of tiny ones cost more than the arithmetic
        along = (basis * vectors[:, :, None]).sum(3, keepdim=True)  # (S, 2H, k, 1)
        vectors = vectors - (along * basis).sum(2)
    return vectors


def assemble(
    factors: AttentionFactors, positions: Tensor, *, beam: int, budget: Budget, closing: Tensor | None = None
) -> list[Group]:
    """Split inputs into sequences, surest first; every input is used once.

    Args:
        factors: per-token parts.
        positions: (n,) position of each input; a sequence has one input at each position from 0.
        beam: hypotheses kept while a sequence grows.
        budget: looked at between seeds.
        closing: as `Evidence` takes it.
    """
    count = len(positions)
    everyone = torch.arange(count, device=positions.device)
    evidence = AttentionEvidence(factors.vectors, factors.updates, everyone, positions, factors.missing, closing)
    free = torch.ones(count, dtype=torch.bool, device=positions.device)
    order = factors.updates.square().sum((0, 2)).argsort(descending=True).tolist()
    longest = int(positions.max()) + 1
    groups: list[Group] = []
    failed: dict[int, Group] = {}

    def accept(group: Group) -> None:
        groups.append(group)
        free[list(group.members)] = False

    # d_h + 1 vectors per head explain anything: such a long support is no test.
    given_up = 0 if factors.missing is None else factors.missing.shape[1]
    testable = factors.queries.shape[2] - SPARE_DIMENSIONS - given_up
    for seed in order:
        if not bool(free[seed]):
            continue
        if budget.exhausted():
            break
        best = evidence.grow([seed], free, beam, longest)[0]
        group = Group(best.members, best.residual)
        if group.residual < COMPLETE and len(group.members) <= testable:
            accept(group)
        else:
            failed[seed] = group
    # What is left is too long to be tested, or had a neighbour missing. One row at every position is a sentence by
    # elimination; otherwise take the best incomplete guesses, so that nothing that was found is thrown away.
    for seed, _ in sorted(failed.items(), key=lambda item: item[1].residual):
        if budget.exhausted():
            break
        if not bool(free[seed]):
            continue
        rest = free.nonzero().flatten()
        rest = rest[positions[rest].argsort()]
        if torch.equal(positions[rest], torch.arange(len(rest), device=rest.device)):
            accept(Group(tuple(rest.tolist()), max((g.residual for g in groups), default=1.0)))
        else:
            best = evidence.grow([seed], free, beam, longest)[0]
            accept(Group(best.members, best.residual))
    return sorted(groups, key=lambda group: group.residual)


def by_position(positions: Tensor) -> list[Group]:
    """Without attention evidence: the first pair at every position, as one guess that explains nothing."""
    first: dict[int, int] = {}
    for index, position in enumerate(positions.tolist()):
        first.setdefault(position, index)
    return [Group(tuple(first[p] for p in sorted(first)), residual=1.0)]


def confidence_of(group: Group) -> float:
    """Return 1 less the residual for a group that explains its seed, and at most a half for one that does not."""
    share = min(1.0, max(0.0, 1.0 - group.residual))
    return share if group.residual < COMPLETE else 0.5 * share


def as_guesses(groups: list[Group], tokens: Tensor) -> list[GuessedSequence]:
    """Turn assembled groups into guesses; a complete one is as sure as its residual is small."""
    return [
        GuessedSequence(tuple(tokens[list(group.members)].tolist()), confidence=confidence_of(group))
        for group in groups
    ]
