"""`masked_token_recall`: the share of the masked words that were recovered.

A masked word is one that a mask hid from the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from leakaudit.plugins import Level, Pair, metric


@metric("masked_token_recall")
@dataclass(frozen=True)
class MaskedTokenRecall:
    """Masked tokens that the guess has beyond the visible ones.

    A masked language model has to predict the masked tokens, so they are in its loss and not in its input. A token counts no more often
    than it is masked and guessed. Visible tokens of the true sequence are first removed from the guess, because they say nothing about
    masked tokens. Attacks that guess a bag of tokens are scored by `masked_bag_recall` instead.
    """

    label: ClassVar[str] = "recall of masked words"
    meaning: ClassVar[str] = "Share of the words hidden by a mask that were recovered."
    missing_because: ClassVar[str] = "no token of the batch was masked"
    higher_is_better: ClassVar[bool] = True
    level: ClassVar[Level] = "sequence"
    source: ClassVar[str] = "our definition; `token_recall` over the masked tokens alone"

    def __call__(self, pair: Pair) -> float | None:
        """Return the recall, None if nothing of the true sequence was masked."""
        if not pair.masked_ids:
            return None
        visible = Counter(pair.true_ids) - Counter(pair.masked_ids)
        beyond = Counter(pair.guess_ids) - visible
        return (Counter(pair.masked_ids) & beyond).total() / len(pair.masked_ids)


def masked_bag_recall(masked_ids: Sequence[int], visible_ids: Sequence[int], bag: Sequence[int]) -> float | None:
    """Return the share of distinct masked tokens that a bag names.

    Only tokens that are visible nowhere in the batch count. Return None if there is no such token.

    Args:
        masked_ids: masked tokens of all sequences of the batch.
        visible_ids: all other tokens of the batch.
        bag: token ids that an attack named.

    >>> masked_bag_recall([4, 8], [4, 5], [5, 8])
    1.0
    """
    hidden = set(masked_ids) - set(visible_ids)
    return len(hidden & set(bag)) / len(hidden) if hidden else None
