"""Rows of a pruned output head that hold more than the softmax's share.

Letters: V tokens, D hidden size, S sampled features, N positions with a target, h_i the head's input at position i, p_i(v) the probability of token v
there.

Pruning keeps some entries: with magnitude pruning the largest, which are those of the batch's words and those of words that the model finds likely
everywhere. The public model says what the softmax's share of each row is on texts of its own: its direction m_v, how much each entry of it varies from
position to position, and its size up to a factor. Four things tell a word of the batch (own derivation):

- It holds more beside its share's direction than the share is large.
- Its many entries are turned away from that direction.
- It points against that direction. A target takes its inputs away, so its row has the opposite sign; a few entries show that, or even one,
  if positions do not differ in its sign.
- It is smaller along that direction than the other rows are. Along m_v, the share of every row is one and the same mixture of the sampled positions
  (`softmax_mixture`). The mixture is fitted to the rows, so it shows a target that is hidden by a larger share.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leakaudit.algorithms.bag.softmax_mixture import FITTED, fitted_mixture

MORE = 1.0
"""Least ratio of what is beside the direction to the size of the softmax's share at which a token is named.
Chosen on training texts: at most 0.9 for rows without a token of the batch. The shares of frequent words are too large for this test."""

ALONG, ENTRIES = 0.3, 10
"""Largest cosine with the softmax's share at which a token is named, and the least number of entries left for that.
Chosen on training texts: rows without a token of the batch have 0.6 or more, except where a few entries are left."""

AGAINST = 3.0
"""Least ratio of the share's entries to their standard deviations, over all that are left, at which a row against them is named.
Chosen on training texts: rows without a token of the batch pointed against ratios of up to 2."""

SHORT = 0.05
"""Least length of a row, as a share of the median of the named ones.
Chosen on training texts: words' rows have 0.2 or more, and those that the public model's own texts explain badly have 0.02 or less."""

PART = 4
"""One of so many entries of a row are left at least where its size along its direction is compared.
Our choice: magnitude pruning leaves too large entries in shorter rows."""

LESS, ABOVE = 0.15, 3.0
"""Least relative distance below the mixture at which a token is named, and the least one as a multiple of what one of twenty rows is above it.
Chosen on training texts: rows without a token of the batch were up to 0.14 below. A target makes no row longer, so the rows above tell the fit's error."""


def left_over(rows: Tensor, features: Tensor, probabilities: Tensor) -> Tensor:
    """Return (V,) how much more a row holds than the softmax's share.

    Args:
        rows: (V, D) pruned update of the head.
        features: (S, D) float64 inputs of the head on other texts.
        probabilities: (S, V) of the next token there.

    Returns:
        (V,) float64: natural logarithm of the ratio to the limit of the test that says most; minus infinity for a row of zeros. A token is
        named above 0.
    """
    chances = probabilities.double()
    parts = torch.arange(len(rows), device=rows.device).split(8192)
    found = torch.cat([_beside_or_against(rows[part].double(), features, chances[:, part]) for part in parts])
    length = rows.double().norm(dim=1)
    if bool((found > 0).any()):
        found = torch.where(length >= SHORT * length[found > 0].median(), found, -torch.inf)
    return torch.maximum(found, _less_than_others(rows, features, chances, found > 0))


def _beside_or_against(given: Tensor, features: Tensor, chances: Tensor) -> Tensor:
    """Return (n,) evidence that each row says alone."""
    left, length = (given != 0), given.norm(dim=1)
    shares = chances.T @ features / len(features)  # (n, D)
    size, there = shares.norm(dim=1).clamp_min(1e-300), shares * left
    along = ((given * there).sum(dim=1) / there.norm(dim=1).clamp_min(1e-300)).clamp_min(0.0)  # (n,)
    beside = (length.square() - along.square()).clamp_min(0.0).sqrt() / size / MORE
    turned = torch.where(left.sum(dim=1) >= ENTRIES, ALONG * length / along.clamp_min(1e-300), torch.zeros_like(along))
    weights, mean = _weights(left, features, chances)
    sure = (mean * weights).sum(dim=1).sqrt() / AGAINST
    against = torch.where((given * weights).sum(dim=1) < 0, sure, torch.zeros_like(sure))
    return torch.log(torch.stack([beside, turned, against]).amax(dim=0))


def _weights(left: Tensor, features: Tensor, chances: Tensor) -> tuple[Tensor, Tensor]:
    """Return what weighs the entries of rows, and their mean, both (n, D).

    The weights are the mean over the variance from position to position, and 0 where no entry is left.
    """
    each = chances / chances.sum(dim=0).clamp_min(1e-300)  # (S, n)
    mean = each.T @ features
    variance = each.T @ features.square() - mean.square()
    return left * mean / variance.clamp_min(1e-9 * float(features.square().mean())), mean


def _less_than_others(rows: Tensor, features: Tensor, chances: Tensor, named: Tensor) -> Tensor:
    """Return (V,) evidence from sizes along the share's direction.

    Minus infinity for rows with too few entries, and for all of them if too few others are left to fit the mixture to.
    """
    evidence = torch.full((len(rows),), -torch.inf, dtype=torch.float64, device=rows.device)
    long = PART * (rows != 0).sum(dim=1) >= rows.shape[1]
    likely = torch.where(long, chances.sum(dim=0), -1.0).topk(min(FITTED, int(long.sum()))).indices
    given = rows[likely].double()
    weights, _ = _weights(given != 0, features, chances[:, likely])
    parts = features @ weights.T * chances[:, likely]  # (S, n)
    fitted = fitted_mixture((given * weights).sum(dim=1).cpu(), parts.cpu(), ~named[likely].cpu())
    if fitted is None:
        return evidence
    above = (given * weights).sum(dim=1) / fitted.values.to(rows.device).clamp_min(1e-300) - 1
    limit = max(LESS, ABOVE * float(above[~named[likely]].quantile(0.95)))
    evidence[likely] = torch.log((-above).clamp_min(1e-300) / limit)
    return evidence
