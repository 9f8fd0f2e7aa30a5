"""`best_rl`: the ROUGE-L of the text of a batch that was recovered best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakaudit.plugins import ROUGE_SOURCE, Batch, Level, metric, rouge_f


@metric("best_rl")
@dataclass(frozen=True)
class BestRougeL:
    """The largest ROUGE-L of a batch, over pairs of a true text and its guess.

    One recovered sentence of 128 hardly changes a mean, and it is a leak. FILM's tables give such best-of-batch scores. Its code takes the
    maximum over all guesses and all true texts; here each guess is first assigned to one text, so the number is at most as high.

    The best of many unrelated pairs is above 0, and it grows with the batch.
    """

    label: ClassVar[str] = "best ROUGE-L of a batch"
    meaning: ClassVar[str] = (
        "ROUGE-L of the text of a batch that was recovered best; with unrelated guesses it grows with the batch."
    )
    higher_is_better: ClassVar[bool] = True
    level: ClassVar[Level] = "batch"
    source: ClassVar[str] = f"best recovered sentence of FILM (Gupta et al. 2022, Sec. 6.2); ROUGE as in {ROUGE_SOURCE}"

    def __call__(self, batch: Batch) -> float | None:
        """Return the largest ROUGE-L F, None if no true text has a word."""
        overlaps = [rouge_f("rougeL", pair.true_text, pair.guess_text) for pair in batch.pairs]
        return max((overlap for overlap in overlaps if overlap is not None), default=None)
