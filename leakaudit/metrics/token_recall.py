"""`token_recall`: the share of the true tokens that were recovered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from leakaudit.plugins import Level, Pair, clipped_overlap, metric


@metric("token_recall")
@dataclass(frozen=True)
class TokenRecall:
    """Tokens of the true sequence that the guess has, in any order.

    A token counts no more often than it occurs in both sequences. Attacks that guess a bag of tokens are scored by `bag_recall` instead,
    because a bag does not say how often a token occurs.
    """

    label: ClassVar[str] = "token recall"
    meaning: ClassVar[str] = "Share of the true tokens that were recovered, in any order."
    higher_is_better: ClassVar[bool] = True
    level: ClassVar[Level] = "sequence"
    source: ClassVar[str] = "recall of FILM (Gupta et al. 2022, Sec. 6.3), here with counts"

    def __call__(self, pair: Pair) -> float | None:
        """Return the recall; None if the true sequence holds special tokens only."""
        if not pair.true_ids:
            return None
        return clipped_overlap(pair.true_ids, pair.guess_ids) / len(pair.true_ids)


def bag_recall(true_ids: Sequence[int], bag: Sequence[int]) -> float | None:
    """Return the share of the distinct true tokens that a bag names.

    None if there are no true tokens.

    Source: FILM (Gupta et al. 2022, Sec. 6.3), recall of the set S* against S.

    >>> bag_recall([4, 4, 8], [4, 5])
    0.5
    """
    distinct = set(true_ids)
    return len(distinct & set(bag)) / len(distinct) if distinct else None
