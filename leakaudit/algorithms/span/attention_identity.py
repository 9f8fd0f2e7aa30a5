"""Which inputs make up one sequence, of any length: what its keys receive, its queries give.

For every head the updates of queries and keys come from one matrix s over pairs of a sequence's tokens, dq_i = sum_j s_ij k_j and
dk_j = sum_i s_ij q_i. So, over the members of a sequence and over nothing less,

    sum_j k_j dk_j^T = sum_ij s_ij k_j q_i^T = sum_i dq_i q_i^T.

Each input has a mark k dk^T - dq q^T, and the marks of a sequence add up to zero: d_h (d_h + 1) equations a head, so that a
sequence may have more tokens than a head has dimensions, where the support test of `span_assembly` says nothing any more.
A member whose update is not known is taken out of the sum by leaving out the direction of its key on one side and of its query
on the other. What is left is a search over the choices at each place, and since the marks of strangers are nearly orthogonal to
each other, each right exchange brings the sum nearer to zero. (Own derivation.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.plugins.budget import Budget

SATISFIED = 1e-9
"""Squared sum of a sequence's marks, per equation and relative to theirs, below which it counts as zero. Measured on a train split:
3e-13 for whole sequences, 4e-5 and more for those with a wrong word."""

STEPS = 30
"""Steps in which several places are changed at a time. Our choice: it took ten at most on a train split."""

WIDTH, PATIENCE = 3, 2
"""Choices that are followed up at a time, and steps without a better one after which the search ends. Our choice."""

HEADS = 4
"""Heads that are asked, those with the largest marks. Our choice: a head of 32 dimensions with ten members of unknown update has
500 equations, and each place a dozen options."""

SPARE = 6
"""Dimensions of a head that members without known update have to leave. Our choice: four heads have 160 equations then."""


@dataclass(frozen=True)
class Choice:
    """One option for every place of a sequence."""

    options: tuple[int, ...]
    """By place; -1 where none is chosen yet."""
    violation: float
    """Mean square of what is left of the sum of marks, per equation, over the mean square of the marks themselves."""


class AttentionIdentity:
    """The options for each place of a sequence, and the search among them.

    Args:
        vectors: (2H, N, d_h + 1) float64: keys of every option for each head, then queries with a zero appended.
        updates: (2H, N, d_h + 1): dq, then dk, of each option; anything where it is not known.
        known: (N,) booleans: options whose update is known.
        places: (N,) position of each option.
    """

    def __init__(self, vectors: Tensor, updates: Tensor, known: Tensor, places: Tensor) -> None:
        """Compute the marks."""
        heads = vectors.shape[0] // 2
        self._keys = vectors[:heads].transpose(0, 1)  # (N, H, d + 1)
        self._queries = vectors[heads:, :, :-1].transpose(0, 1)  # (N, H, d)
        given, got = updates[:heads].transpose(0, 1), updates[heads:, :, :-1].transpose(0, 1)
        terms = self._keys[..., None] * got[..., None, :] - given[..., None] * self._queries[..., None, :]
        terms = torch.where(known[:, None, None, None], terms, 0.0)
        strongest = terms.square().sum((0, 2, 3)).topk(min(HEADS, heads)).indices
        self._keys, self._queries = self._keys[:, strongest], self._queries[:, strongest]
        self._terms = terms[:, strongest].float().contiguous()  # (N, H, d + 1, d)
        self._own = self._terms.square().sum((1, 2, 3)).double()  # (N,)
        self._known = known
        self._places = places

    def improve(self, start: Sequence[int], available: Tensor, budget: Budget) -> Choice:
        """Fill empty places and exchange members of known update, many at a time, while it gets better.

        Args:
            start: option at each place, -1 for none; the first and the last stay.
            available: (N,) booleans: options that may be chosen.
            budget: looked at between steps.
        """
        state = torch.tensor(start, device=self._places.device)
        inside = self._inside(available, len(start))
        best = Choice(tuple(start), self.violation(state))
        for _ in range(STEPS):
            value = self._violations(state, inside, unknown_too=False)
            least = float(value.min())
            if least >= best.violation * (1.0 - 1e-3) or least == float("inf") or budget.exhausted():
                break
            # Marks of strangers are nearly orthogonal, so what helps alone mostly helps together.
            together = state.clone()
            helpful = value < min(best.violation, 0.5 * (best.violation + least))
            for row in value.argsort(descending=True).tolist():
                if helpful[row]:
                    together[self._places[row]] = row
            state = state.clone()
            state[self._places[value.argmin()]] = value.argmin()
            jointly = self.violation(together)
            best = Choice(tuple(state.tolist()), least)
            if jointly < least:
                state, best = together, Choice(tuple(together.tolist()), jointly)
            if best.violation < SATISFIED and -1 not in best.options:
                break
        return best

    def _inside(self, available: Tensor, length: int) -> Tensor:
        """Return (N,) booleans: options that may be chosen, at places between the first and the last of so many."""
        inside: Tensor = available & (self._places > 0) & (self._places < length - 1)
        return inside

    def violation(self, state: Tensor) -> float:
        """Return the imbalance of the options at each place (L,), -1 for none."""
        chosen = state[state >= 0]
        unknown, members = chosen[~self._known[chosen]], chosen[self._known[chosen]]
        width = self._queries.shape[2]
        if len(unknown) > width - SPARE or len(members) == 0:
            return float("inf")
        left, right = self._sides(unknown)
        total = left @ self._terms[members].sum(0) @ right
        count = (width + 1 - len(unknown)) * (width - len(unknown))
        energy = float(self._own[members].sum()) / ((width + 1) * width)
        return float(total.double().square().sum()) / count / max(energy, 1e-300)

    def search(self, start: Sequence[int], available: Tensor, budget: Budget) -> Choice:
        """Exchange one option after another until the marks add up to zero, or it gets no better.

        Args:
            start: option at each place, -1 for none; the first and the last stay.
            available: (N,) booleans: options that may be chosen.
            budget: looked at between steps.
        """
        first = torch.tensor(start, device=self._places.device)
        inside = self._inside(available, len(start))
        states = [first]
        best = Choice(tuple(start), self.violation(first) if -1 not in start else float("inf"))
        seen: set[tuple[int, ...]] = set()
        stale = 0
        while stale <= PATIENCE and best.violation > SATISFIED and not budget.exhausted():
            following: dict[tuple[int, ...], float] = {}
            for state in states:
                value, option = self._violations(state, inside).topk(min(WIDTH, len(inside)), largest=False)
                for left, row in zip(value.tolist(), option.tolist(), strict=True):
                    if left == float("inf"):
                        break
                    changed = state.clone()
                    changed[self._places[row]] = row
                    key = tuple(changed.tolist())
                    if key not in seen:
                        following[key] = left
            if not following:
                break
            seen |= set(following)
            ranked = sorted(following.items(), key=lambda item: item[1])[:WIDTH]
            states = [torch.tensor(key, device=first.device) for key, _ in ranked]
            stale += 1
            if ranked[0][1] < best.violation * (1.0 - 1e-6):
                best, stale = Choice(*ranked[0]), 0
        return best

    def _violations(self, state: Tensor, inside: Tensor, *, unknown_too: bool = True) -> Tensor:
        """Return (N,): the imbalance after each option is taken at its place; inf for those that may not be, or already are.

        `unknown_too` asks for places whose present member has no known update as well: each needs projections of its own.
        """
        found = torch.full(self._places.shape, torch.inf, dtype=torch.float64, device=state.device)
        chosen = state[state >= 0]
        unknown = chosen[~self._known[chosen]]
        members = chosen[self._known[chosen]]
        held = state[self._places.clamp_max(len(state) - 1)]  # (N,) what stands at each option's place now
        free = inside & (held != torch.arange(len(held), device=held.device))
        standing_unknown = (held >= 0) & ~self._known[held.clamp_min(0)]
        options = (free & ~standing_unknown).nonzero().flatten()
        found[options] = self._after(options, members, unknown, held[options])
        for out in unknown.tolist() if unknown_too else ():
            options = (free & (held == out)).nonzero().flatten()
            if len(options):
                none = torch.full_like(options, -1)
                found[options] = self._after(options, members, unknown[unknown != out], none)
        return found

    def _after(self, options: Tensor, members: Tensor, unknown: Tensor, held: Tensor) -> Tensor:
        """Return (n,) the imbalance with each of the options added, and what is `held` at its place, if anything, gone.

        Args:
            options: (n,).
            members: known options in the sequence.
            unknown: the others in it, none of them held at the place of an option.
            held: (n,) of the members, -1 for none.
        """
        width = self._queries.shape[2]
        found = torch.full(options.shape, torch.inf, dtype=torch.float64, device=options.device)
        if len(unknown) > width - SPARE:
            return found
        left, right = self._sides(unknown)  # (H, d + 1, d + 1), (H, d, d)
        total = left @ self._terms[members].sum(0) @ right
        energy = self._own[members].sum() / ((width + 1) * width)
        gone = torch.where((held >= 0)[:, None, None, None], self._terms[held.clamp_min(0)], 0.0)
        rest = total - left @ gone @ right  # (n, H, d + 1, d)
        shrunk = energy - torch.where(held >= 0, self._own[held.clamp_min(0)], 0.0) / ((width + 1) * width)
        known = self._known[options]
        added = left @ self._terms[options[known]] @ right
        count = (width + 1 - len(unknown)) * (width - len(unknown))
        after = (rest[known] + added).square().sum((1, 2, 3)).double() / count
        found[known] = after / (shrunk[known] + self._own[options[known]] / ((width + 1) * width)).clamp_min(1e-300)
        new = options[~known]
        key = _unit((left @ self._keys[new].float()[..., None])[..., 0])
        query = _unit((self._queries[new].float()[..., None, :] @ right)[..., 0, :])
        rest = rest[~known]
        along_key = (key[..., None, :] @ rest)[..., 0, :]  # (n, H, d)
        along_query = (rest @ query[..., None])[..., 0]
        both = (along_key * query).sum(2)
        parts = rest.square().sum((2, 3)) - along_key.square().sum(2) - along_query.square().sum(2) + both.square()
        count = (width - len(unknown)) * (width - 1 - len(unknown))
        found[~known] = parts.clamp_min(0.0).sum(1).double() / count / shrunk[~known].clamp_min(1e-300)
        return found

    def _sides(self, unknown: Tensor) -> tuple[Tensor, Tensor]:
        """Return the projections that leave out the keys, and the queries, of some options."""
        sides = []
        for vectors in (self._keys[unknown], self._queries[unknown]):
            basis = torch.linalg.qr(vectors.permute(1, 2, 0)).Q  # (H, d, u)
            one = torch.eye(basis.shape[1], dtype=basis.dtype, device=basis.device)
            sides.append((one - basis @ basis.transpose(1, 2)).float())
        return sides[0], sides[1]


def _unit(vectors: Tensor) -> Tensor:
    unit: Tensor = vectors / vectors.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    return unit
