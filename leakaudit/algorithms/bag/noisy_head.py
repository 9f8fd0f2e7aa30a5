"""Rows of an output head under noise: the tokens that the batch predicted.

Letters: V tokens, D hidden size, N positions with a target, h_i the head's input at position i, p_i(v) the probability of token v there, s
the standard deviation of the noise on every entry.

Row v of the head's gradient is (sum_i p_i(v) h_i - sum over i with target v of h_i) / N, plus the input gradients of token v if the head is
tied to the word embedding, plus noise. The softmax's share of a frequent word is far above the noise, so the energy of a row says nothing.
But the share is a positive combination of inputs, and a target takes inputs away. Two statistics use that (own derivation):

- the row against d_v = sum_k p_k(v) h_k, the share that the public model has on texts of its own (`sampled_features`). The softmax's share makes it
  smaller. Under noise alone it is a weighted sum of D entries of noise.
- the row's energy in the directions that the features have, each weighted by its share in the features' energy. It counts only for rows that do
  not point along d_v, and Chernoff's bound gives its tail: P(sum_j w_j x_j^2 > e) <= min_t exp(-t e) prod_j (1 - 2 t w_j)^(-1/2). The bound is
  that of Gaussian noise. It holds for all symmetric, independent entries whose cumulants K(u) are at most s^2 u^2 / 2, with s in place of the standard
  deviation: with a normal vector g, E exp(t x'Ax) = E exp(sqrt(2 t) g'A^(1/2) x) <= E exp(t s^2 g'A g).

The declared size of the noise is not that of its entries if it was quantised, pruned or reduced to signs afterwards. So the tail of the first statistic is the
larger one of noise of the declared size and of the quiet rows' own entries (`leakaudit.algorithms.noise_entries`), and s is measured on those as well. The softmax
moves quiet rows, too; what lies in the features' leading directions is left out where the quiet rows hold some of it.

Both together have the tail of twice the smaller one (Bonferroni).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy import special
from torch import Tensor

from leakaudit.algorithms.above_noise import heavy_tailed
from leakaudit.algorithms.noise_entries import NoiseEntries, quiet_entries

STEPS = 400
"""Values of t that are tried in Chernoff's bound.
Our choice: finer steps cost more and change little."""


LEADING, HELD = 8, 0.999
"""One of so many directions of the features may be left out of the quiet rows, and the share of the features' energy that is enough to leave out.
Our choice: a trained model's features have most of their energy in a few directions, and few of the noise's own entries are changed."""

LIKELY = 4.0
"""Surprise under noise of the declared kind below which the quiet rows' entries are not asked. Our choice: a row that is named has 6 or more."""


def target_surprise(rows: Tensor, sigma: float, features: Tensor, probabilities: Tensor) -> Tensor:
    """Return minus the logarithm of the chance of each row under noise alone.

    Args:
        rows: (V, D) noisy update of the head.
        sigma: standard deviation of the noise on every entry, above 0.
        features: (N, D) float64 inputs of the head on other texts.
        probabilities: (N, V) of the next token there.

    Returns:
        (V,) float64. With noise alone, its tail is at most that of an exponential distribution with mean 1.
    """
    rows, heavy = rows.double(), heavy_tailed(rows)
    entries = NoiseEntries.of(quiet_entries(rows, _leading(features)))
    shares = probabilities.double().T @ features  # (V, D)
    shares = shares / shares.norm(dim=1, keepdim=True).clamp_min(1e-300)
    against = -(rows * shares).sum(dim=1)  # (V,)
    scaled = against / max(sigma, entries.deviation)
    if heavy:
        return _no_more_than(entries, _laplace_surprise(scaled, shares), against, shares)
    normal = torch.as_tensor(-special.log_ndtr(-scaled.cpu().numpy()), device=rows.device)
    linear = _no_more_than(entries, normal, against, shares)
    square = _energy_surprise(rows / max(sigma, math.sqrt(entries.proxy)), features)
    both: Tensor = (torch.maximum(linear, torch.where(against > 0, square, 0.0)) - math.log(2)).clamp_min(0.0)
    return both


def _leading(features: Tensor) -> Tensor:
    """Return (D, R) directions that hold nearly all of the features' energy, at most a LEADING-th of D."""
    energy, directions = torch.linalg.eigh(features.T @ features)  # ascending
    held = energy.flip(0).cumsum(0) / energy.sum().clamp_min(1e-300)
    count = min(int((held < HELD).sum()) + 1, len(energy) // LEADING)
    leading: Tensor = directions[:, len(energy) - count :]
    return leading


def _no_more_than(entries: NoiseEntries, surprise: Tensor, against: Tensor, shares: Tensor) -> Tensor:
    """Return (V,) the surprise, or that of the quiet rows' own entries if it is smaller."""
    found = surprise.clone()
    for part in (surprise > LIKELY).nonzero().flatten().split(2048):
        own = entries.surprise(against[part].cpu().numpy(), shares[part].cpu().numpy())
        found[part] = torch.minimum(found[part], torch.as_tensor(own, device=found.device))
    return found


def _energy_surprise(noise: Tensor, features: Tensor) -> Tensor:
    """Return minus the logarithm of Chernoff's bound on each row's weighted energy."""
    variance, directions = torch.linalg.eigh(features.T @ features)
    weights = (variance / variance.max()).clamp_min(0.0)  # (D,)
    energy = ((noise @ directions).square() @ weights).cpu().numpy()  # (V,)
    tries = np.linspace(0.0, 0.5, STEPS + 1)[:-1]  # t; the largest weight is 1
    logs = -0.5 * np.log1p(-2 * tries[:, None] * weights.cpu().numpy()).sum(axis=1)  # (STEPS,)
    best = np.max([t * energy - log for t, log in zip(tries, logs, strict=True)], axis=0)
    return torch.as_tensor(best, device=noise.device)


def _laplace_surprise(against: Tensor, shares: Tensor) -> Tensor:
    """Return minus the logarithm of Chernoff's bound on each row's inner product.

    P(sum_j d_j x_j > t) <= min_u exp(-u t) prod_j 1 / (1 - u^2 d_j^2 / 2) for Laplace noise x of variance 1.
    """
    halves = shares.square() / 2  # (V, D)
    largest = halves.amax(dim=1).clamp_min(1e-300).sqrt()
    best = torch.zeros_like(against)
    for u in torch.linspace(0.0, 1.0, 41, dtype=torch.float64)[1:-1].tolist():
        step = u / largest  # (V,)
        bound = step * against + torch.log1p(-step.square()[:, None] * halves).sum(dim=1)
        best = torch.maximum(best, bound)
    return best
