"""Test by an identity of attention: do inputs form one sequence, of any length?

For every head the gradients of queries and keys come from one matrix s over pairs of a sequence's tokens: dq_i = sum_j
s_ij k_j and dk_j = sum_i s_ij q_i. So the following holds for sums over all members of a sequence, and not for fewer:

    sum_j k_j dk_j^T = sum_ij s_ij k_j q_i^T = sum_i dq_i q_i^T.

Each input has a term k dk^T - dq q^T, and the terms of a sequence add up to zero: d_h (d_h + 1) equations per head. So
this test also works for a sequence with more tokens than a head has dimensions; the test of `attention_evidence` does
not.

A member whose gradient is not known is removed from the sum: the direction of its key is projected out on one side,
the direction of its query on the other. Then one option is searched for each place. The terms of other sequences' tokens
are nearly orthogonal to each other, so each right exchange brings the sum nearer to zero. (Own derivation.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.plugins.budget import Budget

SATISFIED = 1e-9
"""Violation below which the identity holds.
Chosen on training sentences; see docs/decisions/span_constants.md."""

STEPS = 30
"""Most steps in which several places are changed at a time.
Our choice; see docs/decisions/span_constants.md."""

WIDTH, PATIENCE = 3, 2
"""Choices that are continued at a time (WIDTH), and steps without improvement that end the search (PATIENCE).
Our choice."""

HEADS = 4
"""Heads that are used: those with the largest terms.
Our choice: a head of 32 dimensions with ten unknown members has 500 equations, and each place a dozen options."""

SPARE = 6
"""Dimensions of a head that members without a known gradient must leave free.
Our choice: four heads then have 160 equations."""


@dataclass(frozen=True)
class Choice:
    """One option for every place of a sequence."""

    options: tuple[int, ...]
    """By place; -1 where none is chosen yet."""
    violation: float
    """Mean square of the sum of terms, per equation, over the mean square of the terms."""


class AttentionIdentity:
    """The options for each place of a sequence, and the search among them.

    Args:
        vectors: (2H, N, d_h + 1) float64: keys of every option for each head, then queries with a zero appended.
        updates: (2H, N, d_h + 1): dq, then dk, of each option; arbitrary where they are not known.
        known: (N,) booleans: options whose gradient is known.
        places: (N,) int64 position of each option.
    """

    def __init__(self, vectors: Tensor, updates: Tensor, known: Tensor, places: Tensor) -> None:
        """Compute the terms."""
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
        """Fill empty places and exchange known members, many at a time.

        Args:
            start: option at each place, -1 for none; the first and the last are kept.
            available: (N,) booleans: options that may be chosen.
            budget: checked between steps.
        """
        state = torch.tensor(start, device=self._places.device)
        inside = self._inside(available, len(start))
        best = Choice(tuple(start), self.violation(state))
        for _ in range(STEPS):
            value = self._violations(state, inside, unknown_too=False)
            least = float(value.min())
            if least >= best.violation * (1.0 - 1e-3) or least == float("inf") or budget.exhausted():
                break
            # Terms of other sequences are nearly orthogonal, so changes that help alone mostly help together.
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
        """Return (N,) booleans: options between the first and the last place."""
        inside: Tensor = available & (self._places > 0) & (self._places < length - 1)
        return inside

    def violation(self, state: Tensor) -> float:
        """Return the violation of the options at each place (L,), -1 for none."""
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
        """Exchange one option after another until the identity holds or nothing helps.

        Args:
            start: option at each place, -1 for none; the first and the last are kept.
            available: (N,) booleans: options that may be chosen.
            budget: checked between steps.
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
        """Return (N,): the violation after each option is put at its place.

        It is infinite for options that are already chosen or may not be chosen.

        Args:
            state: (L,) int64: option at each place, -1 for none.
            inside: (N,) booleans: options that may be chosen.
            unknown_too: also replace members without a known gradient; each needs projections of its own.
        """
        found = torch.full(self._places.shape, torch.inf, dtype=torch.float64, device=state.device)
        chosen = state[state >= 0]
        unknown = chosen[~self._known[chosen]]
        members = chosen[self._known[chosen]]
        held = state[self._places.clamp_max(len(state) - 1)]  # (N,) the option that is at each option's place now
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
        """Return (n,): the violation with each option added and the present one removed.

        Args:
            options: (n,) int64.
            members: options of the sequence with a known gradient.
            unknown: the other options of the sequence, none of them at the place of an option.
            held: (n,) int64: the member that an option replaces, -1 for none.
        """
        width = self._queries.shape[2]
        found = torch.full(options.shape, torch.inf, dtype=torch.float64, device=options.device)
        if len(unknown) > width - SPARE:
            return found
        left, right = self._sides(unknown)  # (H, d + 1, d + 1), (H, d, d)
        total = left @ self._terms[members].sum(0) @ right
        energy = self._own[members].sum() / ((width + 1) * width)
        removed = torch.where((held >= 0)[:, None, None, None], self._terms[held.clamp_min(0)], 0.0)
        rest = total - left @ removed @ right  # (n, H, d + 1, d)
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
        """Return the projections that remove the keys, and the queries, of some options."""
        sides = []
        for vectors in (self._keys[unknown], self._queries[unknown]):
            basis = torch.linalg.qr(vectors.permute(1, 2, 0)).Q  # (H, d, u)
            one = torch.eye(basis.shape[1], dtype=basis.dtype, device=basis.device)
            sides.append((one - basis @ basis.transpose(1, 2)).float())
        return sides[0], sides[1]


def _unit(vectors: Tensor) -> Tensor:
    unit: Tensor = vectors / vectors.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    return unit
