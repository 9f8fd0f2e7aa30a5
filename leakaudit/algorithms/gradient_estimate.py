"""The gradient that a difference of weights hides, with the error of every entry.

Letters: w weight before the local steps, d the sum of the learning rates of K local steps, u = (w - weight after) / d the update as it is
observed, g the mean gradient of the local steps.

- SGD: u = g. With momentum m and an empty buffer, the gradient of step k counts 1 + m + ... + m^(K-k) times, so u is a weighted mean
  (dampening and Nesterov's momentum change these weights, see `_times_counted`).
- Adam and AdamW, K = 1, zero moments: bias correction makes both moments those of g alone, so u = g / (|g| + eps) (Kingma and Ba 2015,
  Algorithm 1, at t = 1). It follows that |g| = eps |u| / (1 - |u|). AdamW adds the weight decay times w to u; Adam adds it to g. (Own
  derivation.)
- Adafactor, K = 1 (Shazeer and Stern 2018, Algorithm 4, at t = 1): u_ij = k g_ij / sqrt(r_i c_j) with r_i = mean_j g_ij^2 and
  c_j = mean_i g_ij^2, so sum_j u_ij^2 c_j = const for all i, and sum_i u_ij^2 r_i = const for all j (own derivation). A gradient of rank R
  leaves u^2 a rank of at most R (R + 1) / 2. So r and c are not determined for short texts in small batches: a gradient of rank 1 leaves
  its signs and nothing else. `docs/decisions/adafactor.md` says what was measured.
- Every other case: u tells at most the direction of g.

The weights are rounded to their number format, which limits what u tells: the error of u is uniform within half a unit in the last place of
w. Near |u| = 1 a small error of u is a large error of g, so large gradients are known less well than small ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from leakaudit.client.facts import PublicFacts
from leakaudit.client.observation import Observation
from leakaudit.client.optimizer import ParameterGroup

Quality = Literal["exact", "direction"]
"""Whether an estimate is the gradient up to a known error, or only points in a similar direction."""

ARITHMETIC = 4.0
"""Rounding errors of the optimizer's own float32 arithmetic, in units of u times 2^-24.
Our choice: the operations of one Adam step and the division by the learning rate."""

COARSEST = 0.5
"""Largest error of |u| that is assumed; with more, u tells only the sign. Our choice."""


KNOWN = 0.3
"""Largest error of an entry, as a share of it, at which its size counts as known.
Chosen on training texts of CoLA and AG News: with larger errors the first-order error does not hold."""


@dataclass(frozen=True)
class GradientEstimate:
    """A gradient that was computed from an observed update."""

    gradient: Mapping[str, Tensor]
    """Parameter name -> estimate, float32."""
    error: Mapping[str, Tensor]
    """Parameter name -> standard deviation of each entry's error, float32; a parameter without error is missing."""
    quality: Quality
    note: str = ""
    """Why the estimate is only a direction; empty for an exact one."""


def gradient_estimate(seen: Observation) -> GradientEstimate:
    """Return what the update tells about the mean gradient of the local steps."""
    facts, optimizer = seen.facts, seen.facts.optimizer
    if facts.update_kind in ("gradient", "sgd") and optimizer is None:
        return GradientEstimate(seen.update, {}, "exact")
    if optimizer is None:
        raise AssertionError("a difference of weights of another kind than SGD has an optimizer")
    if seen.facts.defenses and optimizer.kind not in ("sgd", "momentum"):
        return _direction(seen, "a declared defence changed the update after the optimizer's step")
    if not optimizer.fresh and optimizer.kind != "sgd":
        return _direction(seen, "the optimizer kept moments of earlier rounds, which are not in the update")
    if optimizer.kind in ("sgd", "momentum"):
        return _of_momentum(seen)
    if optimizer.kind == "adam" and facts.local_steps == 1:
        return _of_first_adam_step(seen)
    if optimizer.kind == "adam":
        return _direction(seen, f"{facts.local_steps} steps of {optimizer.algorithm} leave no gradient in the update")
    if optimizer.kind == "adafactor":
        return _direction(
            seen,
            "a step of Adafactor divides every row and column by its size, and a small batch does not tell these sizes",
        )
    return _direction(seen, f"no inverse of a step of {optimizer.algorithm} is known")


def as_gradient(seen: Observation) -> tuple[Observation, GradientEstimate]:
    """Return the observation with the estimated gradient in place of the update.

    Its facts are those of a client that sends a gradient.
    """
    if "gradient" not in seen.memo:
        seen.memo["gradient"] = _as_gradient(seen)
    found: tuple[Observation, GradientEstimate] = seen.memo["gradient"]
    return found


def _as_gradient(seen: Observation) -> tuple[Observation, GradientEstimate]:
    found = gradient_estimate(seen)
    if found.gradient is seen.update:
        return seen, found
    facts = seen.facts.model_copy(update={"view": "local", "optimizer": None, "learning_rate": None})
    return replace(seen, update=found.gradient, facts=facts, error=found.error, sent=seen), found


def only_bounded(seen: Observation, name: str) -> Tensor:
    """Return which entries of an estimate tell a sign and a least size only.

    Steps of Adam and Adafactor are bounded. A gradient whose step is at the bound is at least as large as the estimate says.

    Args:
        seen: an observation that `as_gradient` returned, or any other.
        name: of a parameter.

    Returns:
        Bool, in the parameter's shape.
    """
    value, error, sent = seen.update[name], seen.error.get(name), seen.sent
    if error is None or sent is None or sent.facts.update_kind not in ("adam", "adafactor"):
        return torch.zeros_like(value, dtype=torch.bool)
    return (error >= KNOWN * value.abs()) & (sent.update[name].abs() > 0.5 * sent.update[name].abs().max())


def rounding_of_update(weight: Tensor, rate: float, steps: int, divisor: float) -> Tensor:
    """Return the standard deviation of the rounding error of an update's entries.

    A weight is rounded once in each step, by an error that is uniform within half a unit in the last place.

    Args:
        weight: weights before the steps, in the client's number format.
        rate: learning rate of the parameter; it bounds how far an entry that was zero can have moved.
        steps: number of roundings.
        divisor: of the difference of weights.

    Returns:
        Float32, in units of the update.
    """
    size = weight.detach().abs()
    unit = (torch.nextafter(size, torch.full_like(size, torch.inf)) - size).float()
    smallest = rate * torch.finfo(weight.dtype).eps
    unit = torch.where(size == 0, torch.full_like(unit, smallest), unit)
    found: Tensor = unit * ((steps / 12) ** 0.5 / divisor)
    return found


def _direction(seen: Observation, why: str) -> GradientEstimate:
    return GradientEstimate(_without_decay(seen), {}, "direction", why)


def _without_decay(seen: Observation) -> dict[str, Tensor]:
    """Return the update without the weight decay that is applied to weights.

    An optimizer that maximizes moves along the gradient, so its update is turned round.
    """
    weights = dict(seen.model.named_parameters())
    found = {}
    for name, update in seen.update.items():
        group = _group(seen.facts, name)
        decay = _decoupled_decay(seen.facts, group)
        share = 0.0 if group is None else sum(group.learning_rates) / divisor_of(seen.facts)
        found[name] = update - (decay * share) * weights[name].detach().float() if decay else update
        if group is not None and group.options.get("maximize"):
            found[name] = -found[name]
    return found


def _of_momentum(seen: Observation) -> GradientEstimate:
    """Return the mean of the gradients, weighted as the momentum counts them."""
    weights, divisor, steps = dict(seen.model.named_parameters()), divisor_of(seen.facts), seen.facts.local_steps
    gradient, error = {}, {}
    for name, update in seen.update.items():
        group = _group(seen.facts, name)
        if group is None:
            gradient[name] = update
            continue
        counted = _times_counted(group)
        factor = divisor / counted if counted else 1.0
        weight = weights[name].detach()
        gradient[name] = update * factor - group_number(group, "weight_decay") * weight.float()
        if group.options.get("maximize"):
            gradient[name] = -gradient[name]
        error[name] = rounding_of_update(weight, group.learning_rates[0], steps, divisor) * factor
    return GradientEstimate(gradient, error, "exact")


def _times_counted(group: ParameterGroup) -> float:
    """Return the movement of a parameter whose gradient is 1 in every step.

    The buffer of PyTorch's SGD begins as the first gradient, without dampening.
    """
    momentum, new = group_number(group, "momentum"), 1 - group_number(group, "dampening")
    buffer, moved = 0.0, 0.0
    for number, rate in enumerate(group.learning_rates):
        buffer = 1.0 if number == 0 else momentum * buffer + new
        if not momentum:
            buffer = 1.0
        moved += rate * (1 + momentum * buffer if group.options.get("nesterov") else buffer)
    return moved


def _of_first_adam_step(seen: Observation) -> GradientEstimate:
    weights = dict(seen.model.named_parameters())
    gradient, error = {}, {}
    for name, update in seen.update.items():
        group = _group(seen.facts, name)
        if group is None or not group.learning_rates[0]:
            gradient[name] = update
            continue
        moved, off = first_step_movement(seen, name, weights[name].detach())
        found, uncertain = invert_adam(moved, off, group_number(group, "eps"))
        if not _decoupled_decay(seen.facts, group):
            sign = -1.0 if group.options.get("maximize") else 1.0  # decay is added to the gradient that Adam minimises
            found = found - sign * group_number(group, "weight_decay") * weights[name].detach().double()
        gradient[name], error[name] = found.float(), uncertain.float()
    return GradientEstimate(gradient, error, "exact")


def first_step_movement(seen: Observation, name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return u = g / (|g| + eps) of a first Adam step, and its standard deviation.

    AdamW's weight decay is taken out.

    Args:
        seen: an update after one step of Adam from zero moments.
        name: of a parameter that the optimizer moves.
        weight: the parameter before the step, in the client's number format.

    Returns:
        Movement and rounding error of every entry, float64.
    """
    group = _group(seen.facts, name)
    if group is None:
        raise KeyError(name)
    rate, decay = group.learning_rates[0], _decoupled_decay(seen.facts, group)
    moved = seen.update[name].double() * (divisor_of(seen.facts) / rate)
    if decay:
        moved = moved - decay * weight.double()
    if group.options.get("maximize"):
        moved = -moved
    rounded = rounding_of_update(weight, rate, 2 if decay else 1, rate).double()
    return moved, rounded + ARITHMETIC * 2.0**-24 * moved.abs()


def invert_adam(moved: Tensor, off: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradient behind a first Adam step's movement, and its error.

    Where |u| is 1 up to rounding, the gradient is only known to be at least the returned one; the error is then as large as it.

    Args:
        moved: u, float64.
        off: standard deviation of u.
        eps: of Adam.

    Returns:
        Gradient and standard deviation of its error, float64.
    """
    size = torch.minimum(moved.abs(), 1 - off.clamp(max=COARSEST))
    gradient = torch.sign(moved) * eps * size / (1 - size)
    return gradient, (gradient.abs() + eps).square() / eps * off


def divisor_of(facts: PublicFacts) -> float:
    """Return the sum of the learning rates by which the update is divided."""
    return (facts.learning_rate or 1.0) * facts.local_steps


def _group(facts: PublicFacts, name: str) -> ParameterGroup | None:
    return None if facts.optimizer is None else facts.optimizer.group_of(name)


def group_number(group: ParameterGroup, option: str) -> float:
    """Return a numeric option of a parameter group; 0 without it."""
    value: Any = group.options.get(option)
    return float(value) if isinstance(value, int | float) else 0.0


def _decoupled_decay(facts: PublicFacts, group: ParameterGroup | None) -> float:
    """Return the weight decay that is applied to the weights and not to the gradient."""
    if group is None or facts.optimizer is None:
        return 0.0
    apart = group.options.get("decoupled_weight_decay", facts.optimizer.algorithm in ("AdamW", "Adafactor"))
    return group_number(group, "weight_decay") if apart else 0.0
