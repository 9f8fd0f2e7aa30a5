"""`dropout`: train with another dropout rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from leakaudit.client.other_steps import with_dropout
from leakaudit.plugins import ClientStep, StepDefense, defense


@defense("dropout")
@dataclass(frozen=True)
class Dropout(StepDefense):
    """Train with one rate in all dropout modules of the model.

    The rate is public, the masks are not. Layers that drop entries without a module of their own keep their rate.
    """

    rate: float | None = 0.3
    """Share of the entries that are set to zero in training. None keeps the rates of the run, and the defence does nothing. Our choice of 0.3:
    three times the usual rate of encoders."""

    label: ClassVar[str] = "dropout"
    meaning: ClassVar[str] = "Sets more entries inside the model to zero at random in training."
    identity: ClassVar[Mapping[str, Any]] = {"rate": None}
    source: ClassVar[str] = "Srivastava et al. 2014; as a defence: GRAB (2024), Sec. 5.4.2"
    protects: ClassVar[str] = "Blurs what the layers read, from attackers who do not know the masks."
    cost: ClassVar[str] = (
        "Slower training; at high rates a worse model (GRAB, Sec. 5.4.2: MCC 0.77 at 0.1 and 0 at 0.4)."
    )

    def __post_init__(self) -> None:
        """Refuse what is no rate."""
        if self.rate is not None and not 0 <= self.rate < 1:
            raise ValueError(f"rate must be at least 0 and below 1, got {self.rate}")

    def changed_step(self, step: ClientStep, rng: torch.Generator) -> ClientStep:
        """Return the step with this rate and new masks."""
        return step if self.rate is None else with_dropout(step, self.rate, rng)
