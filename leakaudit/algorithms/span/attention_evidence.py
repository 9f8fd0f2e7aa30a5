"""Evidence that inputs attend to each other, and the growth of sequences by it.

By the softmax Jacobian, for every attention head,

    dq_i = sum_j a_ij k_j,   sum_j a_ij = 0,        dk_i = sum_j b_ij q_j,

where j runs over the tokens of i's own sequence only. Keys k_j, queries q_j and their gradients are known
(`factoring`). So a sequence S is the common support of two sparse regressions per head, and there is an exact test of
S: the residuals of dq_i on {k_j : j in S} and of dk_i on {q_j : j in S} are zero if no member is missing.

A beam search adds one token at a time. It replaces the search over combinations of tokens in DAGER (Petrov et al. 2024,
Sec. 4.3, for encoders), which is exponential in the length. (Own derivation.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

COMPLETE = 1e-6
"""Share of the gradients' energy |dq|^2 + |dk|^2 that a complete sequence may leave unexplained.
Chosen on training sentences; see docs/decisions/span_constants.md."""


@dataclass(frozen=True)
class Group:
    """One sequence."""

    members: tuple[int, ...]
    """Rows of the inputs, ordered by position."""
    residual: float
    """Mean share of the members' own gradients that the members leave unexplained, 0 to 1."""


@dataclass(frozen=True)
class _Supports:
    """S growing sequences of k members each, with the residuals of their gradients."""

    members: list[tuple[int, ...]]
    basis: Tensor
    """(S, 2H, k, d) orthonormal: the span of the members' keys and queries."""
    left: Tensor
    """(S, 2H, d, w): residual of each member's gradient; columns beyond the members are zero."""
    known: Tensor
    """(S,) int64: number of members whose gradient is known."""
    outside: Tensor
    """(S, 2H, N): squared length of every vector outside the span of the members."""
    end: Tensor
    """(S,) int64: position of the member that ends the sequence, or one beyond all positions."""

    def residuals(self) -> Tensor:
        """Return (S,): the residual, averaged over the better half of the members.

        If a token occurs at several places, its gradient is a sum, which no single sequence explains. It is not always
        known which tokens these are, so the worse half does not count.
        """
        return _mean_of_smaller_half(self.left.square().sum((1, 2)), self.known)


def _mean_of_smaller_half(by_member: Tensor, known: Tensor) -> Tensor:
    """Return (...): the mean of the smaller half of each row.

    Args:
        by_member: (..., w), zero in columns that do not count.
        known: (...) int64: how many columns count.
    """
    width = by_member.shape[-1]
    if width == 0:
        return torch.ones_like(known)
    counted = known - known.div(2, rounding_mode="floor")
    last = width - known + counted
    columns = torch.arange(width, device=last.device)
    ordered = by_member.sort(dim=-1).values  # columns that do not count come first
    return (ordered * (columns < last[..., None])).sum(-1) / counted.clamp_min(1)


class AttentionEvidence:
    """Keys and queries of the inputs, and the gradients that they could explain.

    The two sides are keys, which explain gradients of queries, and queries, which explain gradients of keys.

    Args:
        vectors: (2H, N, d) float64: keys of every input for each head, then its queries.
        updates: (2H, M, d): dq for each head, then dk, of the M inputs whose own gradient is known.
        update_of: (N,) int64: column of each input among the M, -1 if its gradient is not known.
        positions: (N,) int64 position of each input.
        missing: (2H, m, d) orthonormal directions that explain nothing and do not count, or None.
        closing: (N,) booleans: inputs that end a sequence, if every sequence ends with one of them; None if sequences
            end with any token.
        noise: share of a gradient's energy that may be noise; residuals are what is left beyond it.
    """

    def __init__(
        self,
        vectors: Tensor,
        updates: Tensor,
        update_of: Tensor,
        positions: Tensor,
        missing: Tensor | None = None,
        closing: Tensor | None = None,
        noise: float = 0.0,
    ) -> None:
        """Scale both sides alike, and remove the directions of missing inputs."""
        if missing is not None:
            vectors = vectors - (vectors @ missing.transpose(1, 2)) @ missing
            updates = updates - (updates @ missing.transpose(1, 2)) @ missing
        self._vectors = vectors
        self._rough = vectors.float()
        self._size = vectors.square().sum(2).clamp_min(1e-300)  # (2H, N)
        # Gradients of queries and of keys count alike, whatever their scale.
        heads = vectors.shape[0] // 2
        scale = torch.cat(
            [side.square().sum((0, 2)).clamp_min(1e-300).rsqrt().expand(heads, -1) for side in updates.split(heads)]
        )
        self._updates = updates * (scale * 0.5**0.5)[..., None]
        self._update_of = update_of
        self.positions = positions
        self._places = positions.tolist()
        self._closing = closing
        self._noise = noise
        self._beyond = int(positions.max()) + 1

    def grow(self, start: Sequence[int], available: Tensor, beam: int, longest: int) -> list[Group]:
        """Grow sequences from some members, one per position, by beam search.

        Every member whose own gradient is known is part of the test: the members must explain all of these gradients.

        Args:
            start: rows that belong to the sequence.
            available: (N,) booleans: rows that may be added.
            beam: hypotheses kept at each step.
            longest: most members.

        Returns:
            Every hypothesis met whose positions run from 0 without a gap, best first; if there is none, the best
            hypothesis.
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
                Group(tuple(sorted(members, key=self._places.__getitem__)), self._beyond_noise(residual))
                for members, residual in zip(supports.members, supports.residuals().tolist(), strict=True)
            ]
            best = min([best, *groups], key=lambda group: group.residual)
            whole += [group for group in groups if self._is_whole(group)]
            if any(group.residual < COMPLETE for group in whole):
                break
        return sorted((self._shortened(group) for group in whole or [best]), key=lambda group: group.residual)

    def exchanged(self, group: Group, times: int) -> Group:
        """Exchange members for better inputs at the same positions, one at a time.

        The beam search never drops a member that it took early. If all other members are right, even a wrong member that
        gets little attention changes the residual visibly.

        Args:
            group: rows by position, from 0 without a gap.
            times: most exchanges.
        """
        members, residual = list(group.members), group.residual
        for _ in range(times):
            if residual < COMPLETE:
                break
            left, place, row = min(self._exchanges(members), default=(float("inf"), 0, 0))
            left = self._beyond_noise(left)
            if left >= residual:
                break
            members[place], residual = row, left
        return Group(tuple(members), residual)

    def _exchanges(self, members: list[int]) -> Iterator[tuple[float, int, int]]:
        """Yield for every place the least residual, the place and the input that gives it."""
        rows = torch.tensor(members, device=self.positions.device)
        for place in range(1, len(members)):
            others = torch.cat([rows[:place], rows[place + 1 :]])
            basis = torch.linalg.qr(self._vectors[:, others].transpose(1, 2)).Q  # (2H, d, k)
            column = self._update_of[others]
            updates = self._updates[:, column[column >= 0]].transpose(1, 2)  # (2H, d, w)
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
            by_member = (left.square().sum((0, 1)) - gains.sum(0)).clamp_min(0.0)  # (c, w)
            counted = by_member.new_full((len(choices),), by_member.shape[1])
            least, best = _mean_of_smaller_half(by_member, counted).min(dim=0)
            yield float(least), place, int(choices[best])

    def _shortened(self, group: Group) -> Group:
        """Return a complete sequence without members behind its end.

        A sequence with one more member also counts as complete, so the shortest complete beginning is taken.
        """
        if group.residual >= COMPLETE:
            return group
        supports = self._empty()
        for row in group.members[:-1]:
            supports = self._extend(supports, [0], [row])
            left = self._beyond_noise(float(supports.residuals()[0]))
            if int(supports.known[0]) and left < COMPLETE:
                return Group(supports.members[0], left)
        return group

    def _beyond_noise(self, residual: float) -> float:
        return max(0.0, residual - self._noise)

    def _empty(self) -> _Supports:
        sides, _, width = self._vectors.shape
        none = self._vectors.new_zeros
        end = torch.full((1,), self._beyond, dtype=torch.long, device=self.positions.device)
        return _Supports([()], none(1, sides, 0, width), none(1, sides, width, 0), none(1), self._size[None], end)

    def _choices(self, supports: _Supports, available: Tensor, beam: int) -> tuple[list[int], list[int]]:
        """Return the best extensions of all supports, each set of members once.

        Returns:
            The support to extend and the row to add, for each extension.
        """
        scores = self._residuals_with(supports, available)
        value, rows = scores.topk(min(beam, scores.shape[1]), dim=1, largest=False)
        ranked: dict[frozenset[int], tuple[float, int, int]] = {}
        for number, (residual, added) in enumerate(zip(value.tolist(), rows.tolist(), strict=True)):
            for score, row in zip(residual, added, strict=True):
                if score == float("inf"):
                    break
                key = frozenset((*supports.members[number], row))
                if key not in ranked or score < ranked[key][0]:
                    ranked[key] = (score, number, row)
        chosen = sorted(ranked.values())[:beam]
        return [number for _, number, _ in chosen], [row for _, _, row in chosen]

    def _residuals_with(self, supports: _Supports, available: Tensor) -> Tensor:
        """Return (S, N): the residual of each support with each vector added.

        It is infinite if the position is taken, behind a sequence's end, or if the vector explains nothing.
        """
        count, sides, width, known = supports.left.shape
        left = supports.left.permute(1, 2, 0, 3).reshape(sides, width, count * known)
        # Single precision is enough to rank. The residual is orthogonal to the members.
        inner = torch.bmm(self._rough, left.to(self._rough.dtype)).square_().view(sides, -1, count, known)
        fresh = supports.outside > 1e-8 * self._size  # else it is already in the span, to rounding
        share = torch.where(fresh, supports.outside.clamp_min(1e-300).reciprocal(), 0.0).permute(1, 2, 0).float()
        gains = inner.mul_(share[..., None]).sum(0).transpose(0, 1).double()  # (S, N, w)
        now = supports.left.square().sum((1, 2))[:, None]  # (S, 1, w)
        residuals = _mean_of_smaller_half(
            (now - gains).clamp_min(0.0), supports.known[:, None].expand(-1, gains.shape[1])
        )
        taken = self.positions[torch.tensor(supports.members, device=self.positions.device)]  # (S, k)
        free = available[None] & ~(self.positions[None, :, None] == taken[:, None]).any(2)
        free &= self.positions[None] < supports.end[:, None]
        if self._closing is not None:
            free &= ~self._closing[None] | (self.positions[None] > taken.max(dim=1).values[:, None])
        return torch.where(free & (gains.sum(2) > 0.0), residuals, torch.inf)

    def _extend(self, supports: _Supports, parents: list[int], rows: list[int]) -> _Supports:
        """Return the supports `parents[i]` with the member `rows[i]` added."""
        parent = torch.tensor(parents, device=self.positions.device)
        row = torch.tensor(rows, device=self.positions.device)
        basis, left = supports.basis[parent], supports.left[parent]
        vector = _outside(self._vectors[:, row].transpose(0, 1), basis)  # (S, 2H, d)
        length = vector.norm(dim=2, keepdim=True)
        fresh = length.square() > 1e-10 * self._size[:, row].T[..., None]
        unit = torch.where(fresh, vector / length.clamp_min(1e-300), 0.0)
        basis = torch.cat([basis, unit[:, :, None]], dim=2)
        left = left - unit[..., None] * (unit[..., None] * left).sum(2, keepdim=True)
        column = self._update_of[row]
        own = torch.where((column >= 0)[:, None, None], self._updates[:, column.clamp_min(0)].transpose(0, 1), 0.0)
        left = torch.cat([left, _outside(own, basis)[..., None]], dim=3)
        shadow = torch.bmm(self._vectors, unit.permute(1, 2, 0)).square().permute(2, 0, 1)  # (S, 2H, N)
        return _Supports(
            members=[(*supports.members[p], r) for p, r in zip(parents, rows, strict=True)],
            basis=basis,
            left=left,
            known=supports.known[parent] + (column >= 0),
            outside=supports.outside[parent] - shadow,
            end=supports.end[parent] if self._closing is None else self._ends(supports.end[parent], row),
        )

    def _ends(self, end: Tensor, row: Tensor) -> Tensor:
        """Return (S,): where sequences end, now that they have the members `row`."""
        assert self._closing is not None
        return torch.where(self._closing[row], self.positions[row].minimum(end), end)

    def _is_whole(self, group: Group) -> bool:
        """Return whether positions run from 0 without a gap to the end of a sequence."""
        closed = self._closing is None or bool(self._closing[group.members[-1]])
        return closed and [self._places[row] for row in group.members] == list(range(len(group.members)))


def _outside(vectors: Tensor, basis: Tensor) -> Tensor:
    """Return vectors (S, 2H, d) without their part in the span of rows (S, 2H, k, d).

    The projection is done twice, because after one the result is not orthogonal to rounding.
    """
    for _ in range(2):  # sums are faster than hundreds of tiny matrix products
        along = (basis * vectors[:, :, None]).sum(3, keepdim=True)  # (S, 2H, k, 1)
        vectors = vectors - (along * basis).sum(2)
    return vectors
