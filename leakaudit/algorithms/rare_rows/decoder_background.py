"""What the softmax adds to all rows of a head.

The head's row of token v holds the sum over all places i of p_i(v) h_i. Nearly all tokens of the vocabulary are not in the batch, so their rows hold nothing
else. Weights on known states, the same for all tokens, are fitted to these rows of absent tokens; the fit then tells the sums for the tokens of the batch. `bag.softmax_mixture`
does the same for counts. Own derivation; docs/decisions/rare_rows_decoders.md has the figures.

Letters: V vocabulary, D hidden size, K known states, n rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FITTED = 10_000
"""Most rows to which weights are fitted. Our choice: three for each weight."""

RIDGE = 1e-3
"""Part of the mean diagonal that holds the weights back. Chosen on training texts: 1e-4 changes the error by a tenth, 1e-2 doubles it."""

ROUNDS = 3
"""Fits, each without the rows that stood out in the last one. Our choice: few tokens of a vocabulary are in a batch."""

STANDS_OUT = 10.0
"""How many times the median a row's unexplained part may be. Chosen on training texts: those of absent tokens are below five times."""

CHUNK = 512
"""States of one pass. Our choice: their probabilities take 0.1 GB at 50,000 tokens."""


@torch.no_grad()
def fitted_background(observed: Tensor, states: Tensor, head: Any, white: Tensor) -> tuple[Tensor, float]:
    """Return the softmax's share of all rows, and the part that it leaves.

    Args:
        observed: (V, D) rows, with the sign of sums of p_i(v) h_i; those of the batch's tokens hold more.
        states: (K, D) states that are like the batch's.
        head: the output embedding; maps states to logits.
        white: (D, D) map to coordinates in which the errors of rows are compared.

    Returns:
        (V, D) sums of p_i(v) h_i, and the median over absent tokens of |error|² / |sum|² in the coordinates of `white`.
    """
    known = observed.any(dim=1).nonzero().flatten()
    known = known[:: max(1, len(known) // FITTED)]
    parts = torch.cat([head(some).float().softmax(dim=1)[:, known] for some in states.split(CHUNK)])  # (K, n)
    goals, given = observed[known] @ white, states @ white  # (n, D), (K, D)
    square = goals.square().sum(dim=1)
    off = square / (parts.T @ given).square().sum(dim=1).clamp_min(1e-30)
    usual, weights = off < STANDS_OUT * off.median(), states.new_zeros(len(states))
    for _ in range(ROUNDS):
        weights = _weights(parts[:, usual], given, goals[usual])
        off = ((parts * weights[:, None]).T @ given - goals).square().sum(dim=1) / square.clamp_min(1e-30)
        usual = off < STANDS_OUT * off.median()
    values = torch.zeros_like(observed)
    for some, weight in zip(states.split(CHUNK), weights.split(CHUNK), strict=True):
        values += (head(some).float().softmax(dim=1) * weight[:, None]).T @ some
    return values, float(off.median())


def _weights(parts: Tensor, given: Tensor, goals: Tensor) -> Tensor:
    """Return (K,) weights of states whose sums are nearest to the goals by ratio.

    Args:
        parts: (K, n) probabilities.
        given: (K, D) states.
        goals: (n, D) sums.
    """
    share = 1 / goals.square().sum(dim=1).clamp_min(1e-30)  # (n,)
    scaled = parts * share.sqrt()
    moment = ((scaled @ scaled.T) * (given @ given.T)).double()  # (K, K)
    aim = (((parts * share) @ goals) * given).sum(dim=1).double()
    even = aim.sum() / moment.sum()  # the best weight if all are equal
    ridge = RIDGE * moment.diagonal().mean() * torch.eye(len(moment), device=moment.device, dtype=moment.dtype)
    more: Tensor = torch.linalg.solve(moment + ridge, aim - even * moment.sum(dim=1))
    return (even + more).to(parts.dtype)
