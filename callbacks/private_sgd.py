"""Finds out whether an optimizer clips every example and adds noise, and how: Opacus, without importing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from leakaudit.callbacks.recorder import layers_of
from leakaudit.client import DP_SGD
from leakaudit.snapshot import DeclaredDefense


@dataclass(frozen=True)
class PrivateSgd:
    """An optimizer of Opacus somewhere among the wrappers; its knobs may be scheduled, so they are read when they are needed."""

    optimizer: Any

    def declared(self) -> tuple[DeclaredDefense, ...]:
        """Return what the protocol declares of the step that begins, in the units of Abadi et al. 2016, Algorithm 1."""
        knobs: dict[str, float | int | str | bool] = {
            "noise_multiplier": float(self.optimizer.noise_multiplier),
            "max_grad_norm": float(self.optimizer.max_grad_norm),
            "expected_batch_size": self._divisor(),
        }
        return (DeclaredDefense(name=DP_SGD, parameters=knobs),)

    def _divisor(self) -> float:
        """Return what the sum of the clipped gradients is divided by."""
        if self.optimizer.loss_reduction == "sum":
            return 1.0
        return float(self.optimizer.expected_batch_size)


def private_sgd(optimizer: Any) -> PrivateSgd | None:
    """Return the private optimizer among `optimizer` and what it wraps, or None where there is none.

    By its attributes, not by its class: Opacus has half a dozen classes, and other libraries follow them.
    """
    knobs = ("noise_multiplier", "max_grad_norm", "expected_batch_size", "loss_reduction")
    for layer in layers_of(optimizer):
        if all(knob in vars(layer) for knob in knobs):
            return PrivateSgd(layer)
    return None
