"""Which token follows a prefix, read from the head's rows.

A row is a sum of prefix states (see `sentence_rows`) and of noise. In coordinates in which states and noise together have unit
covariance, taking one of its states away makes a row of c states shorter by 1/c of its square; taking a wrong state away makes it longer.
The log-likelihood ratio of a Gaussian row whose scale is fitted under each hypothesis is

    (D/2) log(|r|^2 / |r - x|^2)

with r the row and x the state. It needs no count of the token. Own derivation.

Letters: M rows, n prefixes, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOOR = 1e-3
"""Smallest square of a whitened row, in units of its width. Our choice: it bounds what one row can say, so that an error of the
background counts as noise."""

RIDGE = 1e-3
"""Part of the mean eigenvalue that is added to every direction. Chosen on training texts: 1e-4 and 1e-3 agree, 1e-2 is worse."""


def whitener(moment: Tensor) -> Tensor:
    """Return the map (D, D) to coordinates in which a second moment is the unit.

    Args:
        moment: (D, D) symmetric.
    """
    values, vectors = torch.linalg.eigh(moment.double())
    values = values.clamp_min(0.0) + RIDGE * values.mean().clamp_min(1e-30)
    return (vectors / values.sqrt()).to(moment.dtype)


MOST = 15.0
SIMILAR = 4.0


def gains(x, rows, width, typical, spread, count):
    size = rows.square().sum(dim=1)
    own = x.square().sum(dim=1, keepdim=True)
    dot = x @ rows.T
    left = (size - 2 * dot + own).clamp_min(0.0)
    ratio = width / 2 * (size.clamp_min(FLOOR * width).log() - left.clamp_min(FLOOR * width).log())
    plain = (size - 2 * typical @ rows.T + typical.square().sum(dim=1, keepdim=True)).clamp_min(0.0)
    ahead = (plain - left) / (2 * spread)
    many = count > 1.5
    c = count.clamp_min(1.5)
    common = ((size - c * own) / (c * c - c)).clamp_min(0.0).minimum(0.9 * own)
    rest = own - common
    unsure = rest * ((c - 1) * rest / width + (spread - (c - 1) * own / width).clamp_min(0.01))
    unsure = unsure + (0.2 * c * common).square() + (0.2 * own).square()
    alike = rest * (dot - c * common - rest / 2) / unsure
    alike = torch.where(many, alike, torch.full_like(alike, MOST))
    excess = (left / spread - 3 * width).clamp_min(0.0) / 2 * (spread < 0.3)
    return torch.minimum(torch.minimum(ratio, SIMILAR + ahead), SIMILAR + alike).clamp_max(MOST) - excess


@dataclass
class NextTokenRows:
    """The rows of the tokens that may be targets; taking sentences out changes them."""

    tokens: Tensor
    """(M,) int64 token ids, ascending."""
    white: Tensor
    """(D, D) map to whitened coordinates."""
    rows: Tensor
    """(M, D) whitened sums of the states that the tokens follow."""
    directions: Tensor
    """(M, D) the head's weights of the tokens, for the model's own probabilities."""
    spread: Tensor
    count: Tensor

    @property
    def squares(self) -> Tensor:
        """Return (M,) the squared lengths of the rows, at least `FLOOR` a coordinate."""
        return self.rows.square().sum(dim=1).clamp_min(FLOOR * self.rows.shape[1])

    def evidence(self, states, typical):
        return gains(states @ self.white, self.rows, self.rows.shape[1], typical @ self.white, self.spread, self.count)

    def prior(self, states: Tensor) -> Tensor:
        """Return (n, M) log-probabilities of the next token.

        They are half the model's own, over these tokens, and half the share of each row in all rows.

        Args:
            states: (n, D) inputs of the head.
        """
        own = (states @ self.directions.T).softmax(dim=1)
        share = self.squares / self.squares.sum()
        return (0.5 * own + 0.5 * share).log()

    def index_of(self, tokens: Tensor) -> Tensor:
        """Return the rows' numbers of token ids that are all in `tokens`."""
        return torch.searchsorted(self.tokens, tokens)
