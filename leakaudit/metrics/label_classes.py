"""`label_classes`: how well each class was counted, rare or frequent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakaudit.plugins import LabelCounts, Level, metric


@metric("label_classes")
@dataclass(frozen=True)
class LabelClasses:
    """1 - the mean over classes of |true - guessed| / max(true, guessed).

    Every class has the same weight. Classes that occur neither in the batch nor in the guess are left out. Otherwise a guess would score
    better the more classes there are.
    """

    label: ClassVar[str] = "label accuracy by class"
    meaning: ClassVar[str] = (
        "How well the number of examples of each class was recovered, every class counting the same; 1 is all."
    )
    higher_is_better: ClassVar[bool] = True
    level: ClassVar[Level] = "step"
    source: ClassVar[str] = "ours; per-class error, weighed by class where `label_accuracy` weighs by label"

    def __call__(self, counts: LabelCounts) -> float | None:
        """Return the number, None if the batch has no labels."""
        if not sum(counts.true):
            return None
        pairs = [(t, g) for t, g in zip(counts.true, counts.guess, strict=True) if t or g]
        return 1.0 - sum(abs(true - guess) / max(true, guess) for true, guess in pairs) / len(pairs)
