"""Additive noise whose size is absolute, or relative to the update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from torch import nn

from leakaudit.client.facts import DeclaredDefense
from leakaudit.client.observation import Update, part_of, root_mean_square
from leakaudit.client.step import ClientStep
from leakaudit.models.structure import NAMED_LAYERS, is_layer_choice, parameters_of_layers
from leakaudit.plugins.defense_protocol import Defense


@dataclass(frozen=True)
class AdditiveNoise(Defense):
    """Independent noise of mean 0 on every entry of the update, or of chosen layers."""

    scale: float = 1.0
    """Standard deviation of the noise divided by the root mean square of the entries that get it; 0 adds no noise. Our choice of 1: as much noise
    as signal."""
    sigma: float | None = None
    """Standard deviation of the noise in the units of the update, as papers give it. If it is set, `scale` is ignored."""
    layers: str = ""
    """Layers that get noise: `embeddings`, `first-N`, `last-N` or `head` (`parameters_of_layers`); empty for all. The others are sent as they
    are."""

    identity: ClassVar[Mapping[str, Any]] = {"scale": 0.0}
    on_update = True

    def __post_init__(self) -> None:
        """Refuse negative noise."""
        if self.scale < 0:
            raise ValueError(f"scale must be 0 or more, got {self.scale}")
        if self.sigma is not None and not 0 <= self.sigma < math.inf:
            raise ValueError(f"sigma must be 0 or more and finite, got {self.sigma}")
        if self.layers and not is_layer_choice(self.layers):
            raise ValueError(f"layers must be {NAMED_LAYERS}, or empty for all layers; got {self.layers!r}")

    def is_identity(self) -> bool:
        """Return whether no noise is added."""
        return (self.scale if self.sigma is None else self.sigma) == 0

    def chosen(self, model: nn.Module) -> frozenset[str] | None:
        """Return the parameters of `layers`; None for all."""
        return parameters_of_layers(model, self.layers) if self.layers else None

    def declared(self) -> DeclaredDefense:
        """Return its name and its knobs; `layers` is left out if it is empty."""
        declared = super().declared()
        parameters = {knob: value for knob, value in declared.parameters.items() if knob != "layers" or value}
        return declared.model_copy(update={"parameters": parameters})

    def prepared(self, clean: Update, unit: float) -> Self:
        """Return the same noise with `sigma` computed from the clean update."""
        return replace(self, sigma=self.scale * root_mean_square(clean)) if self.sigma is None else self

    def settled(self, step: ClientStep, sent: Update) -> Self:
        """Return the same noise with `sigma` filled in."""
        return self if self.is_identity() else replace(self, sigma=self._level(part_of(sent, self.chosen(step.model))))

    def added_noise(self, step: ClientStep, clean: Update) -> float:
        """Return `sigma`, or `scale` times the RMS of the entries that get noise."""
        return float(self.prepared(part_of(clean, self.chosen(step.model)), 1.0).sigma or 0.0)

    def without_noise(self) -> Self:
        """Return no noise at all."""
        return replace(self, scale=0.0, sigma=None)

    def noise(self, sent: Update, before: float = 0.0) -> float:
        """Return the standard deviation of all noise on `sent`.

        The variances of independent noises add up.
        """
        return math.hypot(before, self._level(sent))

    def _level(self, sent: Update) -> float:
        """Return `sigma`, computed from `scale` if it is None.

        RMS(sent)^2 = RMS(clean)^2 (1 + scale^2), and sigma is scale times RMS(clean).
        """
        if self.sigma is not None:
            return self.sigma
        return self.scale / math.hypot(1.0, self.scale) * root_mean_square(sent)
