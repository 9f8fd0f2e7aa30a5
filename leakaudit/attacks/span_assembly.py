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

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.anatomy import Anatomy, Projection
from leakaudit.attacks.reconstruction import GuessedSequence
from leakaudit.budget import Budget

COMPLETE = 1e-4
"""Residual, as a share of the seed's own |dq|^2 + |dk|^2, below which a support counts as complete. Measured on a train split:
1e-8 to 1e-12 for whole sequences, above 1e-2 with one token missing."""


MOST_INCOMPLETE = 4
"""Incomplete guesses that are worth their time. Our choice: beyond a few they are made of pairs that are not in the batch."""

SPARE_DIMENSIONS = 2
"""Dimensions per head that a support must leave open to be tested by its residual. Our choice: with twelve heads that leaves
24 equations that chance would have to satisfy."""


@dataclass(frozen=True)
class Witness:
    """What every input says about its neighbours, by head."""

    keys: Tensor
    """(H, n, d_h + 1) float64: k_j and a constant one, which carries the constraint that coefficients sum to zero."""
    queries: Tensor
    """(H, n, d_h)."""
    query_updates: Tensor
    """(H, n, d_h + 1): dq_i with a zero appended."""
    key_updates: Tensor
    """(H, n, d_h)."""


@dataclass(frozen=True)
class Group:
    """One assembled sequence."""

    members: tuple[int, ...]
    """Rows of X, by position."""
    residual: float
    """What the support leaves unexplained of its seed, 0 to 1."""


def factor(
    update: Mapping[str, Tensor], weights: Mapping[str, Tensor], anatomy: Anatomy, inputs: Tensor
) -> Witness | None:
    """Factor the update into per-token parts.

    Args:
        update: parameter name -> update.
        weights: parameter name -> weights before the step.
        anatomy: parts of the model, with its heads.
        inputs: (n, D) float64, the inputs as the layer saw them.

    Returns:
        The witnesses, or None where heads are unknown or query and key are not both shared.
    """
    if not anatomy.heads or any(p.weight not in update for p in anatomy.projections):
        return None
    inverse = torch.linalg.pinv(inputs)  # (D, n)
    changes = torch.cat([p.by_output(update[p.weight]).double() @ inverse for p in anatomy.projections])  # (F, n)
    values = torch.cat([_outputs(p, weights, inputs) for p in anatomy.projections])  # (F, n)
    heads = [h for h in anatomy.heads if len(h.query) == len(anatomy.heads[0].query)]
    query = torch.stack([h.query for h in heads]).to(inputs.device)
    key = torch.stack([h.key for h in heads]).to(inputs.device)
    keys = values[key].transpose(1, 2)
    one = keys.abs().mean() * torch.ones_like(keys[..., :1])
    updates = changes[query].transpose(1, 2)
    return Witness(
        keys=torch.cat([keys, one], dim=2),
        queries=values[query].transpose(1, 2),
        query_updates=torch.cat([updates, torch.zeros_like(updates[..., :1])], dim=2),
        key_updates=changes[key].transpose(1, 2),
    )


def _outputs(projection: Projection, weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Return (out, n): what the layer makes of the inputs."""
    made = projection.by_output(weights[projection.weight]).double() @ inputs.T
    bias = weights.get(projection.weight.removesuffix("weight") + "bias")
    return made if bias is None else made + bias.double()[:, None]


class _Support:
    """Least squares of one seed's updates on a growing set of members, kept as orthonormal bases per head."""

    def __init__(self, witness: Witness, seed: int) -> None:
        self.members: list[int] = []
        self._dictionaries: tuple[Tensor, ...] = (witness.keys, witness.queries)
        self._left: tuple[Tensor, ...] = (
            witness.query_updates[:, seed].clone(),
            witness.key_updates[:, seed].clone(),
        )  # (H, d)
        # Both sides count alike, whatever their scale.
        self._scale = tuple(1.0 / left.square().sum().clamp_min(1e-300) for left in self._left)
        # What each dictionary vector still has outside the members' span: (H, n, d)
        self._outside: tuple[Tensor, ...] = tuple(d.clone() for d in self._dictionaries)
        self._size = tuple(d.square().sum(2).clamp_min(1e-300) for d in self._dictionaries)

    def copy(self) -> _Support:
        """Return an independent copy."""
        twin = object.__new__(_Support)
        twin.members = list(self.members)
        twin._dictionaries, twin._scale, twin._size = self._dictionaries, self._scale, self._size
        twin._left = tuple(t.clone() for t in self._left)
        twin._outside = tuple(t.clone() for t in self._outside)
        return twin

    def residual(self) -> float:
        """Return the unexplained share of both sides, 0 to 1."""
        return float(sum(s * left.square().sum() for s, left in zip(self._scale, self._left, strict=True)) / 2)

    def gains(self) -> Tensor:
        """Return (n,): by how much each vector would lower the residual, summed over heads and both sides."""
        total = torch.zeros(self._outside[0].shape[1], dtype=torch.float64, device=self._left[0].device)
        for scale, left, outside, size in zip(self._scale, self._left, self._outside, self._size, strict=True):
            length = outside.square().sum(2)  # (H, n)
            inner = torch.einsum("hd,hnd->hn", left, outside)
            new = length > 1e-10 * size  # numerically inside the span already: nothing to gain
            total += scale * torch.where(new, inner.square() / length.clamp_min(1e-300), 0.0).sum(0)
        return total / 2

    def add(self, index: int) -> None:
        """Put one vector into the support."""
        self.members.append(index)
        lefts, outsides = [], []
        for left, outside, size in zip(self._left, self._outside, self._size, strict=True):
            direction = outside[:, index]  # (H, d)
            length = direction.norm(dim=1, keepdim=True)
            ok = length.square() > 1e-10 * size[:, index : index + 1]
            unit = torch.where(ok, direction / length.clamp_min(1e-300), 0.0)
            lefts.append(left - (left * unit).sum(1, keepdim=True) * unit)
            shadow = torch.einsum("hnd,hd->hn", outside, unit)
            outsides.append(outside - shadow[..., None] * unit[:, None])
        self._left, self._outside = tuple(lefts), tuple(outsides)


def assemble(
    witness: Witness,
    positions: Tensor,
    *,
    reuse: bool,
    beam: int,
    budget: Budget,
    enough: Callable[[list[Group]], bool] = lambda groups: False,
) -> list[Group]:
    """Split inputs into sequences, surest first.

    Args:
        witness: per-token parts.
        positions: (n,) position of each input; a sequence has one input at each position from 0.
        reuse: an input may belong to several sequences: without dropout equal inputs are one row, and its update is a sum.
            Such a row never completes as a seed, which is how it is found out. With dropout every row is used once.
        beam: hypotheses kept while a sequence grows.
        budget: looked at between seeds.
        enough: asked once about the complete groups; where it says yes, no incomplete guesses are added.
    """
    count = len(positions)
    free = torch.ones(count, dtype=torch.bool, device=positions.device)
    strength = witness.query_updates.square().sum((0, 2)) + witness.key_updates.square().sum((0, 2))
    order = strength.argsort(descending=True).tolist()
    groups: list[Group] = []
    failed: dict[int, Group] = {}

    def accept(group: Group) -> None:
        groups.append(group)
        free[list(group.members)] = False

    # d_h + 1 vectors per head explain anything: such a long support is no test.
    testable = witness.queries.shape[2] - SPARE_DIMENSIONS
    for seed in order:
        if not bool(free[seed]):
            continue
        if budget.exhausted():
            break
        group = _grow(witness, positions, free | reuse, seed, beam)
        if group.residual < COMPLETE and len(group.members) <= testable:
            accept(group)
        else:
            failed[seed] = group
    # What is left is too long to be tested, or had a neighbour missing. One row at every position is a sentence by
    # elimination; otherwise take the best incomplete guesses, so that nothing that was found is thrown away.
    complete = len(groups)
    if groups and enough(list(groups)):
        return sorted(groups, key=lambda group: group.residual)
    for seed, _ in sorted(failed.items(), key=lambda item: item[1].residual):
        if len(groups) >= complete + MOST_INCOMPLETE or budget.exhausted():
            break
        if not bool(free[seed]):
            continue
        rest = free.nonzero().flatten()
        rest = rest[positions[rest].argsort()]
        if not reuse and torch.equal(positions[rest], torch.arange(len(rest), device=rest.device)):
            accept(Group(tuple(rest.tolist()), max((g.residual for g in groups), default=1.0)))
        else:
            accept(_grow(witness, positions, free | reuse, seed, beam))
    return sorted(groups, key=lambda group: group.residual)


def _grow(witness: Witness, positions: Tensor, available: Tensor, seed: int, beam: int) -> Group:
    """Grow a sequence around a seed until its updates are explained, keeping the `beam` best hypotheses."""
    start = _Support(witness, seed)
    start.add(seed)
    hypotheses, finished = [start], start
    for _ in range(int(positions.max())):
        grown: dict[frozenset[int], tuple[float, _Support, int]] = {}
        for support in hypotheses:
            taken = {int(positions[i]) for i in support.members}
            gains = support.gains()
            open_ = available & ~torch.isin(positions, torch.tensor(sorted(taken), device=positions.device))
            gains = torch.where(open_, gains, -1.0)
            for index in gains.topk(min(beam, len(gains))).indices.tolist():
                if float(gains[index]) <= 0:
                    continue
                key = frozenset((*support.members, index))
                score = support.residual() - float(gains[index])
                if key not in grown or score < grown[key][0]:
                    grown[key] = (score, support, index)
        ranked = sorted(grown.values(), key=lambda item: item[0])[:beam]
        hypotheses = []
        for _, support, index in ranked:
            twin = support.copy()
            twin.add(index)
            hypotheses.append(twin)
        if not hypotheses:
            break
        finished = min([finished, *hypotheses], key=lambda s: s.residual())
        if finished.residual() < COMPLETE and _is_whole(finished, positions):
            break
    members = sorted(finished.members, key=lambda i: int(positions[i]))
    return Group(tuple(members), finished.residual())


def _is_whole(support: _Support, positions: Tensor) -> bool:
    """Return whether the members' positions run from 0 without a gap."""
    taken = sorted(int(positions[i]) for i in support.members)
    return taken == list(range(len(taken)))


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
