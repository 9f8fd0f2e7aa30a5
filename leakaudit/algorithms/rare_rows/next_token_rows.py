"""Which token follows a prefix, read from the head's rows.

A row is a sum of the states of the prefixes that its token follows, and of noise (see `sentence_rows`). In coordinates in which states
and noise together have unit covariance, three hypotheses about a state x and a row r of c states are compared: x is one of the row's
states; the row has nothing to do with x; the row holds a state that is similar to x, of another prefix with the same last words. The
first must be likelier than both others. Own derivation.

Letters: M rows, n prefixes, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOOR = 1e-3
"""Smallest square of a whitened row, in units of its width. Our choice: it bounds what one row can say."""

RIDGE = 1e-3
"""Part of the mean eigenvalue that is added to every direction. Chosen on training texts: 1e-4 and 1e-3 agree, 1e-2 is worse."""

MOST = 15.0
"""Most evidence of one token in nats. Our choice: far more than a token's prior costs, and too little to pay for several wrong ones."""

SIMILAR = 4.0
"""Log-odds before reading that a row which fits holds the state itself, not a similar one. Our choice: 50 to 1, because few of the
rows of a batch hold a state with the same last words."""

EXACT = 0.3
"""Noise of a row, as a variance, below which a row of one state has to fit in every direction. Our choice."""

UNSURE = 0.2
"""Relative error of the part that the states of one row have in common. Our choice."""

RARE = 1.5
"""Number of states below which a row counts as a single one. Our choice: half-way between one and two."""


def whitener(moment: Tensor) -> Tensor:
    """Return the map (D, D) to coordinates in which a second moment is the unit.

    Args:
        moment: (D, D) symmetric.
    """
    values, vectors = torch.linalg.eigh(moment.double())
    values = values.clamp_min(0.0) + RIDGE * values.mean().clamp_min(1e-30)
    white: Tensor = (vectors / values.sqrt()).to(moment.dtype)
    return white


@dataclass
class NextTokenRows:
    """The rows of the tokens that may be targets; `take` removes a state."""

    tokens: Tensor
    """(M,) int64 token ids, ascending."""
    white: Tensor
    """(D, D) map to whitened coordinates."""
    rows: Tensor
    """(M, D) whitened sums of the states that the tokens follow."""
    counts: Tensor
    """(M,) how many states each row holds, estimated, not rounded."""
    noise: Tensor
    """(M,) variance of a row's noise in each whitened direction."""
    size: float
    """Mean square of a whitened state in each direction."""
    directions: Tensor
    """(M, D) the head's weights of the tokens, for the model's own probabilities."""

    def evidence(self, states: Tensor, typical: Tensor) -> Tensor:
        """Return (n, M) the log-odds that a token follows a prefix, without its prior.

        Args:
            states: (n, D) inputs of the head at the prefixes' ends.
            typical: (n, D) its mean inputs after other prefixes with the same last token.
        """
        every = torch.arange(len(self.tokens), device=self.rows.device)
        return self._evidence(states @ self.white, typical @ self.white, every)

    def gains(self, which: Tensor, states: Tensor, typical: Tensor) -> Tensor:
        """Return (n,) the log-odds, with priors, of one row for each state.

        Args:
            which: (n,) numbers of the rows.
            states: (n, D) as for `evidence`.
            typical: (n, D) as for `evidence`.
        """
        found = self._evidence(states @ self.white, typical @ self.white, which).diagonal()
        return found + self.prior(states).gather(1, which[:, None])[:, 0]

    def _evidence(self, x: Tensor, usual: Tensor, which: Tensor) -> Tensor:
        rows, count, noise = self.rows[which], self.counts[which], self.noise[which]
        width = rows.shape[1]
        spread = (count - 1).clamp_min(0.0) * self.size + noise  # variance of the rest, if the state is in the row
        square, own, dot = rows.square().sum(dim=1), x.square().sum(dim=1, keepdim=True), x @ rows.T
        left = (square - 2 * dot + own).clamp_min(0.0)
        unrelated = width / 2 * (square.clamp_min(FLOOR * width).log() - left.clamp_min(FLOOR * width).log())
        without = (square - 2 * usual @ rows.T + usual.square().sum(dim=1, keepdim=True)).clamp_min(0.0)
        other_prefix = (without - left) / (2 * spread)
        alike = torch.where(count > RARE, _against_alike(square, own, dot, count.clamp_min(RARE), noise, width), MOST)
        excess = (left / spread - 3 * width).clamp_min(0.0) / 2 * (spread < EXACT)
        found = torch.minimum(unrelated, SIMILAR + torch.minimum(other_prefix, alike))
        return found.clamp_max(MOST) - excess

    def prior(self, states: Tensor) -> Tensor:
        """Return (n, M) log-probabilities of the next token.

        They are half the model's own, over these tokens, and half the share of each row in all rows.

        Args:
            states: (n, D) inputs of the head.
        """
        own = (states @ self.directions.T).softmax(dim=1)
        share = self.rows.square().sum(dim=1).clamp_min(FLOOR)
        return (0.5 * own + 0.5 * share / share.sum()).log()

    def index_of(self, token: int) -> int:
        """Return the number of a token's row, or -1."""
        place = int(torch.searchsorted(self.tokens, token))
        return place if place < len(self.tokens) and int(self.tokens[place]) == token else -1

    def take(self, row: int, state: Tensor) -> None:
        """Remove a state (D,) from a row."""
        self.rows[row] -= state @ self.white
        self.counts[row] -= 1

    def give_back(self, row: int, state: Tensor) -> None:
        """Undo `take`."""
        self.rows[row] += state @ self.white
        self.counts[row] += 1


def _against_alike(square: Tensor, own: Tensor, dot: Tensor, count: Tensor, noise: Tensor, width: int) -> Tensor:
    """Return (n, M) log-odds of a state against one that is like the row's.

    The states of one row have a part in common: |r|^2 = c^2 common + c rest. A state that only has this part gives x.r = c common, a state
    of the row gives c common + rest.
    """
    common = ((square - count * own) / (count * count - count)).clamp_min(0.0).minimum(0.9 * own)
    rest = own - common
    variance = rest * ((count - 1) * rest / width + noise)
    variance = variance + (UNSURE * count * common).square() + (UNSURE * own).square()
    return rest * (dot - count * common - rest / 2) / variance
