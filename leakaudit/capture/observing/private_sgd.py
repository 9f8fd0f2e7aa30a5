"""The detection of an optimizer that clips every example and adds noise.

This module recognizes Opacus's optimizers and reads their settings without importing Opacus.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from leakaudit.capture.observing.optimizers import base_optimizers, every_layer
from leakaudit.client.facts import DeclaredDefense
from leakaudit.errors import SnapshotError

DP_SGD = "dp-sgd"
"""Name of the defence that Opacus applies; its parameters are named as in Opacus."""

REPEATED = ("DPOptimizer", "DistributedDPOptimizer")
"""Classes of Opacus that clip every example's whole gradient to one bound, as in Abadi et al. 2016, Algorithm 1."""


@dataclass(frozen=True)
class PrivateSgd:
    """An optimizer of Opacus, among the wrappers of the loop's optimizer.

    Its settings may follow a schedule, so they are read when they are needed.
    """

    optimizer: Any

    def declared(self) -> tuple[DeclaredDefense, ...]:
        """Return the declared defence of the step that begins.

        Its parameters are in the units of Abadi et al. 2016, Algorithm 1.
        """
        knobs: dict[str, float | int | str | bool] = {
            "noise_multiplier": float(self.optimizer.noise_multiplier),
            "max_grad_norm": float(self.optimizer.max_grad_norm),
            "expected_batch_size": self._divisor(),
        }
        if self.optimizer.loss_reduction == "sum":
            knobs["loss_reduction"] = "sum"
        return (DeclaredDefense(name=DP_SGD, parameters=knobs),)

    def _divisor(self) -> float:
        """Return the number by which the sum of the clipped gradients is divided."""
        if self.optimizer.loss_reduction == "sum":
            return 1.0
        return float(self.optimizer.expected_batch_size)


def private_sgd(optimizer: Any) -> PrivateSgd | None:
    """Return the private optimizer in `optimizer` and its wrappers; None without one.

    Raises:
        SnapshotError: its clipping cannot be repeated here (per layer, adaptive, or in a second backward pass), or it is one of several
            optimizers.
    """
    knobs = ("noise_multiplier", "max_grad_norm", "expected_batch_size", "loss_reduction")
    for layer in every_layer(optimizer):
        if all(knob in vars(layer) for knob in knobs):
            name = type(layer).__name__
            if name not in REPEATED:
                raise SnapshotError(
                    f"{name} does not clip each example's whole gradient to one bound, so its step cannot be repeated; use "
                    "`clipping='flat'` and `grad_sample_mode='hooks'` of Opacus to audit"
                )
            if (several := len(base_optimizers(optimizer))) > 1:
                raise SnapshotError(
                    f"{name} is one of {several} optimizers, so only a part of the update is clipped and noised; train all parameters with "
                    "one private optimizer to audit"
                )
            return PrivateSgd(layer)
    return None
