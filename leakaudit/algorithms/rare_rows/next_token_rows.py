"""Which token follows a prefix, read from the head's rows.

A row is a sum of the states of the prefixes that its token follows, and of noise (see `sentence_rows`). Two hypotheses about a state and a row are
compared: the state is one of the row's, or it is not. The row holds then one state fewer, or as many as before. States and noise are taken as Gaussian, in
coordinates in which states have unit covariance and gradients at inputs are uncorrelated. Own derivation; docs/decisions/rare_rows_decoders.md has the
figures.

Letters: M rows, n prefixes, D hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE = 1e-5
"""Part of the mean eigenvalue that is added to every direction. Chosen on training texts: 1e-4 loses prefixes whose states differ little."""

SIZES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Variances of the gradients at a token's inputs, in units of their median, that are tried where the tables are tied. Our choice: these gradients
differ by a factor of ten, and what a simulation explains of them leaves a hundredth."""

ALIKE = (0.1, 0.3)
"""Variances by which a state that is like one of the row's differs from it. Our choice: prefixes with the same last words."""

ALIKE_SHARE = 0.001
"""Probability that a row holds such a state. Our choice: few rows of a batch do."""

MOST_AGAINST = 60.0
"""Most evidence in nats against a token. Our choice: one row that is badly estimated must not end a sentence that all others confirm."""


def coordinates(states: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Return coordinates in which two second moments are diagonal.

    Args:
        states: (D, D) second moment of states; it becomes the unit matrix.
        slopes: (D, D) second moment of gradients at inputs.

    Returns:
        (D, D) map, to be multiplied from the right, and (D,) variances of the gradients in these coordinates.
    """
    values, vectors = torch.linalg.eigh(states.double())
    values = values.clamp_min(0.0) + RIDGE * values.mean().clamp_min(1e-30)
    white = vectors / values.sqrt()
    variances, turned = torch.linalg.eigh(white.T @ slopes.double() @ white)
    return (white @ turned).to(states.dtype), variances.clamp_min(0.0).to(states.dtype)


@dataclass(frozen=True)
class NextTokenRows:
    """The rows of the tokens that may be targets, in `coordinates`."""

    tokens: Tensor
    """(M,) int64 token ids, ascending."""
    rows: Tensor
    """(M, D) sums of the states that the tokens follow, and of gradients at inputs if the tables are tied."""
    counts: Tensor
    """(M,) how many states each row holds: whole numbers, at least 1."""
    mean: Tensor
    """(D,) mean state."""
    spread: Tensor
    """(D,) variances of states, as the rows show them."""
    noise: Tensor
    """(M,) variance of a row's error in each direction, in units of a state's."""
    slopes: Tensor
    """(D,) variances of one gradient at an input; zeros if the tables are not tied."""
    directions: Tensor
    """(M, D) the head's weights of the tokens, in the model's own coordinates."""

    def evidence(self, states: Tensor) -> Tensor:
        """Return (n, M) the log-odds that a token follows a prefix, without its prior.

        Args:
            states: (n, D) inputs of the head at the prefixes' ends, in `coordinates`.
        """
        own = self._without(states, (0.0,))
        alike = self._without(states, ALIKE) + math.log(ALIKE_SHARE)
        without = self.likelihood(self._every(), self.rows, self.counts)
        return (own - torch.logaddexp(without.expand_as(alike), alike)).clamp_min(-MOST_AGAINST)

    def prior(self, states: Tensor) -> Tensor:
        """Return (n, M) log-probabilities of the next token.

        They are half the model's own, over these tokens, and half the share of each row in all rows.

        Args:
            states: (n, D) inputs of the head, in the model's own coordinates.
        """
        own = (states @ self.directions.T).softmax(dim=1)
        return (0.5 * own + 0.5 * self.counts / self.counts.sum()).log()

    def likelihood(self, which: Tensor, left: Tensor, counts: Tensor) -> Tensor:
        """Return (m,) the log-likelihood of rows that hold a number of unknown states.

        Args:
            which: (m,) numbers of the rows, for their noise.
            left: (m, D) the rows, or what is left of them.
            counts: (m,) states that they hold.
        """
        off = left - counts[:, None] * self.mean
        terms = [-0.5 * (off.square() / v + v.log()).sum(dim=1) for v in self._variances(which, counts)]
        return torch.stack(terms).logsumexp(dim=0)

    def _variances(self, which: Tensor, counts: Tensor) -> list[Tensor]:
        """Return (m, D) variances of rows, one for each size of the gradients.

        Args:
            which: (m,) numbers of the rows.
            counts: (m,) unknown states that they hold.
        """
        known = counts[:, None] * self.spread + self.noise[which][:, None]
        if not self.slopes.any():
            return [known]
        slopes = self.slopes * self.counts[which][:, None]
        return [known + size * slopes for size in SIZES]

    def _every(self) -> Tensor:
        return torch.arange(len(self.tokens), device=self.rows.device)

    def _without(self, states: Tensor, more: tuple[float, ...]) -> Tensor:
        """Return (n, M) log-likelihoods of the rows without each state.

        Args:
            states: (n, D) as for `evidence`.
            more: variances by which the row's state may differ from it.
        """
        off, x = self.rows - self.counts[:, None] * self.mean, states - self.mean
        terms = []
        for extra in more:
            for v in self._variances(self._every(), self.counts - 1 + extra):
                square = (off.square() / v).sum(dim=1) - 2 * x @ (off / v).T + x.square() @ (1 / v).T
                terms.append(-0.5 * (square + v.log().sum(dim=1)))
        return torch.stack(terms).logsumexp(dim=0)
