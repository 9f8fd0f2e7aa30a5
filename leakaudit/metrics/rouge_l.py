"""`rougeL`: F-measure of the longest common subsequence of words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakaudit.plugins import ROUGE_SOURCE, Level, Pair, metric, rouge_f


@metric("rougeL")
@dataclass(frozen=True)
class RougeL:
    """F-measure of the longest common subsequence of words."""

    label: ClassVar[str] = "ROUGE-L"
    meaning: ClassVar[str] = "Overlap of recovered and true text in the longest common sequence of words; 1 is all."
    higher_is_better: ClassVar[bool] = True
    level: ClassVar[Level] = "sequence"
    source: ClassVar[str] = ROUGE_SOURCE

    def __call__(self, pair: Pair) -> float | None:
        """Return ROUGE-L F, None if the true text has no word."""
        return rouge_f("rougeL", pair.true_text, pair.guess_text)
