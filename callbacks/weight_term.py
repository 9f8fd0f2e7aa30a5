"""Recognises a term of the loss that depends on the weights alone, which no output of the model tells of.

FedProx (Li et al. 2020) and L2-SP (Li et al. 2018) add mu/2 |W - W0|^2 to a client's loss, with W0 the weights at its start; others add
lambda/2 |W|^2. The gradient of such a term is mu (W - W0) + lambda W. It is what is left of an update without the part that the
forward passes explain. What is left if the batch is another one is the gradient of a text, which is no combination of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakaudit.callbacks.witness import few_entries, own_part
from leakaudit.models import plain_name

SAMPLE = 256
"""Entries of each parameter that are held against each other. Our choice: two numbers cannot explain 256 entries by chance, and the weights
at the start take 1 kB a parameter."""

NEAR = 1e-5
"""Relative error up to which the term explains the rest. Our choice: adding it to a gradient in float32 leaves 1e-7."""

LOOKED_FOR = "no term on the weights alone explains the difference (FedProx, L2-SP and an L2 penalty were looked for)"


@dataclass(frozen=True)
class WeightTerm:
    """The term mu (W - W0) + lambda W of an update."""

    proximal: float
    """mu, >= 0: pulls towards the weights at the start."""
    decay: float
    """lambda, >= 0: pulls towards zero."""
    error: float
    """What it does not explain, as a share of the update."""

    @property
    def note(self) -> str:
        """Say what was found."""
        parts = [
            f"{factor:.3g} {what}"
            for factor, what in (
                (self.proximal, "(W - W0), W0 the weights at the start (FedProx, L2-SP)"),
                (self.decay, "W (an L2 penalty)"),
            )
            if factor
        ]
        return f"beside the gradient of its batch the update holds {' and '.join(parts)}; checked on {SAMPLE} entries of each parameter"


def start_of(model: nn.Module) -> dict[str, Tensor]:
    """Return at most `SAMPLE` entries of every parameter as it is now: W0, for `weight_term`."""
    return {plain_name(name): few_entries(own_part(p), SAMPLE).clone() for name, p in model.named_parameters()}


def weight_term(
    observed: Mapping[str, Tensor],
    recomputed: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
) -> WeightTerm | None:
    """Return the term on the weights that turns the recomputed update into the observed one, or None where there is none.

    Both numbers are not negative: what a step that forgot to empty its gradients adds points along -(W - W0), and is no such term.

    Args:
        observed: parameter name -> update, as the optimizer got it.
        recomputed: the part of it that the forward passes explain; of the same names and shapes.
        weights: at the step; at least the same names.
        start: entries of the weights at the start, as `start_of` returns them.
    """
    names = [name for name in recomputed if name in observed and name in weights and name in start]
    if len(names) < len(recomputed) or not names:
        return None
    seen, own, now = (_entries(values, names) for values in (observed, recomputed, weights))
    before = torch.cat([start[name].double().flatten().cpu() for name in names])
    rest, length = seen - own, float(seen.norm())
    if len(before) != len(now) or not torch.isfinite(rest).all() or float(rest.norm()) <= NEAR * length:
        return None
    for basis in ((True, False), (False, True), (True, True)):  # the simplest explanation first
        proximal, decay = _fit(rest, now - before, now, *basis)
        error = float((rest - proximal * (now - before) - decay * now).norm()) / length
        if error <= NEAR and min(proximal, decay) >= 0:
            return WeightTerm(proximal, decay, error)
    return None


def _entries(values: Mapping[str, Tensor], names: list[str]) -> Tensor:
    """Return the entries of some tensors that are compared, (entries,), float64, on the CPU."""
    return torch.cat([few_entries(own_part(values[name]), SAMPLE).double().cpu() for name in names])


def _fit(rest: Tensor, moved: Tensor, now: Tensor, with_moved: bool, with_now: bool) -> tuple[float, float]:
    """Return the factors of two vectors that explain a third best; 0 for one that is left out or zero."""
    used = [vector for vector, wanted in ((moved, with_moved), (now, with_now)) if wanted and bool(vector.any())]
    if len(used) < with_moved + with_now:
        return 0.0, 0.0
    found = torch.linalg.lstsq(torch.stack(used, dim=1), rest.unsqueeze(1), driver="gelsd").solution.flatten().tolist()
    return (found.pop(0) if with_moved else 0.0), (found.pop(0) if with_now else 0.0)
