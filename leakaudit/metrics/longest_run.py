"""`longest_run`: the longest stretch of a sequence that came back in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import ClassVar, Literal

from leakaudit.plugins.metric_protocol import Pair
from leakaudit.registry import metric


def longest_common_run(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest run of consecutive tokens that both sequences have.

    >>> longest_common_run([1, 2, 3, 4], [9, 2, 3, 8, 4])
    2
    """
    matcher = SequenceMatcher(a=first, b=second, autojunk=False)
    return matcher.find_longest_match().size


@metric("longest_run")
@dataclass(frozen=True)
class LongestRun:
    """Longest run of consecutive true tokens in the guess, as a share of the true sequence."""

    label: ClassVar[str] = "longest run"
    meaning: ClassVar[str] = (
        "Longest run of consecutive true tokens in the recovered text, as a share of the true text."
    )
    higher_is_better: ClassVar[bool] = True
    level: ClassVar[Literal["sequence", "step"]] = "sequence"
    source: ClassVar[str] = "longest common substring, on token ids; our choice of what a reader would call a quote"

    def __call__(self, pair: Pair) -> float | None:
        """Return the share, None if the true sequence holds nothing but special tokens."""
        if not pair.true_ids:
            return None
        return longest_common_run(pair.true_ids, pair.guess_ids) / len(pair.true_ids)
