"""`random-labels`: random class counts, the baseline of every label attack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from leakaudit.algorithms.labels.counts import CountsLabels, batch_size
from leakaudit.algorithms.labels.output_layer import number_of_classes
from leakaudit.plugins import (
    APPLIES,
    AnatomyError,
    Applicability,
    Budget,
    Observation,
    Reads,
    Reconstruction,
    attack,
    not_applicable,
)


@attack("random-labels")
@dataclass(frozen=True)
class RandomLabels(CountsLabels):
    """One class drawn evenly for every sequence.

    An attack that is better by more than chance has read something. If the number of sequences is not known, one label
    is drawn. Exact counts are chance here, so they count as no event.
    """

    label: ClassVar[str] = "random labels"
    meaning: ClassVar[str] = (
        "Draws labels at random, without a look at the update: the baseline for every label attack."
    )
    blind: ClassVar[bool] = True
    reads: ClassVar[Reads] = "update"
    """It does not use the update, so a correct guess is no sign that the audit works."""
    source: ClassVar[str] = "random guess of LLG (Wainakh et al. 2022, Sec. 6.1, Baselines)"
    threat_model: ClassVar[str] = "Sees nothing but the number of classes, and of sequences where that is public."

    def applies(self, seen: Observation) -> Applicability:
        """Return whether each sequence has one class."""
        try:
            number_of_classes(seen)
        except AnatomyError as error:
            return not_applicable(str(error))
        return APPLIES

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Draw the labels."""
        classes = number_of_classes(seen)
        known = batch_size(seen, self.data_count)
        drawn = torch.randint(classes, (known or 1,), generator=rng)
        counts = tuple(torch.bincount(drawn, minlength=classes).tolist())
        return Reconstruction(label_counts=counts, counts_told=False, counts_are_shares=known is None)
