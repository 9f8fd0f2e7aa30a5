"""`sentences_found`: the share of the texts that a guess resembles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakaudit.plugins import Level, Pair, is_found, metric


@metric("sentences_found")
@dataclass(frozen=True)
class SentencesFound:
    """1 if the ROUGE-L of a text is above 0.25, else 0.

    The mean is the recall of sentences in FILM's experiment with many sentences. There a guess counts for every text that it is like; here
    each guess is assigned to one text and counts for that one only.
    """

    label: ClassVar[str] = "texts resembled"
    meaning: ClassVar[str] = (
        "Share of the texts that a guess resembles: ROUGE-L above a quarter. Most words may differ."
    )
    higher_is_better: ClassVar[bool] = True
    level: ClassVar[Level] = "sequence"
    source: ClassVar[str] = "recall of recovered sentences in FILM (Gupta et al. 2022, Table 3), ROUGE-L above 0.25"

    def __call__(self, pair: Pair) -> float | None:
        """Return 1.0 or 0.0, None if the true text has no word."""
        found = is_found(pair.true_text, pair.guess_text)
        return None if found is None else float(found)
