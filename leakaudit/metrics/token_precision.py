"""`token_precision`: the share of the guessed tokens that are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from leakaudit.plugins import Level, Pair, clipped_overlap, metric


@metric("token_precision")
@dataclass(frozen=True)
class TokenPrecision:
    """Guessed tokens that the true sequence has, over all guessed tokens.

    A token counts no more often than it occurs in both sequences; the order does not matter. A guess of all words has full recall, but
    its precision is low. If nothing was guessed, there is no number, because nothing is right or wrong. Attacks that guess a bag of
    tokens are scored by `bag_precision` instead.
    """

    label: ClassVar[str] = "token precision"
    meaning: ClassVar[str] = (
        "Share of the recovered tokens that are right. A guess of every word has full recall and no precision."
    )
    needs_guess: ClassVar[bool] = True
    higher_is_better: ClassVar[bool] = True
    level: ClassVar[Level] = "sequence"
    source: ClassVar[str] = "precision of FILM (Gupta et al. 2022, Sec. 6.3), here with counts"

    def __call__(self, pair: Pair) -> float | None:
        """Return the precision.

        None if the true sequence holds special tokens only, or nothing was guessed.
        """
        if not pair.true_ids or not pair.guess_ids:
            return None
        return clipped_overlap(pair.true_ids, pair.guess_ids) / len(pair.guess_ids)


def bag_precision(true_ids: Sequence[int], bag: Sequence[int]) -> float | None:
    """Return the share of the distinct tokens of a bag that the batch holds.

    None for an empty bag.

    Source: FILM (Gupta et al. 2022, Sec. 6.3), precision of the set S* against S.

    Args:
        true_ids: tokens of all sequences of the batch.
        bag: token ids that an attack named.

    >>> bag_precision([4, 4, 8], [4, 5, 6, 7])
    0.25
    """
    named = set(bag)
    return len(named & set(true_ids)) / len(named) if named else None
