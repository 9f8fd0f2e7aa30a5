"""`rouge2`: F-measure of pairs of neighbouring words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakaudit.plugins import ROUGE_SOURCE, Level, Pair, metric, rouge_f


@metric("rouge2")
@dataclass(frozen=True)
class Rouge2:
    """F-measure of pairs of neighbouring words."""

    label: ClassVar[str] = "ROUGE-2"
    meaning: ClassVar[str] = "Overlap of recovered and true text in pairs of neighbouring words; 1 is all."
    higher_is_better: ClassVar[bool] = True
    level: ClassVar[Level] = "sequence"
    source: ClassVar[str] = ROUGE_SOURCE

    def __call__(self, pair: Pair) -> float | None:
        """Return ROUGE-2 F, None if the true text has fewer than two words."""
        return rouge_f("rouge2", pair.true_text, pair.guess_text)
