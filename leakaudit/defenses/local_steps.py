"""`local-steps`: send the difference of the weights after several steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from leakaudit.client.other_steps import with_local_steps
from leakaudit.plugins import ClientStep, StepDefense, defense


@defense("local-steps")
@dataclass(frozen=True)
class LocalSteps(StepDefense):
    """Take several local steps of SGD on the batch before anything is sent.

    The update is (weights before - weights after) / (learning rate * steps), as in federated averaging. Every step has the whole batch.
    """

    steps: int = 4
    """Number of local steps; with 1, the defence does nothing. Our choice of 4: common in measurements of federated averaging."""
    learning_rate: float = 0.01
    """Of every local step, without momentum. Our choice: the update then differs clearly from a gradient. The rate of the run is no default,
    because it is often one of Adam, with which SGD hardly moves."""

    label: ClassVar[str] = "local steps"
    meaning: ClassVar[str] = "Sends the difference of the weights after several local steps instead of a gradient."
    identity: ClassVar[Mapping[str, Any]] = {"steps": 1}
    source: ClassVar[str] = "McMahan et al. 2017 (federated averaging), Algorithm 1"
    protects: ClassVar[str] = (
        "Blurs the gradient of the public weights with those of weights that only the client knows."
    )
    cost: ClassVar[str] = "None for the client's traffic; clients drift apart with many steps."

    def __post_init__(self) -> None:
        """Refuse knobs that describe no local step."""
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be above 0 and finite, got {self.learning_rate}")

    def changed_step(self, step: ClientStep, rng: torch.Generator) -> ClientStep:
        """Return the step with local steps of SGD."""
        return with_local_steps(step, self.steps, self.learning_rate, rng)
