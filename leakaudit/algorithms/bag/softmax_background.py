"""Rows of an output head that are not the softmax's own.

Letters: V tokens, D hidden size, N positions with a target, h_i the head's input at position i, p_i(v) the probability of token v there.

Row v of the head's gradient is (sum_i p_i(v) h_i - sum over i with target v of h_i) / N. If the head is tied to the word embedding, the sum
of the input gradients of token v is added. So the row of a token that is not in the batch is the softmax's share alone, a positive
combination of the same N inputs, and there are many more such rows than D. Their directions x_v = row / |row| have one mean and one
covariance C, which are measured. C has few large directions, because the softmax averages over many inputs: in trained and untrained GPT-2
shapes of D = 384, directions beyond the hundredth hold a millionth of the energy. A token of the batch brings a single input, or
an input gradient, which is in all directions. So its Mahalanobis distance (x - mean) C^-1 (x - mean) is far above that of all other rows,
however small its row is beside the rows of frequent tokens. (Own derivation.)

The distances of rows without a token of the batch have the tail of a power law. It is measured between two quantiles, and continued to the distance that
`false_rows` of them exceed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_PER_ENTRY = 4
"""Least number of rows for each of their entries.
Our choice: the covariance of D entries needs several times D rows. Real vocabularies have 7 rows or more for each entry."""

MEASURED = 20
"""Rows for each entry from which the covariance is measured; more are left out, evenly.
Our choice: a covariance from 20 D rows is off by a fifth in every direction, and costs a fraction of that of all V rows."""

ROUNDS = 3
"""Times that the covariance is measured, each time without the rows that stand out so far.
Our choice: rows that stand out are few, so the covariance settles soon."""

NEAR, FAR = 4.0, 8.0
"""Standard deviations of the logarithm of the distance beyond which a row is left out of the next round, and of the tail.
Chosen on training texts: with 8 in the rounds, words of the batch stay in the covariance and hide each other. Rows of other words that are left out of a
round do no harm; those left out of the tail make it look shorter."""

FLOOR = 1e-10
"""Smallest variance of a direction, as a share of the mean variance.
Our choice: the square of 1e-5. A gradient in float32 is right to 1e-6 or 1e-7 of a row."""

TAIL = (0.95, 0.99)
"""Quantiles between which the tail of the distances is measured.
Our choice: above the bulk, and with enough rows beyond it."""

SLACK = 0.5
"""What is added to the logarithm of the cut.
Our choice, because the tail is continued over three powers of ten: half of the distance, or less, to the nearest row of a word on
training texts."""


@dataclass(frozen=True)
class Outliers:
    """Which of V rows do not look like the softmax's share."""

    evidence: Tensor
    """(V,) float64: natural logarithm of a row's distance over the cut; a row is named above 0. Minus infinity for a row of zeros or of
    rounding alone."""

    @property
    def named(self) -> Tensor:
        """Return (V,) bool: the rows that stand out."""
        return self.evidence > 0


def long_enough(rows: Tensor) -> bool:
    """Return whether a table (V, D) has enough rows to measure their covariance."""
    return len(rows) >= ROWS_PER_ENTRY * rows.shape[1]


def unlike_the_softmax(rows: Tensor, error: Tensor | float, false_rows: float, known: Tensor | None = None) -> Outliers:
    """Return which rows are not the softmax's share alone.

    Args:
        rows: (V, D) update of the head; `long_enough` is true of it.
        error: standard deviation of the error of each entry, as a number or (V,).
        false_rows: how many rows may be named by chance.
        known: (V,) bool: rows that are known to hold more; they are left out of the measurement.
    """
    energy = rows.double().square().sum(dim=1)  # (V,)
    share = _as_rows(error, rows).square() / energy.clamp_min(1e-300)  # (V,) error of one entry of a direction, squared
    told = share * rows.shape[1] < 1  # more signal than error
    kept = usual = told if known is None else told & ~known
    logs = torch.full_like(energy, -math.inf)
    for _ in range(ROUNDS):
        if int(kept.sum()) <= rows.shape[1]:
            break
        logs = torch.where(told, _log_distances(rows, energy, share, kept), logs)
        kept = usual & (logs < _far(logs[kept], NEAR))
    return Outliers(logs - _settled_cut(logs[usual], _far(logs[kept], FAR), false_rows))


def points_backwards(rows: Tensor, evidence: Tensor) -> Tensor:
    """Return (V,) bool: rows against the mean direction of the usual rows.

    Usual rows do not stand out.
    The softmax's share adds up inputs of the head, and a target takes its inputs away. (LLG, Wainakh et al. 2022, Property 1, for tokens.)
    """
    usual = rows[(evidence <= 0) & evidence.isfinite()].double()
    mean = (usual / usual.norm(dim=1, keepdim=True).clamp_min(1e-300)).mean(dim=0)
    backwards: Tensor = rows.double() @ mean < 0
    return backwards


def _as_rows(error: Tensor | float, rows: Tensor) -> Tensor:
    """Return (V,) float64 errors."""
    given = torch.as_tensor(error, dtype=torch.float64, device=rows.device)
    return given.expand(len(rows))


def _log_distances(rows: Tensor, energy: Tensor, share: Tensor, kept: Tensor) -> Tensor:
    """Return (V,) logarithms of the Mahalanobis distances, divided by D."""
    length = energy.clamp_min(1e-300).sqrt()
    chosen = kept.nonzero().flatten()
    chosen = chosen[:: max(1, len(chosen) // (MEASURED * rows.shape[1]))]
    some = rows[chosen].double() / length[chosen, None]
    mean = some.mean(dim=0)
    variance, directions = torch.linalg.eigh(torch.cov(some.T))
    variance = variance.clamp_min(0.0) + FLOOR * variance.mean().clamp_min(1e-300)
    found = []
    for part in torch.arange(len(rows), device=rows.device).split(8192):
        along = (rows[part].double() / length[part, None] - mean) @ directions  # (n, D)
        found.append((along.square() / (variance + share[part, None])).mean(dim=1))
    return torch.cat(found).clamp_min(1e-300).log()


def _far(logs: Tensor, deviations: float) -> float:
    """Return the value beyond which a logarithm is far from the others."""
    middle = logs.median()
    return float(middle + deviations * 1.4826 * (logs - middle).abs().median())


def _settled_cut(logs: Tensor, limit: float, false_rows: float) -> float:
    """Return the cut whose tail is measured on all rows below it.

    A first limit that is too low leaves out the tail itself, so its cut is too low as well. Each cut is the next limit, until no row lies
    between the two.

    Args:
        logs: (n,) of rows of all kinds.
        limit: below it, rows are usual.
        false_rows: how many usual rows may be above the cut.
    """
    while True:
        below = logs < limit
        cut = _cut(logs[below], false_rows)
        if not bool((~below & (logs < cut)).any()):
            return cut
        limit = cut


def _cut(logs: Tensor, false_rows: float) -> float:
    """Return the logarithm of the distance that `false_rows` rows exceed."""
    if len(logs) < 2:
        return math.inf
    low, high = (float(_quantile(logs, share)) for share in TAIL)
    slope = (high - low) / math.log((1 - TAIL[0]) / (1 - TAIL[1]))
    return high + slope * max(0.0, math.log((1 - TAIL[1]) * len(logs) / false_rows)) + SLACK


def _quantile(values: Tensor, share: float) -> Tensor:
    """Return a quantile; `torch.quantile` refuses long tensors."""
    return values.kthvalue(max(1, min(len(values), math.ceil(share * len(values))))).values
