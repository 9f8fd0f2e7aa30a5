"""Reading inputs out of the span when dropout hid a share of each: a regression that ignores gross errors.

With dropout after the last normalisation a token enters as x * m / (1 - p), m a 0/1 mask nobody sent. That vector lies in the
span, x itself does not. But there is a v in the span with v_j = x_j / (1 - p) on every kept coordinate: D equations, R
unknowns, about p of the equations grossly wrong and the rest exact. Least absolute deviations finds such a v exactly while
R stays well below D (1 - 2p). The test afterwards is sharp: every coordinate of v is either x_j / (1 - p) or 0, and where it
is 0 tells the mask.

Least absolute deviations is blind between several copies of one input behind different masks (every sequence starts with
[CLS]): every mixture of them has the same sum of deviations. So the fit goes on with a concave penalty, which prefers few gross
errors to many small ones, and ends on the two-valued model, in which every coordinate is either kept or zero. All three phases
are iteratively reweighted least squares, many candidates at once; random weights at the start let repeated fits end on
different copies. (Own derivation; the idea of learning the masks is GRAB's, Feng et al., CCS 2024, Sec. 4.2, which does it by
gradient descent.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.attacks.span_candidates import Candidates
from leakaudit.budget import Budget

EXPLAINED = 1e-3
"""Deviation, as a share of the median |x_j|, up to which a coordinate counts as explained. Measured on a train split
(six-layer encoder, D = 384): 1e-6 for true tokens, above 0.1 for false ones on nearly every coordinate."""

ACCEPTED = 0.98
"""Share of explained coordinates from which a candidate counts as found. Measured as above: 1.000 for true tokens while the
regression is well posed, at most 0.80 for false ones."""

PHASES = (12, 14, 8)
"""Reweightings with the absolute, the concave and the two-valued penalty. Measured on a train split at B = 8: 56 of 62 distinct
pairs are found in the first fit; longer phases found no more, absolute deviations alone 48."""

SCOUT_ROUNDS = 5
"""Reweightings after which hopeless candidates are dropped."""

JITTER = 0.7
"""Standard deviation of the logarithm of the random start weights. Measured as above: 0.5 to 1 find most further copies."""

CHUNK = 256
"""Candidates solved at once: (256, R, R) float64 normal matrices stay near 20 MB at R = 100."""


@dataclass(frozen=True)
class Masked:
    """Inputs that were found behind their dropout masks."""

    tokens: Tensor
    """(N,) token ids."""
    positions: Tensor
    """(N,)."""
    vectors: Tensor
    """(N, D) float64: the input as the layer saw it, x * m / (1 - p)."""
    share: Tensor
    """(N,) share of coordinates explained exactly."""

    def __len__(self) -> int:
        """Return how many were found."""
        return len(self.tokens)


class RobustFit:
    """Fits vectors of one span to many targets, a share of whose coordinates is grossly wrong."""

    def __init__(self, basis: Tensor) -> None:
        """Prepare products of basis columns, from which one matrix product makes all normal matrices.

        Args:
            basis: (R, D) float64, orthonormal rows.
        """
        self._basis = basis
        rank = basis.shape[0]
        self._upper = torch.triu_indices(rank, rank)
        self._products = basis.T[:, self._upper[0]] * basis.T[:, self._upper[1]]  # (D, R (R + 1) / 2)

    def scout(self, targets: Tensor) -> Tensor:
        """Return (N,): the median deviation after a few reweightings, over the median |target|; small is promising."""
        scale = _scale(targets)
        vectors = self._absolute(targets, torch.ones_like(targets), scale, SCOUT_ROUNDS)
        found: Tensor = ((vectors - targets).abs() / scale).median(dim=1).values
        return found

    def fit(self, targets: Tensor, *, start: Tensor | None = None, demands: Tensor | None = None) -> Tensor:
        """Return (N, D): for each target a vector of the span that agrees with it or is zero on as many coordinates as possible.

        Args:
            targets: (N, D) float64.
            start: (N, D) random weights of the first phases, or None for equal ones.
            demands: (N, D) booleans: coordinates where the target must be met, whatever the rest says.
        """
        scale = _scale(targets)
        weights = torch.ones_like(targets) if start is None else start
        must = torch.ones_like(targets) if demands is None else torch.where(demands, 1e4, 1.0)
        absolute, concave, two_valued = PHASES
        vectors = self._absolute(targets, weights * must, scale, absolute)
        for turn in range(concave):
            floor = scale * 4 * 0.3 * 0.75**absolute * 0.7**turn
            vectors = self._weighted(targets, weights * must / ((vectors - targets).square() + floor.square()))
        for turn in range(two_valued):
            floor = scale * 0.05 * 0.5**turn
            dropped = vectors.abs() < (vectors - targets).abs()
            if demands is not None:
                dropped &= ~demands
            nearest = torch.where(dropped, 0.0, targets)
            vectors = self._weighted(nearest, must / ((vectors - nearest).square() + floor.square()))
        return vectors

    def _absolute(self, targets: Tensor, weights: Tensor, scale: Tensor, rounds: int) -> Tensor:
        vectors = (targets @ self._basis.T) @ self._basis
        for turn in range(rounds):
            floor = scale * 0.3 * 0.75**turn
            vectors = self._weighted(targets, weights / (vectors - targets).abs().maximum(floor))
        return vectors

    def _weighted(self, targets: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted least-squares fit (N, D)."""
        rank = self._basis.shape[0]
        normal = targets.new_empty(len(targets), rank, rank)
        entries = weights @ self._products
        normal[:, self._upper[0], self._upper[1]] = entries
        normal[:, self._upper[1], self._upper[0]] = entries
        right = (weights * targets) @ self._basis.T
        solved, _ = torch.linalg.solve_ex(normal, right[..., None])
        vectors: Tensor = solved[..., 0] @ self._basis
        return vectors


def _scale(targets: Tensor) -> Tensor:
    """Return (N, 1): the median |target|, the unit of deviations."""
    median: Tensor = targets.abs().median(dim=1, keepdim=True).values
    return median.clamp_min(1e-12)


def explained_share(vectors: Tensor, targets: Tensor, rate: float) -> Tensor:
    """Return (N,): the share of coordinates of each vector that are either the target's or zero.

    It is at most half of what acceptance needs where fewer coordinates are kept than dropout of that rate leaves by chance (six standard deviations of the
    binomial distribution): the zero vector explains nothing.
    """
    tolerance = EXPLAINED * targets.abs().median(dim=1, keepdim=True).values
    kept = (vectors - targets).abs() < tolerance
    width = targets.shape[1]
    least = 1.0 - rate - 6.0 * (rate * (1.0 - rate) / width) ** 0.5
    share = (kept | (vectors.abs() < tolerance)).double().mean(dim=1)
    return torch.where(kept.double().mean(dim=1) >= least, share, torch.minimum(share, share.new_tensor(ACCEPTED / 2)))


def find_masked(
    basis: Tensor,
    candidates: Candidates,
    rate: float,
    rng: torch.Generator,
    budget: Budget,
    frequent: frozenset[int] = frozenset(),
) -> Masked:
    """Find the candidates that are in the batch behind a dropout mask, each as often as it is there.

    Args:
        basis: (R, D) float64: R is the number of real tokens, because masks make all inputs distinct.
        candidates: pairs to test, nearest first.
        rate: dropout rate p.
        rng: draws start weights and the coordinates that tell copies apart.
        budget: looked at between batches of regressions.
        frequent: token ids that every sequence has (special tokens): they get more tries, because copies are the rule.
    """
    search = _Search(basis, candidates, rate, rng, budget)
    search.single()
    for turn in range(RESTARTS):
        if search.complete():
            break
        search.further_copies(frequent)
        search.restart(frequent)
        if turn == 1:
            search.second_look()
    return search.result()


RESTARTS = 6
"""Rounds of further tries. Measured on a train split at B = 8: nearly all that is ever found comes in the first five."""

TRIES, FREQUENT_TRIES = 2, 8
"""Random starts a round of a doubtful candidate, and of a special token at a position where one is likely."""

HIT_PROBES = 3
"""Ways of demanding that a further copy differs from the known ones. Each succeeds with probability (1 - p)^known."""

DOUBTFUL = 0.15
"""Explained share above which a rejected candidate gets another try. Measured: true pairs that the first fit missed reach 0.17
and more; most false ones stay below."""

Demand = dict[int, float]
"""Coordinate -> value that the regression must take there."""


class _Search:
    """The regressions over one set of candidates, and the distinct masked inputs found so far."""

    def __init__(
        self, basis: Tensor, candidates: Candidates, rate: float, rng: torch.Generator, budget: Budget
    ) -> None:
        self._rank = basis.shape[0]
        self._fit = RobustFit(basis)
        self._candidates = candidates
        self._rate = rate
        self._targets = candidates.inputs / (1.0 - rate)
        self._tolerance = EXPLAINED * self._targets.abs().median(dim=1).values
        self._rng = rng
        self._budget = budget
        self._share = torch.zeros(len(candidates), dtype=torch.float64, device=basis.device)
        self._copies: dict[int, list[tuple[Tensor, float]]] = {}
        self._dropped: list[tuple[float, int]] = []
        """(Deviation, candidate) of those that the scout rounds dropped."""
        self._asked: dict[int, int] = {}
        """Candidate -> copies known when a further one was last looked for."""

    def complete(self) -> bool:
        """Return whether as many inputs are found as the span has directions, or time is up."""
        return sum(map(len, self._copies.values())) >= self._rank or self._budget.exhausted()

    def single(self) -> None:
        """Fit every candidate once; hopeless ones are dropped after a few rounds."""
        for index in torch.arange(len(self._targets), device=self._targets.device).split(CHUNK):
            if self._budget.exhausted():
                return
            promise = self._fit.scout(self._targets[index])
            order = promise.argsort()
            share = max(16, len(index) // 3)
            self._dropped += [(float(promise[i]), int(index[i])) for i in order[share:]]
            kept = index[order[:share]]
            vectors = self._fit.fit(self._targets[kept])
            self._share[kept] = explained_share(vectors, self._targets[kept], self._rate)
            for row, candidate in enumerate(kept.tolist()):
                self._add(candidate, vectors[row], float(self._share[candidate]))

    def second_look(self) -> None:
        """Fit what the scout rounds dropped after all, most promising first, until nothing is missing."""
        rows: list[tuple[int, Demand]] = [(index, {}) for _, index in sorted(self._dropped)]
        self._dropped = []
        self._run(rows)

    def further_copies(self, frequent: frozenset[int]) -> None:
        """Look for another copy of each pair found: it must keep a coordinate that each known copy dropped.

        Pairs that gained a copy since they were last asked are asked again, and those that are likely to have more.
        """
        plain: list[tuple[int, Demand]] = []
        again: list[tuple[int, Demand]] = []
        for index, copies in self._copies.items():
            likely = len(copies) > 1 or int(self._candidates.tokens[index]) in frequent
            new = self._asked.get(index) != len(copies)
            if new or likely:
                self._asked[index] = len(copies)
                demands = (self._unlike_known(index) for _ in range(HIT_PROBES))
                (plain if new else again).extend((index, demand) for demand in demands if demand is not None)
        self._run(plain)
        self._run(again, jitter=True)  # several unknown copies tie: only chance tells them apart

    def restart(self, frequent: frozenset[int]) -> None:
        """Fit again from random weights what is not explained yet, most promising first."""
        order = [i for i in self._share.argsort(descending=True).tolist() if float(self._share[i]) >= DOUBTFUL]
        missing = self._rank - sum(map(len, self._copies.values()))
        doubtful = [i for i in order if i not in self._copies][: 3 * missing + 8]
        special = [i for i in order if int(self._candidates.tokens[i]) in frequent][:FREQUENT_TRIES]
        rows: list[tuple[int, Demand]] = [(i, {}) for i in doubtful for _ in range(TRIES)]
        rows += [(i, {}) for i in special for _ in range(FREQUENT_TRIES)]
        self._run(rows, jitter=True)

    def _unlike_known(self, index: int) -> Demand | None:
        """Demand the kept value at one coordinate that each known copy dropped."""
        demand: Demand = {}
        heavy = self._targets[index].abs() > 0.25 * self._targets[index].abs().median()
        for vector, _ in self._copies[index]:
            dropped = ((vector.abs() < self._tolerance[index]) & heavy).nonzero().flatten()
            if len(dropped) == 0:
                return None
            pick = int(dropped[int(torch.randint(len(dropped), (1,), generator=self._rng))])
            demand[pick] = float(self._targets[index, pick])
        return demand

    def _run(self, rows: list[tuple[int, Demand]], *, jitter: bool = False) -> None:
        """Fit candidates under demands and add what is explained."""
        for start in range(0, len(rows), CHUNK):
            if self.complete():
                return
            part = rows[start : start + CHUNK]
            index = torch.tensor([row[0] for row in part], device=self._targets.device)
            targets = self._targets[index]
            demands = torch.zeros_like(targets, dtype=torch.bool)
            for row, (_, demand) in enumerate(part):
                demands[row, list(demand)] = True
            weights = None
            if jitter:
                noise = torch.randn(targets.shape, generator=self._rng, dtype=torch.float64).to(targets.device)
                weights = torch.exp(JITTER * noise)
            vectors = self._fit.fit(targets, start=weights, demands=demands)
            shares = explained_share(vectors, targets, self._rate)
            for row, (candidate, _) in enumerate(part):
                self._share[candidate] = max(float(self._share[candidate]), float(shares[row]))
                self._add(candidate, vectors[row], float(shares[row]))

    def _add(self, index: int, vector: Tensor, share: float) -> None:
        """Add a vector that is explained, unless the same candidate was found with the same mask."""
        if share < ACCEPTED:
            return
        known = self._copies.setdefault(index, [])
        if all(bool((other - vector).abs().max() > 10 * self._tolerance[index]) for other, _ in known):
            known.append((vector, share))

    def result(self) -> Masked:
        """Return what was found, best explained first."""
        rows = [(index, vector, share) for index, copies in self._copies.items() for vector, share in copies]
        rows.sort(key=lambda row: -row[2])
        index = torch.tensor([row[0] for row in rows], dtype=torch.long, device=self._targets.device)
        vectors = torch.stack([row[1] for row in rows]) if rows else self._targets[:0]
        share = torch.tensor([row[2] for row in rows], dtype=torch.float64)
        return Masked(self._candidates.tokens[index], self._candidates.positions[index], vectors, share)
