"""Attribution of gradients to pairs: it shows which pairs in the span are real.

A token vector and a position vector are added before the normalisation. So if (t, p), (s, p) and (s, q) are in a batch,
the input of (t, q) lies in the span as well, to rounding. Such a false pair is called a ghost. The span cannot separate
ghosts from real pairs, and there are many of them: a batch of eight short sentences has about ten for each real pair.

The gradients separate them. There is a direction in which all inputs but those of token t vanish. Along it the update
shows A_t, the sum of the gradients of t's own occurrences. Along another direction it shows D_p, the sum over all tokens
at position p. Every real pair is part of one A_t and of one D_p. So a token that occurs once has its whole A_t inside
one D_p, and the regression of D_p on all A_t gives it a coefficient of 1 at its own position and of nearly 0 elsewhere.
Gradients that are assigned are subtracted from A_t and D_p, which makes the remaining regressions more exact. (Own
derivation.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.algorithms.span.isolation import WHOLE, isolate, whitening

CLEAR, SECOND = 0.6, 0.35
"""Bounds on coefficients for an assignment: the largest is above CLEAR and all others are below SECOND.
Chosen on training sentences; see docs/decisions/span_constants.md."""

SPREADS, FINEST = 4.0, 0.05
"""Bound on the largest coefficient's distance from 1 and on the size of the others: SPREADS medians, at least FINEST.
The median is that of the other coefficients' sizes. Our choice: a token that occurs twice, once with a small gradient,
has a second coefficient that is larger than the others."""

WEAK = 0.02
"""Share of its gradient below which the residual of a token or position is not assigned.
Our choice: such a residual may be the error of an earlier assignment."""

ABOVE_NOISE = 5.0
"""Multiple of the known noise below which a residual is not assigned. Our choice: its direction is then known to a fifth."""

STRICT: tuple[float, ...] = (0.002, 0.01, 0.03)
"""Bounds on coefficients for certain assignments, in the order in which they are tried.
Our choice: unknown gradients change the coefficients of others by a tenth and more; if all gradients are known,
coefficients are exact to 1e-4."""

VANISHED = 1e-3
"""Share of its first size below which a gradient counts as removed.
Our choice: simulated gradients agree to about 1e-5 in float32."""

USED_UP = 1e-4
"""Residual share below which a token or position counts as explained.
Chosen on training sentences; see docs/decisions/span_constants.md."""


@dataclass(frozen=True)
class Assignments:
    """The gradients of N pairs, as far as they could be solved."""

    own: Tensor
    """(N,) int64: column of the pair's own gradient among the K, -1 if it is not known."""
    gradients: Tensor
    """(F, K) float64."""
    assigned: Tensor
    """(N,) booleans: the gradient is known, and subtracted from its token's and its position's gradient.
    A pair that has a column in `own` and is not assigned has the whole gradient of its token, provisionally."""
    certain: Tensor
    """(N,) booleans: assigned by the strict rules, or at a position that is explained."""
    coefficient: Tensor
    """(N,) float64: regression coefficient of each open pair; 0 for the others."""
    open: Tensor
    """(N,) booleans: not assigned, and neither its token nor its position is explained."""
    residual: Tensor
    """(F, P) float64: gradient of each position without those of the assigned pairs."""
    explained: Tensor
    """(P,) booleans: the residual is zero, so no other token stands at that position."""
    single: Tensor
    """(P,) booleans: the residual is the gradient of one token."""
    doubtful: Tensor
    """(P,) booleans: at least as many pairs are assigned as there are sequences, but the residual is not zero.
    So one of the pairs is wrong, or its token stands elsewhere as well."""
    shared: Tensor
    """(P,) booleans: the residual is zero with fewer pairs than sequences.
    So one assigned gradient is the sum of several."""
    last: Tensor
    """(P,) booleans: a sequence may end here; False where all sequences are longer."""


@dataclass(frozen=True)
class Attribution:
    """Directions along which an update shows one token's or one position's gradient."""

    tokens: Tensor
    """(N,) int64: row of each pair among T; a pair that can be read alone has a row of its own."""
    positions: Tensor
    """(N,) int64: column of each pair among the P distinct positions."""
    along_token: Tensor
    """(N,) float64: length of the pair's input along its token's direction."""
    along_position: Tensor
    """(N,) float64: length of the pair's input along its position's direction."""
    token_directions: Tensor
    """(R, T) float64, in coordinates of the basis."""
    position_directions: Tensor
    """(R, P) float64, in coordinates of the basis."""
    readable: Tensor
    """(T,) booleans: the token has a direction of its own."""

    @classmethod
    def of(cls, coordinates: Tensor, tokens: Tensor, positions: Tensor) -> Attribution:
        """Find the directions.

        Args:
            coordinates: (N, R) float64: inputs of all pairs in the span, in an orthonormal basis of it.
            tokens: (N,) int64 token ids.
            positions: (N,) int64.
        """
        white = whitening(coordinates)
        # A pair outside the span of the others has leverage 1 and is read alone.
        # The other pairs of its token form another row.
        alone = (coordinates @ white).square().sum(1) > 1.0 - WHOLE
        assignments = torch.where(
            alone, int(tokens.max()) + 1 + torch.arange(len(tokens), device=tokens.device), tokens
        )
        rows = torch.unique(assignments, return_inverse=True)[1]
        columns = torch.unique(positions, return_inverse=True)[1]
        by_token, token_leverage = isolate(coordinates, white, rows)
        by_position, _ = isolate(coordinates, white, columns)
        return cls(
            tokens=rows,
            positions=columns,
            along_token=(coordinates * by_token.T[rows]).sum(1),
            along_position=(coordinates * by_position.T[columns]).sum(1),
            token_directions=by_token,
            position_directions=by_position,
            readable=token_leverage > 1.0 - WHOLE,
        )

    def solve(self, update: Tensor, live: Tensor, floors: tuple[Tensor, Tensor] | None = None) -> Assignments:
        """Assign gradients to pairs, as far as tokens and positions determine them.

        Three rules apply in turn, until none of them assigns anything:

        1. the whole gradient of a token is at one position;
        2. the whole residual of a position belongs to one token;
        3. several tokens are nearly at one position and explain it together.

        Args:
            update: (F, R) float64, each layer's part at about the same norm, in coordinates of the basis.
            live: (N,) booleans: pairs that may be real.
            floors: norms (T,) and (P,) that the gradients of tokens and positions have from errors alone.
        """
        solver = _Solver(self, update, live, floors)
        # Certain assignments first: each of them makes the other regressions more exact, and a wrong one harms them.
        solver.assign_certain()
        count = len(solver.known)
        while solver.assign_tokens():
            pass
        solver.assign_certain()
        while solver.assign_positions():
            solver.assign_certain()
        return solver.assignments(count)


class _Solver:
    """The state while gradients are assigned."""

    def __init__(
        self, attribution: Attribution, update: Tensor, live: Tensor, floors: tuple[Tensor, Tensor] | None
    ) -> None:
        """Read the gradient of each token and each position."""
        self._attribution = attribution
        count, width = int(attribution.tokens.max()) + 1, int(attribution.positions.max()) + 1
        self._by_token, self._by_position = (
            update @ attribution.token_directions,
            update @ attribution.position_directions,
        )
        self._floors = [USED_UP * side.norm(dim=0) for side in (self._by_token, self._by_position)]
        self._weak = [WEAK / USED_UP * small for small in self._floors]
        if floors is not None:
            self._weak = [weak + ABOVE_NOISE * floor for weak, floor in zip(self._weak, floors, strict=True)]
            self._floors = [small + floor for small, floor in zip(self._floors, floors, strict=True)]
        where = live.nonzero().flatten()
        rows, columns = attribution.tokens[where], attribution.positions[where]
        self._pair = torch.full((count, width), -1, dtype=torch.long, device=update.device)
        self._pair[rows, columns] = where
        self._ratio = torch.ones(count, width, dtype=torch.float64, device=update.device)
        self._ratio[rows, columns] = attribution.along_position[where] / attribution.along_token[where]
        self.known: list[int] = []
        """Pairs that are assigned, in order."""
        self._gradients: list[Tensor] = []
        self._counts = torch.zeros(width, dtype=torch.long, device=update.device)
        self._by_elimination = torch.zeros(width, dtype=torch.bool, device=update.device)

    def _explained(self) -> Tensor:
        """Return (P,) booleans: the residual of the position is zero.

        A position whose whole residual was assigned to one token does not count.
        """
        explained: Tensor = (
            (self._by_position.norm(dim=0) <= self._floors[1]) & (self._counts > 0) & ~self._by_elimination
        )
        return explained

    def _reach(self) -> tuple[Tensor, Tensor]:
        """Return how many sequences reach each position, and whether all of them do.

        Each position is reached by at least as many sequences as the next one. Equal tokens at one position count once.

        Returns:
            (P,) int64 lower bounds, 0 where nothing is known, and (P,) booleans.
        """
        reach = torch.where(self._explained(), self._counts, 0).flip(0).cummax(dim=0).values.flip(0)
        return reach, (reach == reach.max()) & (reach > 0)

    def _strong(self, side: int) -> Tensor:
        """Return booleans: residuals of tokens (0) or positions (1) that are above errors."""
        now = (self._by_token, self._by_position)[side].norm(dim=0)
        strong: Tensor = now > self._weak[side]
        return strong

    def _possible(self) -> Tensor:
        """Return (T, P) booleans: pairs that are still open."""
        tokens, positions = self._by_token.norm(dim=0), self._by_position.norm(dim=0)
        possible: Tensor = (self._pair >= 0) & (tokens > self._floors[0])[:, None] & (positions > self._floors[1])[None]
        return possible

    def _assign(self, row: int, column: int, gradient: Tensor) -> None:
        """Assign a gradient (F,) to the pair of a token and a position."""
        pair = int(self._pair[row, column])
        self.known.append(pair)
        self._gradients.append(gradient)
        self._counts[column] += 1
        self._pair[row, column] = -1
        self._by_token[:, row] -= gradient * self._attribution.along_token[pair]
        self._by_position[:, column] -= gradient * self._attribution.along_position[pair]

    def assign_certain(self) -> None:
        """Assign what the strict bounds allow, the strictest first."""
        step = 0
        while step < len(STRICT):
            bound = STRICT[step]
            new = self.assign_tokens(bound) or self.assign_positions(bound) or self.assign_jointly()
            step = 0 if new else step + 1

    def assign_tokens(self, bound: float | None = None) -> bool:
        """Assign every token whose whole gradient is at one position.

        Args:
            bound: on the coefficients; None derives one from the other coefficients.

        Returns:
            Whether there was one.
        """
        possible = self._possible()
        coefficient = _coefficients(self._by_token, self._by_position, self._ratio, possible)
        rows, columns = _stands_alone(coefficient, possible & self._strong(0)[:, None], bound)
        for row, column in zip(rows, columns, strict=True):
            pair = int(self._pair[row, column])
            self._assign(row, column, self._by_token[:, row] / self._attribution.along_token[pair])
        return bool(rows)

    def assign_positions(self, bound: float | None = None) -> bool:
        """Assign the residual of every position at which one token is left.

        One token is left if all other sequences that reach this position have an assigned token there. If their number
        is not known, a strict `bound` is required.

        Returns:
            Whether there was one.
        """
        possible = self._possible().T
        coefficient = _coefficients(self._by_position, self._by_token, self._ratio.T.reciprocal(), possible)
        reach, everyone = self._reach()
        one = (everyone & (self._counts == reach - 1)) | ((reach == 0) & (bound is not None))
        columns, rows = _stands_alone(coefficient, possible & (self._strong(1) & one)[:, None], bound)
        for row, column in zip(rows, columns, strict=True):
            pair = int(self._pair[row, column])
            self._assign(row, column, self._by_position[:, column] / self._attribution.along_position[pair])
            self._by_elimination[column] = True
        return bool(rows)

    def assign_jointly(self) -> bool:
        """Assign tokens that are nearly at one position and explain it together.

        Returns:
            Whether there were some.
        """
        _, provisional, gradients = self._provisional(self._possible())
        attribution = self._attribution
        at = attribution.positions[provisional]
        residual = self._by_position.index_add(1, at, -gradients * attribution.along_position[provisional])
        explains = (residual.norm(dim=0) < self._floors[1])[at]
        for pair, gradient in zip(provisional[explains].tolist(), gradients[:, explains].T, strict=True):
            self._assign(int(attribution.tokens[pair]), int(attribution.positions[pair]), gradient)
        return bool(explains.any())

    def _provisional(self, possible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the regression gives for the open pairs.

        Returns:
            The coefficients (N,), the k pairs at which a token has nearly its whole gradient, and these gradients (F,
            k).
        """
        tokens = self._attribution.tokens
        coefficient = _coefficients(self._by_token, self._by_position, self._ratio, possible)
        by_pair = torch.zeros(len(tokens), dtype=coefficient.dtype, device=coefficient.device)
        by_pair[self._pair[possible]] = coefficient[possible]
        provisional = _nearly_whole(by_pair, tokens)
        return by_pair, provisional, self._by_token[:, tokens[provisional]] / self._attribution.along_token[provisional]

    def assignments(self, count: int) -> Assignments:
        """Return the result; the first `count` assignments are certain."""
        attribution = self._attribution
        possible = self._possible()
        coefficient, provisional, gradients = self._provisional(possible)
        own = torch.full_like(attribution.tokens, -1)
        known = torch.tensor(self.known, dtype=torch.long, device=own.device)
        own[known] = torch.arange(len(known), device=own.device)
        by_strict_rules = torch.zeros_like(own, dtype=torch.bool)
        by_strict_rules[known[:count]] = True
        assigned = own >= 0
        open_ = torch.zeros_like(assigned)
        open_[self._pair[possible]] = True
        own[provisional] = len(known) + torch.arange(len(provisional), device=own.device)
        explained = self._explained()
        reach, everyone = self._reach()
        return Assignments(
            own=own,
            gradients=torch.cat([*(g[:, None] for g in self._gradients), gradients], dim=1),
            assigned=assigned,
            certain=by_strict_rules | (assigned & explained[attribution.positions]),
            coefficient=coefficient,
            open=open_,
            residual=self._by_position,
            explained=explained,
            single=everyone & (self._counts == reach - 1),
            doubtful=everyone & (self._counts >= reach) & (self._by_position.norm(dim=0) > self._floors[1]),
            shared=everyone & (self._counts < reach) & (self._by_position.norm(dim=0) <= self._floors[1]),
            last=~everyone.roll(-1) | (torch.arange(len(reach), device=reach.device) == len(reach) - 1),
        )


def _stands_alone(coefficient: Tensor, possible: Tensor, within: float | None) -> tuple[list[int], list[int]]:
    """Return rows with one coefficient near 1 and all others near 0, and its column.

    Near means within the bound `within`. If it is None, the bound follows from the row's other coefficients.
    """
    size = torch.where(possible, coefficient.abs(), torch.nan)
    top, column = torch.where(possible, coefficient, -torch.inf).max(dim=1)
    size.scatter_(1, column[:, None], torch.nan)
    spread = size.nanmedian(dim=1).values.nan_to_num(0.0)
    second = size.nan_to_num(0.0).max(dim=1).values
    bound = (SPREADS * spread).clamp_min(FINEST) if within is None else torch.full_like(spread, within)
    alone = (top > CLEAR) & ((top - 1.0).abs() < bound) & (second < bound.clamp_max(SECOND))
    return alone.nonzero().flatten().tolist(), column[alone].tolist()


def _nearly_whole(coefficient: Tensor, tokens: Tensor) -> Tensor:
    """Return the pairs (k,) at which a token has nearly its whole gradient.

    Args:
        coefficient: (N,) coefficients, 0 for pairs that are not open.
        tokens: (N,) int64 row of each pair.
    """
    count = int(tokens.max()) + 1
    top = torch.full((count,), -torch.inf, dtype=coefficient.dtype, device=coefficient.device)
    top.scatter_reduce_(0, tokens, coefficient, "amax")
    first = coefficient == top[tokens]
    others = torch.zeros_like(top)
    others.scatter_reduce_(0, tokens, torch.where(first, 0.0, coefficient.abs()), "amax")
    return (first & (coefficient > CLEAR) & (others[tokens] < SECOND)).nonzero().flatten()


def _coefficients(terms: Tensor, sums: Tensor, ratio: Tensor, possible: Tensor) -> Tensor:
    """Return (M, K): regression coefficients of each sum on its possible terms.

    Args:
        terms: (F, M).
        sums: (F, K).
        ratio: (M, K) factor of a term in a sum.
        possible: (M, K) booleans: other coefficients are 0.
    """
    inner, cross = terms.T @ terms, terms.T @ sums
    coefficient = torch.zeros_like(ratio)
    for column in possible.any(dim=0).nonzero().flatten().tolist():
        rows = possible[:, column].nonzero().flatten()
        scale = ratio[rows, column]
        normal = inner[rows][:, rows] * scale[:, None] * scale[None]
        # The ridge is relative to the largest entry, because weak gradients are parallel to others up to rounding.
        ridge = 1e-12 * normal.diagonal().max() * torch.eye(len(rows), dtype=normal.dtype, device=normal.device)
        coefficient[rows, column] = torch.linalg.solve(normal + ridge, cross[rows, column] * scale)
    return coefficient
