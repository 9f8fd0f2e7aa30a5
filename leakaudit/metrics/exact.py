"""`exact`: whether every token of a sequence was recovered in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakaudit.plugins import Level, Pair, metric


@metric("exact")
@dataclass(frozen=True)
class Exact:
    """1 if the token ids are the same, else 0.

    Special and padding tokens do not count. The mean is the exact-match rate.
    """

    label: ClassVar[str] = "exact-match rate"
    meaning: ClassVar[str] = "Share of the texts that were recovered with every token in its place."
    higher_is_better: ClassVar[bool] = True
    level: ClassVar[Level] = "sequence"
    source: ClassVar[str] = "our definition; on ids, so that no tokenizer's spacing decides"

    def __call__(self, pair: Pair) -> float | None:
        """Return 1.0 or 0.0; None if the true sequence holds special tokens only."""
        return float(pair.true_ids == pair.guess_ids) if pair.true_ids else None
