"""Which of the pairs in the span are real: what each token and each position adds to the update, kept in two columns.

A token vector and a position vector are added before the normalisation. So where (t, p), (s, p) and (s, q) are in a batch, the
input of (t, q) lies in the span as well, to rounding: a batch of eight short sentences has ten such ghosts for each real pair,
and no look at the span tells them apart.

The update does. A direction in which every input but those of token t vanishes reads from it A_t, the sum over t's own
occurrences of their gradients; another one reads D_p, the sum over all tokens at position p. Every real pair is entered once on
either side, so a token that occurs once has all of A_t in one D_p. Regressing each D_p on all A_t gives that token a coefficient
of one at its own position and of nearly zero elsewhere (measured on a train split at B = 8 to 24: the largest coefficient was
right for 200 of 200 such tokens). Entries that are settled are taken out, which sharpens what is left. (Own derivation.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WHOLE = 1e-6
"""How far the leverage of a group may stay below 1 that is read alone. Measured: 1e-10 to 1e-16 in a pretrained encoder."""

CLEAR, SECOND = 0.6, 0.35
"""A token may be settled at a position whose coefficient is above CLEAR while no other reaches SECOND. Measured on a train split at
B = 8 to 24: tokens that occur once have 0.66 to 1.19 at their own position and at most 0.51 elsewhere."""

SPREADS, FINEST = 4.0, 0.05
"""It is settled if, besides, its coefficient is as near to one and the second as near to zero as the others are: within SPREADS times
their median size, or FINEST. Our choice: a token that occurs twice, once hardly visible, has a second coefficient that stands
out of the others."""

WEAK = 0.02
"""Share of its gradient up to which what is left of a token or a position is not booked. Our choice: it may be no more than the error
of an entry that was not quite sure."""

STRICT: tuple[float, ...] = (0.002, 0.01, 0.03)
"""How near to one and zero coefficients have to be for an entry that counts as sure, in the order of trying. Our choice: what is not
known yet moves the coefficients of others by a tenth and more, and once everything at a place is known they are exact to 1e-4."""

VANISHED = 1e-3
"""Share of its first size below which an entry counts as used up. Simulated contributions agree to 1e-5 or so in float32."""


USED_UP = 1e-4
"""Share of the gradient of a token, or of a position, below which nothing is left of it. Measured on a train split, with all tokens known: 1e-5 or less,
from the errors of what was taken out before; with one missing 4e-2 and more."""


@dataclass(frozen=True)
class Assignments:
    """What the ledger says of each pair, after all that can be settled is."""

    own: Tensor
    """(N,) column among the K gradients of the pair's own, -1 where that is not known."""
    gradients: Tensor
    """(F, K) float64."""
    assigned: Tensor
    """(N,) booleans: known, and what is known is taken out of both sides. A pair that is known and not settled has its token's whole
    gradient for all that can be said yet."""
    certain: Tensor
    """(N,) booleans: settled before anything less sure was, or at a position which is used up."""
    coefficient: Tensor
    """(N,) coefficient of each pair that is in question; 0 elsewhere."""
    open: Tensor
    """(N,) booleans: pairs in question, whose token and whose position both have something left."""
    residual: Tensor
    """(F, P) what the settled pairs leave of each position's gradient."""
    explained: Tensor
    """(P,) booleans: that is nothing, so no other token stands there."""
    single: Tensor
    """(P,) booleans: what is left there is the gradient of one token."""
    doubtful: Tensor
    """(P,) booleans: something is left although as many pairs are settled as there are sequences: one is entered there by mistake, or
    its token stands elsewhere as well."""
    shared: Tensor
    """(P,) booleans: nothing is left although fewer pairs are settled than there are sequences: one is that of several."""
    last: Tensor
    """(P,) booleans: a sequence may end here; False where as many reach further."""


def whitening(coordinates: Tensor) -> Tensor:
    """Return W (R, R) with W W^T = M^-1, where M is the sum of z z^T over the rows z of coordinates (N, R) of full column rank."""
    values, vectors = torch.linalg.eigh(coordinates.T @ coordinates)
    white: Tensor = vectors * values.clamp_min(1e-14 * float(values[-1])).rsqrt()
    return white


def isolate(coordinates: Tensor, white: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
    """Find for each group of vectors a direction in which all other groups vanish.

    With M the sum of z z^T over all vectors z and Z the rows of one group, such a direction exists if and only if the largest
    eigenvalue of Z M^-1 Z^T, the group's leverage, is 1, and it is M^-1 Z^T v for the eigenvector v.

    Args:
        coordinates: (N, R) float64, of full column rank.
        white: (R, R), their `whitening`.
        owner: (N,) group of each row, 0 to K - 1.

    Returns:
        Directions (R, K), scaled so that the longest of a group's own vectors has 1 along its direction, and the leverages (K,).
    """
    whitened = coordinates @ white
    directions, leverages = [], []
    for group in range(int(owner.max()) + 1):
        rows = whitened[owner == group]
        spread, mixing = torch.linalg.eigh(rows @ rows.T)
        own = mixing[:, spread > min(1.0 - WHOLE, float(spread[-1]) - 1e-12)]
        # Where there is a choice, all members of the group count alike.
        weights = own @ own.sum(0)
        if float(weights.abs().max()) < 1e-9:
            weights = own[:, -1]
        direction = white @ (rows.T @ weights)
        along = coordinates[owner == group] @ direction
        directions.append(direction / along[along.abs().argmax()])
        leverages.append(spread[-1])
    return torch.stack(directions, dim=1), torch.stack(leverages)


@dataclass(frozen=True)
class Attribution:
    """The gradients of one update by token and by position."""

    tokens: Tensor
    """(N,) row of each pair among the T entries: tokens, and pairs of a token that can be read alone."""
    positions: Tensor
    """(N,) column of each pair among the P distinct positions."""
    along_token: Tensor
    """(N,) length of the pair's input along its token's direction."""
    along_position: Tensor
    """(N,)."""
    token_directions: Tensor
    """(R, T), in coordinates of the basis."""
    position_directions: Tensor
    """(R, P)."""
    readable: Tensor
    """(T,) booleans: the token has a direction of its own."""
    all_readable: bool
    """Every token and position has one, so both sides balance."""

    @classmethod
    def of(cls, coordinates: Tensor, tokens: Tensor, positions: Tensor) -> Attribution:
        """Open the books.

        Args:
            coordinates: (N, R) float64: inputs of all pairs in the span, in an orthonormal basis of it.
            tokens: (N,) token ids.
            positions: (N,).
        """
        white = whitening(coordinates)
        # A pair in no span of the others has leverage 1 and is read alone; what is left of its token is an entry of its own.
        alone = (coordinates @ white).square().sum(1) > 1.0 - WHOLE
        assignments = torch.where(
            alone, int(tokens.max()) + 1 + torch.arange(len(tokens), device=tokens.device), tokens
        )
        rows = torch.unique(assignments, return_inverse=True)[1]
        columns = torch.unique(positions, return_inverse=True)[1]
        by_token, token_leverage = isolate(coordinates, white, rows)
        by_position, position_leverage = isolate(coordinates, white, columns)
        readable = token_leverage > 1.0 - WHOLE
        return cls(
            tokens=rows,
            positions=columns,
            along_token=(coordinates * by_token.T[rows]).sum(1),
            along_position=(coordinates * by_position.T[columns]).sum(1),
            token_directions=by_token,
            position_directions=by_position,
            readable=readable,
            all_readable=bool(readable.all()) and bool((position_leverage > 1.0 - WHOLE).all()),
        )

    def solve(self, update: Tensor, live: Tensor, floors: tuple[Tensor, Tensor] | None = None) -> Assignments:
        """Say which gradients are which pair's, as far as the two sides tell.

        Three rules in turn, until none says more: a token whose gradient is wholly at one position; a position what is left of which is
        wholly one token's; tokens that are nearly at one position and, taken together, use it up.

        Args:
            update: (F, R) float64, each layer's part at about the same norm, in coordinates of the basis.
            live: (N,) booleans: pairs in question.
            floors: norms (T,) and (P,) that tokens and positions have from errors alone.
        """
        solver = _Solver(self, update, live, floors)
        # The surest first: each entry sharpens the others, and a wrong one would spoil them.
        solver.assign_certain()
        count = len(solver.known)
        while solver.assign_tokens():
            pass
        solver.assign_certain()
        while solver.assign_positions():
            solver.assign_certain()
        return solver.assignments(count)


class _Solver:
    """A ledger while it is being settled."""

    def __init__(
        self, attribution: Attribution, update: Tensor, live: Tensor, floors: tuple[Tensor, Tensor] | None
    ) -> None:
        """Write what each token and each position has."""
        self._attribution = attribution
        count, width = int(attribution.tokens.max()) + 1, int(attribution.positions.max()) + 1
        self._by_token, self._by_position = (
            update @ attribution.token_directions,
            update @ attribution.position_directions,
        )
        self._floors = [USED_UP * side.norm(dim=0) for side in (self._by_token, self._by_position)]
        if floors is not None:
            self._floors = [small + floor for small, floor in zip(self._floors, floors, strict=True)]
        where = live.nonzero().flatten()
        rows, columns = attribution.tokens[where], attribution.positions[where]
        self._pair = torch.full((count, width), -1, dtype=torch.long, device=update.device)
        self._pair[rows, columns] = where
        self._ratio = torch.ones(count, width, dtype=torch.float64, device=update.device)
        self._ratio[rows, columns] = attribution.along_position[where] / attribution.along_token[where]
        self.known: list[int] = []
        """Pairs that are booked, in order."""
        self._gradients: list[Tensor] = []
        self._counts = torch.zeros(width, dtype=torch.long, device=update.device)
        self._by_elimination = torch.zeros(width, dtype=torch.bool, device=update.device)

    def _explained(self) -> Tensor:
        """Return (P,) booleans: positions of whose gradient nothing is left, nor was the rest given to one token."""
        explained: Tensor = (
            (self._by_position.norm(dim=0) <= self._floors[1]) & (self._counts > 0) & ~self._by_elimination
        )
        return explained

    def _reach(self) -> tuple[Tensor, Tensor]:
        """Return (P,) at least how many sequences reach a position, 0 where that is not known, and (P,) whether all of them do.

        No fewer than reach one behind it, and equal tokens at one position count once.
        """
        reach = torch.where(self._explained(), self._counts, 0).flip(0).cummax(dim=0).values.flip(0)
        return reach, (reach == reach.max()) & (reach > 0)

    def _strong(self, side: int) -> Tensor:
        """Return booleans: tokens (0) or positions (1) of whose gradient more than the errors of earlier entries is left."""
        now = (self._by_token, self._by_position)[side].norm(dim=0)
        strong: Tensor = now > WEAK / USED_UP * self._floors[side]
        return strong

    def _possible(self) -> Tensor:
        """Return (T, P) booleans: pairs in question."""
        tokens, positions = self._by_token.norm(dim=0), self._by_position.norm(dim=0)
        possible: Tensor = (self._pair >= 0) & (tokens > self._floors[0])[:, None] & (positions > self._floors[1])[None]
        return possible

    def _assign(self, row: int, column: int, gradient: Tensor) -> None:
        """Book the gradient (F,) of the pair of a token and a position."""
        pair = int(self._pair[row, column])
        self.known.append(pair)
        self._gradients.append(gradient)
        self._counts[column] += 1
        self._pair[row, column] = -1
        self._by_token[:, row] -= gradient * self._attribution.along_token[pair]
        self._by_position[:, column] -= gradient * self._attribution.along_position[pair]

    def assign_certain(self) -> None:
        """Book what can be booked within strict bounds, the strictest first."""
        step = 0
        while step < len(STRICT):
            bound = STRICT[step]
            new = self.assign_tokens(bound) or self.assign_positions(bound) or self.assign_jointly()
            step = 0 if new else step + 1

    def assign_tokens(self, bound: float | None = None) -> bool:
        """Book every token that is wholly at one position, within a bound on coefficients; return whether there was one."""
        possible = self._possible()
        coefficient = _shares(self._by_token, self._by_position, self._ratio, possible)
        rows, columns = _stands_alone(coefficient, possible & self._strong(0)[:, None], bound)
        for row, column in zip(rows, columns, strict=True):
            pair = int(self._pair[row, column])
            self._assign(row, column, self._by_token[:, row] / self._attribution.along_token[pair])
        return bool(rows)

    def assign_positions(self, bound: float | None = None) -> bool:
        """Book every position of which the rest is wholly one token's, within a bound; return whether there was one.

        One token's, so all other sequences that reach so far have theirs there already. Where that is not known only a bound will do.
        """
        possible = self._possible().T
        coefficient = _shares(self._by_position, self._by_token, self._ratio.T.reciprocal(), possible)
        reach, everyone = self._reach()
        one = (everyone & (self._counts == reach - 1)) | ((reach == 0) & (bound is not None))
        columns, rows = _stands_alone(coefficient, possible & (self._strong(1) & one)[:, None], bound)
        for row, column in zip(rows, columns, strict=True):
            pair = int(self._pair[row, column])
            self._assign(row, column, self._by_position[:, column] / self._attribution.along_position[pair])
            self._by_elimination[column] = True
        return bool(rows)

    def assign_jointly(self) -> bool:
        """Book tokens that are nearly at one position where, all together, they use it up; return whether there were some."""
        _, provisional, gradients = self._provisional(self._possible())
        attribution = self._attribution
        at = attribution.positions[provisional]
        residual = self._by_position.index_add(1, at, -gradients * attribution.along_position[provisional])
        closes = (residual.norm(dim=0) < self._floors[1])[at]
        for pair, gradient in zip(provisional[closes].tolist(), gradients[:, closes].T, strict=True):
            self._assign(int(attribution.tokens[pair]), int(attribution.positions[pair]), gradient)
        return bool(closes.any())

    def _provisional(self, possible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the coefficients (N,), the pairs (k,) at which tokens are for all that can be said yet, and their gradients (F, k)."""
        tokens = self._attribution.tokens
        coefficient = _shares(self._by_token, self._by_position, self._ratio, possible)
        by_pair = torch.zeros(len(tokens), dtype=coefficient.dtype, device=coefficient.device)
        by_pair[self._pair[possible]] = coefficient[possible]
        provisional = _nearly_whole(by_pair, tokens)
        return by_pair, provisional, self._by_token[:, tokens[provisional]] / self._attribution.along_token[provisional]

    def assignments(self, count: int) -> Assignments:
        """Return what is known, the first `sure` of it for certain."""
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
    """Return rows with one coefficient near one and all others near zero, and the column of that one.

    Near is `within` a bound or, where there is none, as near as a row's other coefficients lead one to expect.
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
    """Return the pairs (k,) at which tokens are entered as a whole for all that can be said yet.

    Args:
        coefficient: (N,) coefficients, 0 for pairs that are not in question.
        tokens: (N,) entry of each pair.
    """
    count = int(tokens.max()) + 1
    top = torch.full((count,), -torch.inf, dtype=coefficient.dtype, device=coefficient.device)
    top.scatter_reduce_(0, tokens, coefficient, "amax")
    first = coefficient == top[tokens]
    others = torch.zeros_like(top)
    others.scatter_reduce_(0, tokens, torch.where(first, 0.0, coefficient.abs()), "amax")
    return (first & (coefficient > CLEAR) & (others[tokens] < SECOND)).nonzero().flatten()


def _shares(terms: Tensor, sums: Tensor, ratio: Tensor, possible: Tensor) -> Tensor:
    """Return (M, K): the coefficients of each sum's gradient on the terms that it may hold; 0 for the others.

    Args:
        terms: (F, M).
        sums: (F, K).
        ratio: (M, K) by how much a term counts in a sum.
        possible: (M, K) booleans.
    """
    inner, cross = terms.T @ terms, terms.T @ sums
    coefficient = torch.zeros_like(ratio)
    for column in possible.any(dim=0).nonzero().flatten().tolist():
        rows = possible[:, column].nonzero().flatten()
        scale = ratio[rows, column]
        normal = inner[rows][:, rows] * scale[:, None] * scale[None]
        # Relative to the largest entry: terms of weak gradient share directions down to rounding.
        ridge = 1e-12 * normal.diagonal().max() * torch.eye(len(rows), dtype=normal.dtype, device=normal.device)
        coefficient[rows, column] = torch.linalg.solve(normal + ridge, cross[rows, column] * scale)
    return coefficient
