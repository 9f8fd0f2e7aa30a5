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
        if self.optimizer.loss_reduction == "sum" or self._clips_by_weights:
            knobs["loss_reduction"] = "sum"
        if bounds := getattr(self.optimizer, "max_grad_norms", None):  # one for each parameter
            knobs["layer_bounds"] = " ".join(f"{float(bound):.9g}" for bound in bounds)
        return (DeclaredDefense(name=DP_SGD, parameters=knobs),)

    @property
    def _clips_by_weights(self) -> bool:
        """Whether a second backward pass clips, as in ghost clipping.

        It gives each example's loss a weight.

        The recorded gradients at the model's outputs then hold these weights, and the losses are summed whatever their reduction.
        """
        return callable(getattr(self.optimizer, "accumulate", None))

    def _divisor(self) -> float:
        """Return the number by which the sum of the clipped gradients is divided."""
        if self.optimizer.loss_reduction == "sum":
            return 1.0
        return float(self.optimizer.expected_batch_size)


def private_sgd(optimizer: Any) -> PrivateSgd | None:
    """Return the private optimizer in `optimizer` and its wrappers; None without one.

    Raises:
        SnapshotError: it is one of several optimizers.
    """
    knobs = ("noise_multiplier", "max_grad_norm", "expected_batch_size", "loss_reduction")
    for layer in every_layer(optimizer):
        if all(knob in vars(layer) for knob in knobs):
            if (several := len(base_optimizers(optimizer))) > 1:
                raise SnapshotError(
                    f"{type(layer).__name__} is one of {several} optimizers, so only a part of the update is clipped and noised; train all "
                    "parameters with one private optimizer to audit"
                )
            return PrivateSgd(layer)
    return None
