"""The base class of defences that train adapters instead of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from leakaudit.client.other_steps import with_adapters
from leakaudit.client.step import ClientStep
from leakaudit.plugins.step_defense import StepDefense

SEPARATOR = "+"
"""Between two ends of names in `targets`. Our choice: a comma separates knobs."""


@dataclass(frozen=True)
class AdapterDefense(StepDefense):
    """Train low-rank adapters (LoRA, as peft makes them) and send only these.

    A layer with an adapter computes W x + (alpha / rank) B A x. A classifier's head is trained, too; an output layer of words is not. In the
    first round B is zero. Then the adapter adds nothing, and A gets no gradient. Later rounds are simulated with random entries of B.
    """

    rank: int = 8
    """Rank R of the adapters; with 0 the client trains the model itself, and the defence does nothing. Our choice of 8: peft's default."""
    alpha: float | None = None
    """Numerator of the scale of an adapter. None takes the rank, so that the scale is 1."""
    targets: str = ""
    """Ends of the names of the layers with adapters, such as `query+value`. Empty takes peft's own choice for the model."""
    spread: float = 0.01
    """Standard deviation of the entries of B; 0 is the first round. Our choice of 0.01: about ten steps of AdamW at a learning rate of 0.001
    move an entry so far. A first round alone would show less than the rounds after it."""

    identity: ClassVar[Mapping[str, Any]] = {"rank": 0}
    only_second: ClassVar[bool] = False
    """Whether A is frozen and public, so that only B is sent."""

    def __post_init__(self) -> None:
        """Refuse knobs that describe no adapter."""
        if self.rank < 0:
            raise ValueError(f"rank must be 0 or more, got {self.rank}")
        if self.alpha is not None and not self.alpha > 0:
            raise ValueError(f"alpha must be above 0, got {self.alpha}")
        if self.spread < 0:
            raise ValueError(f"spread must be 0 or more, got {self.spread}")

    def changed_step(self, step: ClientStep, rng: torch.Generator) -> ClientStep:
        """Return the step on a model with new adapters."""
        targets = tuple(part for part in self.targets.split(SEPARATOR) if part)
        return with_adapters(
            step, self.rank, targets, alpha=self.alpha, spread=self.spread, only_second=self.only_second, rng=rng
        )
