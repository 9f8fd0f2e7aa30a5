"""`label_exact`: whether all class counts were recovered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakaudit.plugins import LabelCounts, Level, metric


@metric("label_exact")
@dataclass(frozen=True)
class LabelExact:
    """1 if every class was counted right, else 0.

    The mean over steps is the rate of exact count vectors.
    """

    label: ClassVar[str] = "exact label counts"
    meaning: ClassVar[str] = "Share of the steps in which the number of examples of every class was recovered."
    higher_is_better: ClassVar[bool] = True
    level: ClassVar[Level] = "step"
    source: ClassVar[str] = "event `label_counts`; instance-wise restoration of iLRG (Ma et al. 2023) counts alike"

    def __call__(self, counts: LabelCounts) -> float | None:
        """Return 1 or 0, None if the batch has no labels."""
        if not sum(counts.true):
            return None
        return float(counts.true == counts.guess)
