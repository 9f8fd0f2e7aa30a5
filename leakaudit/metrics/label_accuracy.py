"""`label_accuracy`: share of the labels of a batch that were recovered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakaudit.plugins import LabelCounts, Level, label_success_rate, metric


@metric("label_accuracy")
@dataclass(frozen=True)
class LabelAccuracy:
    """Recovered labels over all labels, as a multiset.

    sum_c min(true_c, guess_c) / max(number true, number guessed): LLG's attack success rate (see `label_success_rate`).
    """

    label: ClassVar[str] = "label accuracy"
    meaning: ClassVar[str] = "Share of the labels of a batch that were recovered."
    higher_is_better: ClassVar[bool] = True
    level: ClassVar[Level] = "step"
    source: ClassVar[str] = "attack success rate of LLG (Wainakh et al. 2022, Sec. 6.1)"

    def __call__(self, counts: LabelCounts) -> float | None:
        """Return the share, None if the batch has no labels."""
        return label_success_rate(counts)
