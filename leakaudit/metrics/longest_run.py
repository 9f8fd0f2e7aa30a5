"""`longest_run`: the longest run of consecutive tokens that was recovered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakaudit.plugins import Level, Pair, longest_common_run, metric


@metric("longest_run")
@dataclass(frozen=True)
class LongestRun:
    """Longest run of true tokens in the guess, as a share of the true sequence."""

    label: ClassVar[str] = "longest run"
    meaning: ClassVar[str] = (
        "Longest run of consecutive true tokens in the recovered text, as a share of the true text."
    )
    higher_is_better: ClassVar[bool] = True
    level: ClassVar[Level] = "sequence"
    source: ClassVar[str] = "longest common substring, on token ids; our choice of what a reader would call a quote"

    def __call__(self, pair: Pair) -> float | None:
        """Return the share; None if the true sequence holds special tokens only."""
        if not pair.true_ids:
            return None
        return longest_common_run(pair.true_ids, pair.guess_ids) / len(pair.true_ids)
