"""An attack from outside the repository."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from leakaudit.plugins import APPLIES, Applicability, Budget, Goal, Observation, Reconstruction, attack


@attack("always-one-token")
@dataclass(frozen=True)
class AlwaysOneToken:
    """Guess one token, whatever was seen."""

    label: ClassVar[str] = "always one token"
    meaning: ClassVar[str] = "Guesses one token, whatever was seen."
    goal: ClassVar[Goal] = "words"
    source: ClassVar[str] = "made for a test"
    threat_model: ClassVar[str] = "sees nothing"
    false_event_rate: ClassVar[float] = 1.0

    token: int = 7
    """The token id."""

    def applies(self, seen: Observation) -> Applicability:
        """Always."""
        return APPLIES

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Return the token."""
        return Reconstruction(tokens=(self.token,))
