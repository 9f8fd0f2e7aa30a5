"""Regression for the tokens, one per position, that together explain an update.

The tokens are the unknowns. In units of its noise the stacked update is S = A X + N, with X (T, D) the attention inputs
of a sentence, A (F, T) unknown, and N of unit variance. With the best A, the tokens X explain |S P|^2, with P the
projector on their span; noise alone gives F per direction. So a sentence of T tokens has the score

    J(X) = |S P|^2 - F T.

Given all other tokens, the best token at a position is the x with the largest Rayleigh quotient |S y|^2 / |y|^2, where
y is the part of x outside the others' span. The score uses the strength of each direction, which a distance from the
span does not. It also compares lengths: a token that is not in the batch explains about F and adds nothing to J. The
search is a coordinate ascent, from a greedy choice or, in `sketch`, from the best single words. (Own derivation.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.plugins.budget import Budget

NEARLY_DEPENDENT = 0.02
"""Share of |x|^2 outside the others' span below which a candidate is not judged.
Our choice: the part outside is then mostly rounding of the position vectors, so the quotient is not reliable."""

NEGLIGIBLE = 1e-6
"""Share of the strongest direction's energy below which a direction is left out.
Our choice: no word depends on it."""

NEAR = 32
"""Candidates per position in steps for which the best few are enough. Our choice."""

SKETCH_SWEEPS = 2
"""Sweeps of the ascent that compares lengths. Our choice."""

EXCHANGES = 2
"""Rounds of exchanges between all pairs of positions.
Our choice: a third round hardly ever changes anything."""

MOST_SWEEPS = 12
"""Most sweeps of the ascent.
Chosen on training sentences; see docs/decisions/span_constants.md."""


@dataclass(frozen=True)
class Joint:
    """Tokens that explain an update together."""

    token_ids: tuple[int, ...]
    score: float
    """J: the energy that they explain beyond noise, in squared noise deviations."""


class JointFit:
    """The regression over one update, for sentences of one length."""

    def __init__(self, gram: Tensor, features: int, pools: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Prepare the regression.

        Args:
            gram: (D, D) float64: S^T S in units of the noise.
            features: F, rows of S.
            pools: (K_p,) token ids for each of T positions; one id where the token is known.
            inputs: (K_p, D) float64 for each position: their attention inputs.
        """
        self._features, self._pools, self._inputs = features, pools, inputs
        values, vectors = torch.linalg.eigh(gram)
        strong = values > values[-1] * NEGLIGIBLE
        self._root = vectors[:, strong] * values[strong].clamp_min(0).sqrt()  # (D, R): |x root|^2 = x gram x
        self._free = [p for p, pool in enumerate(pools) if len(pool) > 1]

    def sketch(self, budget: Budget) -> Joint:
        """Return a rough solution by a short ascent from the first token of every pool.

        It is good enough to compare lengths.
        """
        return self._joint(*self._ascend([0] * len(self._pools), budget, NEAR, SKETCH_SWEEPS))

    def solve(self, budget: Budget) -> Joint:
        """Return the best sentence found: greedy choice, ascent, exchanges of positions."""
        chosen = self._greedy()
        chosen, score = self._ascend(chosen, budget)
        for _ in range(EXCHANGES):
            before = score
            for source in self._free:
                for target in self._free:
                    if budget.exhausted():
                        return self._joint(chosen, score)
                    chosen, score = self._moved(chosen, score, source, target)
            chosen, score = self._ascend(chosen, budget)
            if score <= before + 1e-6 * abs(before):
                break
        return self._joint(chosen, score)

    def _joint(self, chosen: Sequence[int], score: float) -> Joint:
        return Joint(tuple(int(pool[i]) for pool, i in zip(self._pools, chosen, strict=True)), score)

    def _greedy(self) -> list[int]:
        """Choose the token with the largest gain first, then the next one given the first."""
        chosen = [0] * len(self._pools)
        rows = [x[0] for p, x in enumerate(self._inputs) if p not in self._free]
        missing = list(self._free)
        while missing:
            gains = [self._gains(p, torch.stack(rows) if rows else None) for p in missing]
            _, index = torch.stack([g.max() for g in gains]).max(dim=0)
            position = missing.pop(int(index))
            chosen[position] = int(gains[int(index)].argmax())
            rows.append(self._inputs[position][chosen[position]])
        return chosen

    def _rows(self, chosen: Sequence[int]) -> Tensor:
        return torch.stack([x[i] for x, i in zip(self._inputs, chosen, strict=True)])

    def _gains(self, position: int, others: Tensor | None, width: int | None = None) -> Tensor:
        """Return (K,): Rayleigh quotients of the first candidates at a position.

        Args:
            position: the position.
            others: (N, D) inputs at the other positions, or None.
            width: candidates to try; None takes all.
        """
        candidates = self._inputs[position][:width]
        outside = candidates
        if others is not None:
            basis = torch.linalg.qr(others.T).Q
            outside = candidates - (candidates @ basis) @ basis.T
        size = outside.square().sum(1)
        gain = (outside @ self._root).square().sum(1) / size.clamp_min(1e-300)
        return torch.where(size < NEARLY_DEPENDENT * candidates.square().sum(1), 0.0, gain)

    def _ascend(
        self, chosen: Sequence[int], budget: Budget, width: int | None = None, sweeps: int = MOST_SWEEPS
    ) -> tuple[list[int], float]:
        """Choose the best token at each position in turn until nothing changes."""
        chosen = list(chosen)
        rows = self._rows(chosen)
        for _ in range(sweeps):
            before = list(chosen)
            if budget.exhausted():
                break
            for position in self._free:
                gain = self._gains(position, torch.cat([rows[:position], rows[position + 1 :]]), width)
                chosen[position] = int(gain.argmax())
                rows[position] = self._inputs[position][chosen[position]]
            if chosen == before:
                break
        return chosen, self._score(rows)

    def _moved(self, chosen: list[int], score: float, source: int, target: int) -> tuple[list[int], float]:
        """Move a word to another position and fill its place; keep that if it is better.

        Returns:
            The choice and its score.
        """
        token = self._pools[source][chosen[source]]
        found = (self._pools[target] == token).nonzero().flatten()
        if source == target or len(found) == 0 or int(found[0]) == chosen[target]:
            return chosen, score
        tried = list(chosen)
        tried[target] = int(found[0])
        rows = self._rows(tried)
        gain = self._gains(source, torch.cat([rows[:source], rows[source + 1 :]]), NEAR)
        tried[source] = int(gain.argmax())
        rows[source] = self._inputs[source][tried[source]]
        new = self._score(rows)
        return (tried, new) if new > score else (chosen, score)

    def _score(self, rows: Tensor) -> float:
        basis = torch.linalg.qr(rows.T).Q
        return float((self._root.T @ basis).square().sum()) - self._features * len(rows)
