"""Attention evidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

COMPLETE = 1e-6
"""Residual, as a share of the seed's own |dq|^2 + |dk|^2, below which a support counts as complete. Measured on a train split:
1e-14 to 1e-12 for whole sequences in a pretrained encoder, down to 6e-5 for wrong ones among ghosts."""


@dataclass(frozen=True)
class Group:
    """One assembled sequence."""

    members: tuple[int, ...]
    """Rows of X, by position."""
    residual: float
    """What the members leave unexplained of their own updates, on average, 0 to 1."""


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
