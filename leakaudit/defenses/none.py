"""`none`: the update as it was sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from leakaudit.plugins import ClientStep, Defense, Observation, defense


@defense("none")
@dataclass(frozen=True)
class NoDefense(Defense):
    """Send the update as the run ships it.

    Every other defence is compared with this one.
    """

    label: ClassVar[str] = "no defence"
    meaning: ClassVar[str] = "Sends the update as the run ships it."
    identity: ClassVar[Mapping[str, Any]] = {}
    source: ClassVar[str] = "the step as it was recorded"
    protects: ClassVar[str] = "Nothing beyond what the training run does anyway."
    cost: ClassVar[str] = "None."

    def __call__(self, step: ClientStep, seen: Observation, rng: torch.Generator) -> Observation:
        """Return `seen` itself."""
        return seen
