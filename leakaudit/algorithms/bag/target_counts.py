"""How often each token is a target, from an untied output head.

Letters: V tokens, D hidden size, N positions with a target, h_i the head's input at position i, p_i(v) the probability of token v there, g and b
gain and bias of the normalisation before the head, S sampled features.

Row v of the head's gradient is (sum_i p_i(v) h_i - sum over i with target v of h_i) / N. A LayerNorm makes h_i = g x_i + b with
sum_j x_ij = 0, so w . h_i is the same number c at every position for w = 1 / g, and c = sum_j b_j / g_j. Hence

    w . row_v / c = (sum_i p_i(v) - count_v) / N,

which is one equation for each token. A head's bias has this number as its gradient, whatever the normalisation. (Own derivation.)

Two unknowns are left. The sums of probabilities are a mixture of sampled positions (`softmax_mixture`), fitted to the tokens that are no targets, where the
equation gives the sum itself. The unit, 1 / N without clipping, is found because counts are integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakaudit.algorithms.bag.softmax_mixture import STANDS_OUT, fitted_mixture, mixture
from leakaudit.algorithms.bag.token_head import find_token_head, sampled_features
from leakaudit.algorithms.gradient_estimate import as_gradient
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.models.structure import word_embedding

CONSTANT = 0.02
"""Largest spread of w . h over sampled features, as a share of its mean, at which it counts as constant.
Our choice: a trained GPT-2 has 3e-6; a bias near zero leaves rounding alone."""

ROUNDS = 3
"""Fits of the mixture with the tokens whose counts are certain.
Our choice: each makes more of them certain. On training texts three left at most 3 of 400 targets uncertain."""

FIRST_ERROR, LEAST_ERROR = 0.25, 0.01
"""Relative error of the fit for targets: at first, and the least one that is assumed later.
Chosen on training texts: a fit to other tokens alone was up to 0.2 off for targets, because these are likelier than the tokens of the fit."""

FEW = 10
"""Least number of known sums that tell the error of the fit. Our choice: the 90 % quantile of fewer is their largest."""

TOLD = 0.02
"""Least share of a token's count at which its sum of probabilities is told by it. Our choice: the unit is right to about 0.001."""

CLEAR = 0.05
"""Largest standard deviation of a token's statistic, as a share of it, at which it helps to find the unit. Our choice."""

MOST = 8
"""Largest count that the rarest clear token may have. Our choice: nearly every batch has words that occur once."""

OFF, FITTING = 0.2, 0.95
"""Largest distance of a number from an integer, and the least share of clear tokens that are as near.
Our choice: chance leaves three of five tokens farther off."""

SURE = 3.0
"""Standard deviations that must fit into one half, the distance to the next integer. Our choice: one in 400 for normal errors."""


@dataclass(frozen=True)
class TargetCounts:
    """How often each token of the vocabulary is a target of the batch."""

    counts: Tensor
    """(V,) int64, on the CPU: the nearest integers, 0 for tokens that are no targets."""
    known: Tensor
    """(V,) bool, on the CPU: where the count is certain. False for some tokens that the model finds likely at many positions."""
    total: int | None
    """N, the positions with a target; None if the counts do not tell it."""
    shares: Tensor
    """(V,) float64, on the CPU: estimate of sum_i p_i(v) / N."""


def target_counts(seen: Observation) -> TargetCounts | None:
    """Return the counts of target tokens, or None if the head does not tell them.

    They show where the head is shared, and is not tied to the word embedding or has a bias; where the update is a gradient with all of its
    entries; and where the counts come out as integers. They do not if micro-batches of different lengths were averaged, or if every example
    was clipped. A normalisation without bias (RMSNorm, or LayerNorm as it is initialised) makes no projection of h constant. Only causal
    language models are asked, because others do not make up texts.
    """
    exact = as_gradient(seen.sent or seen)[1].quality == "exact"
    if seen.facts.task != "causal-lm" or not seen.whole or seen.zeroed or not exact:
        return None
    try:
        head, name = find_token_head(seen)
    except AnatomyError:
        return None
    bias = _bias_of(seen, head)
    if bias is None and _is_tied(seen, name):
        return None
    features, probabilities = sampled_features(seen, head)
    read = _projected(as_gradient(seen.sent or seen)[0], name, bias, features)
    if read is None:
        return None
    values, error = read
    return _counted(values, error, probabilities.double().cpu(), _scaled(seen))


def _bias_of(seen: Observation, head: nn.Linear) -> str | None:
    """Return the name of the head's bias; None if it has none that is shared."""
    names = {id(parameter): name for name, parameter in seen.model.named_parameters()}
    name = None if head.bias is None else names[id(head.bias)]
    return name if name in seen.update else None


def _projected(seen: Observation, name: str, bias: str | None, features: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return (V,) values w . row / c and their standard deviations, on the CPU.

    None if the rows have no such direction w.

    Args:
        seen: with a gradient.
        name: of the head.
        bias: its name, if it has one.
        features: (S, D) inputs of the head.
    """
    noise = (seen.sent or seen).noise_level.of(name if bias is None else bias)
    if bias is not None:
        values = seen.update[bias].double().cpu()
        return values, (_error_of(seen, bias, values).square() + noise**2).sqrt()
    direction = constant_direction(seen.model, features)
    if direction is None:
        return None
    rows = seen.update[name].double().cpu()  # (V, D)
    squares = _error_of(seen, name, rows).square() + noise**2
    return rows @ direction, (squares @ direction.square()).sqrt()


def constant_direction(model: nn.Module, features: Tensor) -> Tensor | None:
    """Return w (D,) with w . h = 1 at every position, or None if there is none.

    Args:
        model: its normalisations are tried: gains as they are, gains that are added to 1, and no gain.
        features: (S, D) float64 inputs of the head.
    """
    size = features.shape[1]
    gains = [p.detach().double() for p in model.parameters() if p.shape == (size,)]
    tried = [gain for one in reversed(gains) for gain in (one, 1 + one)] + [features.new_ones(size)]
    for gain in tried:
        if not bool((gain.abs() > 1e-6).all()):
            continue
        along = features @ (1 / gain)  # (S,)
        if float(along.std()) < CONSTANT * abs(float(along.mean())):
            return (1 / gain / along.mean()).cpu()
    return None


def _counted(values: Tensor, error: Tensor, probabilities: Tensor, scaled: bool) -> TargetCounts | None:
    """Return the counts that w . row / c shows.

    Tokens whose counts are certain tell the sum of their probabilities, too. They join the fit, and their distance from it says how far
    it is off for targets.

    Args:
        values: (V,) float64.
        error: (V,) standard deviations.
        probabilities: (S, V) float64 at sampled positions.
        scaled: whether the factor may differ from 1 / N.
    """
    fitted = fitted_mixture(values, probabilities, torch.ones_like(values, dtype=torch.bool))
    if fitted is None:
        return None
    share, usual = fitted.values, fitted.usual
    below, off, unit = values < -STANDS_OUT * error, FIRST_ERROR, 0.0
    for _ in range(ROUNDS):
        extra, spread = share - values, (off * share).hypot(error)  # (V,)
        clear = below & (spread < CLEAR * extra)
        unit = _unit(extra[clear], spread[clear])
        if unit == 0.0:
            return None
        counts = (extra / unit).round().clamp_min(0)
        known = (SURE * spread < 0.5 * unit) & ((extra / unit - counts).abs() < OFF)
        sums = values + counts * unit  # (V,) of the probabilities
        told = known & (counts > 0) & (sums > TOLD * counts * unit) & (sums > STANDS_OUT * error)
        off = _error_of_fit(share[told] / sums[told], off)
        mixed = mixture(probabilities, sums, usual | told)
        if mixed is None:
            return None
        share = mixed
    counts = counts.long()
    total = _total(counts, known, extra, unit, scaled)
    return None if total == 0 else TargetCounts(counts.cpu(), known, total, share)


def _error_of_fit(ratios: Tensor, before: float) -> float:
    """Return the relative error of the fit for targets, from known sums."""
    if len(ratios) < FEW:
        return before
    return max(float((ratios - 1).abs().quantile(0.9)), LEAST_ERROR)


def _total(counts: Tensor, known: Tensor, extra: Tensor, unit: float, scaled: bool) -> int | None:
    """Return N, None if it is not known, and 0 if the counts contradict it."""
    if scaled:
        return int(counts.sum()) if bool(known.all()) else None
    total = round(1 / unit)
    return total if abs(float(extra.sum()) / unit - total) <= 0.05 * total + 1 else 0


def _unit(clear: Tensor, spread: Tensor) -> float:
    """Return the unit of which positive numbers are multiples; 0 if none is."""
    if not len(clear):
        return 0.0
    ranked = clear.argsort()
    clear, weights = clear[ranked], 1 / spread[ranked].clamp_min(1e-6 * float(clear.max())).square()
    for fewest in range(1, MOST + 1):
        unit = float(clear[0]) / fewest
        for upto in range(1, len(clear) + 1):  # each number refines the unit for the next, larger one
            counts = (clear[:upto] / unit).round()
            right = weights[:upto] * counts
            unit = float((clear[:upto] * right).sum() / (counts * right).sum())
        fits = ((clear / unit - (clear / unit).round()).abs() < OFF).double()
        if float(fits.mean()) >= FITTING:
            return unit
    return 0.0


def _scaled(seen: Observation) -> bool:
    """Return whether clipping may have scaled the update."""
    return (seen.sent or seen).clipping_bound is not None or (seen.sent or seen).resized


def _is_tied(seen: Observation, name: str) -> bool:
    """Return whether a head is the word embedding, too."""
    return name == word_embedding(seen.model) or any(name in pair for pair in seen.facts.tied)


def _error_of(seen: Observation, name: str, like: Tensor) -> Tensor:
    """Return standard deviations of a parameter's entries; zeros if exact."""
    found = as_gradient(seen.sent or seen)[1].error.get(name)
    return torch.zeros_like(like) if found is None else found.double().cpu()
