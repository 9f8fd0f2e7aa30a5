"""Search for the 0/1 dropout masks with which candidates lie in the span.

With dropout after the last normalisation a token enters as v = x * m / (1 - p), with m an unknown 0/1 mask. That vector
lies in the span; x itself does not. So for a candidate y = x / (1 - p) the search looks for a point in the span whose
coordinates are 0 or y_j: D - R linear equations in D bits, where R is the rank.

Each of the two conditions alone is easy, so they are met alternately (alternating direction method of multipliers, Boyd
et al., Foundations and Trends in Machine Learning 2011, Sec. 3 and 9.1): project on the span, then change as little as
possible to meet the other condition, with a dual variable that sums their disagreement. One iteration is two products
with the basis, for all candidates at once.

The first iterations use a convex condition, least absolute deviations, which separates true candidates from false ones
fast: there are D equations and R unknowns, and a share p of the equations is grossly wrong. This condition has two
weaknesses. It fails if R is near D (1 - 2p). And it cannot separate copies of one input behind different masks (every
sequence starts with [CLS]), because all mixtures of them have the same deviation. The two-valued condition, which is
used afterwards, has neither weakness. From random masks it reaches different copies.

The final test is exact: with the right mask, y * m is in the span to rounding. Own derivation; the idea of learning the
masks is from GRAB (Feng et al., CCS 2024, Sec. 4.2), which uses gradient descent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from leakaudit.algorithms.span.candidates import Candidates, distances
from leakaudit.plugins.budget import Budget

FOUND = 2e-4
"""Largest distance from the span at which a masked candidate is in it.
Chosen on training sentences; see docs/decisions/span_constants.md."""

SCOUT, CONVEX, TWO_VALUED = 12, 48, 100
"""Iterations: convex before selection, convex after it, and two-valued.
Chosen on training sentences; see docs/decisions/span_constants.md."""

STIFFNESS = 0.5
"""Ratio of the deviation that one iteration of the convex phase accepts to the median |y_j|.
Our choice: 1 finds as many and is slower."""

BIAS = 0.2
"""A coordinate counts as dropped if it is nearer to 0 than to y_j by at least this share of |y_j|.
Our choice, because most coordinates are kept; see docs/decisions/span_constants.md."""

SCOUTED, TRIED = 3, 3
"""Selection: one of SCOUTED candidates is kept, and TRIED candidates per direction are tried at once.
Chosen on training sentences; see docs/decisions/span_constants.md."""

CHUNK = 1024
"""Candidates in one product.
Our choice: a float32 state of (1024, D) takes 2 MB at D = 384."""

RESTARTS = 8
"""Rounds of random starts.
Chosen on training sentences; see docs/decisions/span_constants.md."""

FLIPPED = 0.3
"""Share of coordinates that are dropped in a random start.
Chosen on training sentences; see docs/decisions/span_constants.md."""

TRIES, FREQUENT_TRIES = 2, 48
"""Random starts per round, for all pairs (TRIES) and for pairs that probably have copies (FREQUENT_TRIES).
Our choice. Copies are probable for a token that every sequence has, and at positions where a sequence lacks an input."""

AGAIN = 2
"""Rounds of random starts at positions where a sequence lacks an input.
Our choice: there are thousands of candidates."""

HIDDEN = 256
"""Pairs without a mask that are started again, best first.
Chosen on training sentences; see docs/decisions/span_constants.md."""

DIFFERENT = 8
"""Masks of two copies differ in more coordinates than this.
Our choice: two masks at rate 0.1 differ in 0.18 D coordinates, about 70 at D = 384."""


@dataclass(frozen=True)
class Masked:
    """Inputs that were found behind their dropout masks."""

    tokens: Tensor
    """(N,) token ids."""
    positions: Tensor
    """(N,)."""
    vectors: Tensor
    """(N, D) float64: the input as the layer saw it, x * m / (1 - p)."""

    def __len__(self) -> int:
        """Return how many were found."""
        return len(self.tokens)


def find_masked(
    basis: Tensor,
    candidates: Candidates,
    rate: float,
    rng: torch.Generator,
    budget: Budget,
    frequent: frozenset[int] = frozenset(),
) -> Masked:
    """Find the candidates that are in the batch behind a dropout mask.

    A candidate that occurs several times is returned once for each occurrence found.

    Args:
        basis: (R, D) float64: R is the number of real tokens, because masks make all inputs distinct.
        candidates: pairs to test.
        rate: dropout rate p.
        rng: draws starts and the coordinates in which copies must differ.
        budget: checked between chunks.
        frequent: token ids that every sequence has (special tokens): they get more starts, because they have copies.
    """
    search = MaskSearch(basis, rate, rng, budget, frequent)
    search.consider(candidates)
    search.copies()
    return search.result()


@dataclass
class _Pair:
    """One candidate, and the masks found for it."""

    token: int
    position: int
    target: Tensor
    """(D,) float64."""
    promise: float
    """Sum of absolute deviations after selection, over |y|_1; small is better."""
    masks: list[Tensor] = field(default_factory=list)


class MaskSearch:
    """The candidates of one span, and the distinct masked inputs found so far."""

    def __init__(
        self, basis: Tensor, rate: float, rng: torch.Generator, budget: Budget, frequent: frozenset[int]
    ) -> None:
        """Prepare the projection.

        Args:
            basis: (R, D) float64, orthonormal rows.
            rate: dropout rate p.
            rng: draws starts.
            budget: checked between chunks.
            frequent: token ids that every sequence has.
        """
        self._basis = basis
        self._rows = basis.float()
        self._rate = rate
        self._rng = rng
        self._budget = budget
        self._frequent = frequent
        self._pairs: list[_Pair] = []
        width = basis.shape[1]
        # A mask must keep at least this share (six standard deviations below the mean), as the zero vector is in every span.
        self._least = 1.0 - rate - 6.0 * (rate * (1.0 - rate) / width) ** 0.5

    def complete(self) -> bool:
        """Return whether there is an input for each direction, or no time left."""
        return self.count() >= len(self._basis) or self._budget.exhausted()

    def count(self) -> int:
        """Return how many distinct inputs are found."""
        return sum(len(pair.masks) for pair in self._pairs)

    def consider(self, candidates: Candidates) -> int:
        """Look for a mask of the most promising candidates.

        Returns:
            How many of these candidates have a mask.
        """
        targets = candidates.inputs / (1.0 - self._rate)
        parts = [self._scout(targets[index].float()) for index in torch.arange(len(targets)).split(CHUNK)]
        promise = torch.cat(parts)
        often = torch.tensor([int(token) in self._frequent for token in candidates.tokens])
        order = torch.where(often, promise - 1.0, promise).argsort()
        tried = TRIED * len(self._basis) + int(often.sum())
        kept = order[: max(tried, len(order) // SCOUTED)]
        pairs = [
            _Pair(int(candidates.tokens[i]), int(candidates.positions[i]), targets[i], float(promise[i]))
            for i in kept.tolist()
        ]
        for start in range(0, min(tried, len(pairs)), CHUNK):
            if self._budget.exhausted():
                break
            part = pairs[start : min(start + CHUNK, tried)]
            wrong, dual = self._deviations(targets[kept[start : start + len(part)]].float(), SCOUT + CONVEX)
            self._meet_two_values(part, wrong, dual)
        self._pairs += pairs
        return sum(bool(pair.masks) for pair in pairs)

    def look_again(self, candidates: Candidates) -> None:
        """Look for masks of all candidates, and for further copies of those with a mask."""
        known = {(pair.token, pair.position): pair for pair in self._pairs}
        targets = candidates.inputs / (1.0 - self._rate)
        pairs = [
            known.get((token, position)) or _Pair(token, position, target, 0.0)
            for token, position, target in zip(
                candidates.tokens.tolist(), candidates.positions.tolist(), targets, strict=True
            )
        ]
        self._pairs += [pair for pair in pairs if (pair.token, pair.position) not in known]
        new = [pair for pair in pairs if not pair.masks]
        for start in range(0, len(new), CHUNK):
            if self.complete():
                return
            part = new[start : start + CHUNK]
            wrong, dual = self._deviations(torch.stack([pair.target for pair in part]).float(), SCOUT + CONVEX)
            self._meet_two_values(part, wrong, dual)
        for _ in range(AGAIN):
            self._restart(pairs, TRIES)
            self._restart([pair for pair in pairs if pair.masks], FREQUENT_TRIES)

    def copies(self) -> None:
        """Search from random masks for first masks of pairs and for further copies."""
        for _ in range(RESTARTS):
            if self.complete():
                return
            missing = len(self._basis) - self.count()
            hidden = sorted((p for p in self._pairs if not p.masks), key=lambda p: p.promise)[
                : max(HIDDEN, 4 * missing)
            ]
            known = [pair for pair in self._pairs if pair.masks]
            often = [pair for pair in known if pair.token in self._frequent]
            lead = sorted(often, key=lambda p: -len(p.masks))[:4]
            self._restart([*hidden, *known], TRIES)
            self._restart(lead, FREQUENT_TRIES)

    def result(self) -> Masked:
        """Return everything found."""
        rows = [(pair, mask) for pair in self._pairs for mask in pair.masks]
        device = self._basis.device
        vectors = [pair.target * mask for pair, mask in rows]
        width = self._basis.shape[1]
        return Masked(
            tokens=torch.tensor([pair.token for pair, _ in rows], dtype=torch.long, device=device),
            positions=torch.tensor([pair.position for pair, _ in rows], dtype=torch.long, device=device),
            vectors=torch.stack(vectors) if vectors else torch.zeros(0, width, dtype=torch.float64, device=device),
        )

    def _scout(self, targets: Tensor) -> Tensor:
        """Return (N,): sum of absolute deviations after a few iterations, over |y|_1."""
        if self._budget.exhausted():
            return torch.full((len(targets),), torch.inf)
        wrong, dual = self._deviations(targets, SCOUT)
        left = targets - self._project(targets - wrong + dual)
        share: Tensor = left.abs().sum(1) / targets.abs().sum(1).clamp_min(1e-12)
        return share.cpu()

    def _restart(self, pairs: list[_Pair], tries: int) -> None:
        """Start pairs from random masks.

        A further copy must keep a coordinate that each known copy dropped.
        """
        rows = [pair for pair in pairs for _ in range(tries)]
        for start in range(0, len(rows), CHUNK):
            if self.complete():
                return
            part = rows[start : start + CHUNK]
            targets = torch.stack([pair.target for pair in part]).float()
            noise = torch.rand(targets.shape, generator=self._rng).to(targets.device)
            wrong = torch.where(noise < FLIPPED, targets, 0.0)
            self._meet_two_values(part, wrong, torch.zeros_like(wrong), self._unlike_known(part))

    def _unlike_known(self, pairs: list[_Pair]) -> Tensor:
        """Return (N, D) booleans: coordinates that a further copy must keep.

        One coordinate is drawn for each known copy that dropped it.
        """
        kept = torch.zeros(len(pairs), self._basis.shape[1], dtype=torch.bool, device=self._basis.device)
        for row, pair in enumerate(pairs):
            heavy = pair.target.abs() > 0.25 * pair.target.abs().median()
            for mask in pair.masks:
                dropped = (~mask & heavy).nonzero().flatten()
                if len(dropped):
                    kept[row, dropped[int(torch.randint(len(dropped), (1,), generator=self._rng))]] = True
        return kept

    def _project(self, vectors: Tensor) -> Tensor:
        return (vectors @ self._rows.T) @ self._rows

    def _deviations(self, targets: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
        """Return deviations (N, D) after some convex iterations, and the dual variable."""
        unit = STIFFNESS * targets.abs().median(dim=1, keepdim=True).values.clamp_min(1e-12)
        wrong, dual = torch.zeros_like(targets), torch.zeros_like(targets)
        for _ in range(iterations):
            pulled = targets - self._project(targets - wrong + dual) + dual
            wrong = pulled - pulled.clamp(-unit, unit)
            dual = pulled - wrong
        return wrong, dual

    def _meet_two_values(self, pairs: list[_Pair], wrong: Tensor, dual: Tensor, kept: Tensor | None = None) -> None:
        """Continue with the two-valued condition, and keep the masks that are right.

        Args:
            pairs: N of them, some perhaps several times.
            wrong: (N, D) float32: deviations to start from.
            dual: (N, D) float32: dual variable to start from.
            kept: (N, D) booleans: coordinates that may not be dropped.
        """
        exact = torch.stack([pair.target for pair in pairs])
        targets = exact.float()
        edge = (0.5 + 0.5 * BIAS) * targets.abs()
        for _ in range(TWO_VALUED):
            pulled = targets - self._project(targets - wrong + dual) + dual
            dropped = pulled * targets.sign() > edge
            if kept is not None:
                dropped &= ~kept
            wrong = torch.where(dropped, targets, 0.0)
            dual = pulled - wrong
        masks = self._project(targets - wrong) * targets.sign() > 0.5 * targets.abs()
        for _ in range(2):  # coordinates near zero are decided last, when the others are right
            nearest = (exact * masks @ self._basis.T) @ self._basis
            masks = nearest * exact.sign() > 0.5 * exact.abs()
        right = (distances(exact * masks, self._basis) < FOUND) & (masks.double().mean(1) > self._least)
        for row in right.nonzero().flatten().tolist():
            if all(int((masks[row] != mask).sum()) > DIFFERENT for mask in pairs[row].masks):
                pairs[row].masks.append(masks[row])


SEARCH_SHARE = 0.7
"""Share of the remaining time for the mask regressions.
Our choice: grouping needs a tenth of the search's time, and without grouping there is no result."""
