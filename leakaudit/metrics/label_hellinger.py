"""`label_hellinger`: how near the guessed class distribution is to the true one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from leakaudit.plugins import LabelCounts, Level, metric


@metric("label_hellinger")
@dataclass(frozen=True)
class LabelHellinger:
    """1 - H, with the Hellinger distance H between true and guessed labels.

    H = sqrt(1 - sum_c sqrt(p_c q_c)) for the true distribution p and the guessed q. Only proportions count: a guess with half as many
    labels in the right proportions is perfect.
    """

    label: ClassVar[str] = "label distribution"
    meaning: ClassVar[str] = (
        "How near the recovered distribution of the labels is to the true one (1 minus the Hellinger distance)."
    )
    higher_is_better: ClassVar[bool] = True
    level: ClassVar[Level] = "step"
    source: ClassVar[str] = "LLG (Wainakh et al. 2022, Sec. 6.1, Metrics)"

    def __call__(self, counts: LabelCounts) -> float | None:
        """Return 1 - H, 0 for an empty guess, None if the batch has no labels."""
        if not sum(counts.true):
            return None
        if not sum(counts.guess):
            return 0.0
        both = sum(math.sqrt(true * guess) for true, guess in zip(counts.true, counts.guess, strict=True))
        overlap = both / math.sqrt(sum(counts.true) * sum(counts.guess))
        return 1.0 - math.sqrt(max(0.0, 1.0 - overlap))
