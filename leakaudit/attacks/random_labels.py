"""`random-labels`: the floor under every label attack: a guess that reads nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from leakaudit.attacks.label_counts import batch_size, check_count
from leakaudit.attacks.output_layer import number_of_classes
from leakaudit.attacks.reconstruction import APPLIES, Applicability, Reconstruction, not_applicable
from leakaudit.budget import Budget
from leakaudit.errors import AnatomyError
from leakaudit.registry import attack
from leakaudit.snapshot import Observation


@attack("random-labels")
@dataclass(frozen=True)
class RandomLabels:
    """One class drawn evenly for every sequence. Whatever beats it by more than chance has read something.

    Where the number of sequences is not known, it guesses one.
    """

    data_count: int | None = None
    """Number of sequences behind the update, granted; None takes what the protocol makes public."""

    goal: ClassVar[Literal["text", "words", "labels"]] = "labels"
    source: ClassVar[str] = "random guess of LLG (Wainakh et al. 2022, Sec. 6.1, Baselines)"
    threat_model: ClassVar[str] = "Sees nothing but the number of classes, and of sequences where that is public."

    def __post_init__(self) -> None:
        """Refuse a number of sequences that is none."""
        check_count(self.data_count)

    @property
    def grants(self) -> tuple[str, ...]:
        """Name what the threat model grants beyond the update."""
        return () if self.data_count is None else ("data_count",)

    def applies(self, seen: Observation) -> Applicability:
        """Say whether sequences have one class each."""
        try:
            number_of_classes(seen)
        except AnatomyError as error:
            return not_applicable(str(error))
        return APPLIES

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Draw the labels."""
        classes = number_of_classes(seen)
        drawn = torch.randint(classes, (batch_size(seen, self.data_count) or 1,), generator=rng)
        return Reconstruction(label_counts=tuple(torch.bincount(drawn, minlength=classes).tolist()))
