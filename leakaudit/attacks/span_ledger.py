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

VANISHED = 1e-3
"""Share of its first size below which an entry counts as used up. Simulated contributions agree to 1e-5 or so in float32."""


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
class Ledger:
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
    sound: bool
    """Every token and position has one, so both sides balance."""

    @classmethod
    def of(cls, coordinates: Tensor, tokens: Tensor, positions: Tensor) -> Ledger:
        """Open the books.

        Args:
            coordinates: (N, R) float64: inputs of all pairs in the span, in an orthonormal basis of it.
            tokens: (N,) token ids.
            positions: (N,).
        """
        white = whitening(coordinates)
        # A pair in no span of the others has leverage 1 and is read alone; what is left of its token is an entry of its own.
        alone = (coordinates @ white).square().sum(1) > 1.0 - WHOLE
        entries = torch.where(alone, int(tokens.max()) + 1 + torch.arange(len(tokens), device=tokens.device), tokens)
        rows = torch.unique(entries, return_inverse=True)[1]
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
            sound=bool(readable.all()) and bool((position_leverage > 1.0 - WHOLE).all()),
        )

    def settle(self, update: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
        """Say where each token's gradient is entered, as far as the two sides tell.

        Args:
            update: (F, R) float64, each layer's part at about the same norm, in coordinates of the basis.
            live: (N,) booleans: pairs in question.

        Returns:
            (T,) the pair at which each token's gradient is entered as a whole, -1 where that is open; and (N,) the coefficient of
            each pair whose token is open, 0 elsewhere.
        """
        count, width = int(self.tokens.max()) + 1, int(self.positions.max()) + 1
        by_token, by_position = update @ self.token_directions, update @ self.position_directions
        ratio = torch.zeros(count, width, dtype=torch.float64, device=update.device)
        pair = torch.full((count, width), -1, dtype=torch.long, device=update.device)
        where = live.nonzero().flatten()
        ratio[self.tokens[where], self.positions[where]] = self.along_position[where] / self.along_token[where]
        pair[self.tokens[where], self.positions[where]] = where
        settled = torch.full((count,), -1, dtype=torch.long, device=update.device)
        open_ = (ratio != 0).any(dim=1)
        inner = by_token.T @ by_token
        share = torch.zeros_like(ratio)
        while bool(open_.any()):
            share = self._shares(inner, by_token.T @ by_position, ratio, open_)
            new = open_ & self._stands_alone(share, ratio != 0)
            if not bool(new.any()):
                break
            rows, columns = new.nonzero().flatten(), share[new].argmax(dim=1)
            settled[rows] = pair[rows, columns]
            by_position = by_position.index_add(1, columns, -by_token[:, rows] * ratio[rows, columns])
            open_ &= ~new
        return settled, torch.where(open_[:, None], share, 0.0)[self.tokens, self.positions]

    def nearly(self, share: Tensor) -> Tensor:
        """Return the pairs (k,) at which open tokens are entered as a whole for all that can be said yet.

        Args:
            share: (N,) as `settle` returns it.
        """
        count = int(self.tokens.max()) + 1
        top = torch.full((count,), -torch.inf, dtype=share.dtype, device=share.device)
        top.scatter_reduce_(0, self.tokens, share, "amax")
        first = share == top[self.tokens]
        others = torch.zeros_like(top)
        others.scatter_reduce_(0, self.tokens, torch.where(first, 0.0, share.abs()), "amax")
        whole = first & (share > CLEAR) & (others[self.tokens] < SECOND)
        return whole.nonzero().flatten()

    @staticmethod
    def _stands_alone(share: Tensor, possible: Tensor) -> Tensor:
        """Return (T,) booleans: one coefficient near one, all others near zero."""
        size = torch.where(possible, share.abs(), torch.nan)
        top, column = torch.where(possible, share, -torch.inf).max(dim=1)
        size.scatter_(1, column[:, None], torch.nan)
        spread = size.nanmedian(dim=1).values.nan_to_num(0.0)
        second = size.nan_to_num(0.0).max(dim=1).values
        bound = (SPREADS * spread).clamp_min(FINEST)
        return (top > CLEAR) & ((top - 1.0).abs() < bound) & (second < bound.clamp_max(SECOND))

    @staticmethod
    def _shares(inner: Tensor, cross: Tensor, ratio: Tensor, open_: Tensor) -> Tensor:
        """Return (T, P): the coefficients of each position's gradient on the gradients of the open tokens it may hold."""
        share = torch.full_like(ratio, -1.0)
        for column in range(ratio.shape[1]):
            rows = (open_ & (ratio[:, column] != 0)).nonzero().flatten()
            if len(rows) == 0:
                continue
            scale = ratio[rows, column]
            normal = inner[rows][:, rows] * scale[:, None] * scale[None]
            # Relative to the largest entry: tokens of weak gradient share directions down to rounding.
            ridge = 1e-12 * normal.diagonal().max() * torch.eye(len(rows), dtype=normal.dtype, device=normal.device)
            share[rows, column] = torch.linalg.solve(normal + ridge, cross[rows, column] * scale)
        return share
