"""`rouge1`: F-measure of words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakaudit.plugins import ROUGE_SOURCE, Level, Pair, metric, rouge_f


@metric("rouge1")
@dataclass(frozen=True)
class Rouge1:
    """F-measure of words, in any order."""

    label: ClassVar[str] = "ROUGE-1"
    meaning: ClassVar[str] = "Overlap of recovered and true text in words; 1 is all."
    higher_is_better: ClassVar[bool] = True
    level: ClassVar[Level] = "sequence"
    source: ClassVar[str] = ROUGE_SOURCE

    def __call__(self, pair: Pair) -> float | None:
        """Return ROUGE-1 F, None if the true text has no word."""
        return rouge_f("rouge1", pair.true_text, pair.guess_text)
