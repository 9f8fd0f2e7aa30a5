"""`sentence_precision`: the share of the guessed texts that found a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakaudit.plugins import Batch, Level, is_found, metric


@metric("sentence_precision")
@dataclass(frozen=True)
class SentencePrecision:
    """Guesses whose own text has a ROUGE-L above 0.25, over all guesses.

    Each guess is assigned to at most one true text. Guesses beyond the number of texts found nothing, so an attack that returns a hundred
    guesses for a batch of ten loses here what it may gain in recall. If nothing was guessed, there is no number.
    """

    label: ClassVar[str] = "precision of texts"
    meaning: ClassVar[str] = (
        "Share of the guessed texts that found a text: ROUGE-L above a quarter, one guess for each text."
    )
    missing_because: ClassVar[str] = "the attack guessed no text, so none is right or wrong"
    needs_guess: ClassVar[bool] = True
    higher_is_better: ClassVar[bool] = True
    level: ClassVar[Level] = "batch"
    source: ClassVar[str] = "precision of recovered sentences in FILM (Gupta et al. 2022, Table 3), ROUGE-L above 0.25"

    def __call__(self, batch: Batch) -> float | None:
        """Return the precision; None if nothing was guessed or no true text has a word."""
        found = [is_found(pair.true_text, pair.guess_text) for pair in batch.pairs]
        if not batch.guesses or all(one is None for one in found):
            return None
        return sum(map(bool, found)) / batch.guesses
