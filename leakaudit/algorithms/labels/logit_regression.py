"""The gradient of the logits, from entries that hardly depend on the text.

It is for estimates of a gradient in which the output layer's own entries are too large to be known, as after a first step of Adam (see
`leakaudit.algorithms.gradient_estimate`). Smaller entries elsewhere are known. Own derivation.

Letters: B sequences, N neutral inputs, C classes, P entries of all parameters that are vectors.

The gradient of an entry is sum_k d(k) . J(k) / B with J(k) = the derivative of the logits for sequence k. Where J hardly changes from input
to input, it is d . J for the mean gradient d of the logits: one linear equation in C unknowns. The biases behind the first token's last
attention are such entries: their J is made of weights and of slopes near 1. Neutral inputs give J and how much it changes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from scipy.optimize import lsq_linear
from torch import Tensor

from leakaudit.algorithms.gradient_estimate import only_bounded
from leakaudit.client.observation import Observation
from leakaudit.models.versions import call_with

STEADY = 0.1
"""Largest standard deviation of an entry's derivative over neutral inputs, as a share of its mean.
Chosen on training texts of CoLA and AG News: 0.05 and 0.2 do equally well."""

EXAMPLES = 8
"""Neutral inputs whose derivatives are compared. Our choice."""

MOST_CLASSES = 64
"""Largest number of classes. Our choice: two neutral inputs are then 128 backward passes, a few seconds on a small encoder."""

TURNS = 4
"""Number of fits; each weighs the entries by the fit before. Our choice."""

AT_LEAST = 0.25
"""Share of an entry whose size is only bounded that is certain. Our choice: its rounding error may be four times the usual one."""

SUM_IS_ZERO = 1e4
"""Weight of the equation that the gradients of all logits add up to 0. Our choice: it is exact, and other weights are about 1e3."""


def regressed_gradient(seen: Observation, head_bias: str | None, inputs: Mapping[str, Tensor]) -> Tensor | None:
    """Return (C,) the gradient of the logits in float64.

    Args:
        seen: the observation; its `update` is an estimate with `error`.
        head_bias: name of the output layer's bias if its update is shared; it gives signs and least sizes.
        inputs: neutral inputs, at least two examples.

    Returns:
        None if there are fewer equations than classes, or too many classes.
    """
    names = [n for n, p in seen.model.named_parameters() if p.dim() == 1 and n in seen.error]
    if not names or (seen.facts.num_labels or 0) > MOST_CLASSES:
        return None
    derivative, changes = _derivatives(seen, names, inputs)  # (C, P), (C, P)
    observed = torch.cat([seen.update[name].flatten() for name in names]).double()  # (P,)
    error = torch.cat([seen.error[name].flatten() for name in names]).double()
    bounded = torch.cat([only_bounded(seen, name).flatten() for name in names])
    steady = changes.sum(dim=0) < STEADY**2 * derivative.square().sum(dim=0)
    usable = steady & ~bounded
    if int(usable.sum()) < len(derivative):
        return None
    low, high = _bounds(seen, head_bias, len(derivative))
    return _fit(
        derivative[:, usable].cpu(), changes[:, usable].cpu(), observed[usable].cpu(), error[usable].cpu(), low, high
    ).to(observed)


def _derivatives(seen: Observation, names: list[str], inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and variance (C, P) of the logits' derivatives over the inputs."""
    own = {name: p.detach().clone().requires_grad_() for name, p in seen.model.named_parameters() if name in names}
    classes = seen.facts.num_labels or 1
    examples = max(2, min(EXAMPLES, 2 * MOST_CLASSES // classes))
    with torch.enable_grad():
        some = {key: value[:examples] for key, value in inputs.items()}
        logits: Tensor = call_with(seen.model, own, some).logits  # (N, C)
        rows = [
            torch.autograd.grad(logit, list(own.values()), retain_graph=True, materialize_grads=True)
            for logit in logits.flatten()
        ]
    found = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows]).double()
    by_class = found.view(*logits.shape, -1)  # (N, C, P)
    return by_class.mean(dim=0), by_class.var(dim=0)


def _bounds(seen: Observation, head_bias: str | None, classes: int) -> tuple[Tensor, Tensor]:
    """Return the least and the largest gradient (C,) of each logit."""
    low = torch.full((classes,), -torch.inf, dtype=torch.float64)
    high = -low
    if head_bias is not None:
        value = seen.update[head_bias].double().cpu()
        bounded = only_bounded(seen, head_bias).cpu()
        low = torch.where(bounded & (value > 0), AT_LEAST * value, low)
        high = torch.where(bounded & (value < 0), AT_LEAST * value, high)
    return low, high


def _fit(derivative: Tensor, changes: Tensor, observed: Tensor, error: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return the gradient (C,) that explains the entries best.

    Args:
        derivative: (C, P) mean derivatives.
        changes: (C, P) their variances.
        observed: (P,) entries of the gradient.
        error: (P,) their standard deviations.
        low: (C,) least gradient of each logit.
        high: (C,) largest one.
    """
    floor = 1e-6 * float(observed.abs().max()) + 1e-30
    found = torch.zeros(len(derivative), dtype=torch.float64)
    for turn in range(TURNS):
        spread = (changes * found.square()[:, None]).sum(dim=0) if turn else changes.sum(dim=0)  # (P,)
        off = (error.square() + spread).sqrt().clamp_min(floor)
        system = torch.cat([(derivative / off).T, torch.full((1, len(derivative)), SUM_IS_ZERO, dtype=torch.float64)])
        wanted = torch.cat([observed / off, torch.zeros(1, dtype=torch.float64)])
        solved = lsq_linear(system.numpy(), wanted.numpy(), bounds=(low.numpy(), high.numpy()))
        found = torch.from_numpy(solved.x)
    return found
