"""`nerr_f1`: agreement of the named entities of guess and true text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakaudit.plugins import Level, Pair, metric, same_entity


@metric("nerr_f1")
@dataclass(frozen=True)
class NamedEntityAgreement:
    """F1 of the named entities that one tagger finds in both texts, as sets.

    This is what FILM's released code prints as the named entity recovery ratio. It is 0 if the guess has no entity. The code also gives 0
    to a true text without entities; here such a text has no number, because a perfect guess of it would score 0 as well. Unlike the
    code, case, accents and spaces do not count, because tokenizers change them.

    Attempts have this score only if `AuditConfig.entity_tagger` names a tagger: entities in the data say nothing about a guess.
    """

    label: ClassVar[str] = "named entities (F1)"
    meaning: ClassVar[str] = "Agreement of the names, places and the like that a tagger finds in guess and true text."
    missing_because: ClassVar[str] = "no entity tagger is named, or it found no entity in the true texts"
    higher_is_better: ClassVar[bool] = True
    level: ClassVar[Level] = "sequence"
    source: ClassVar[str] = "NERR as the released code of FILM computes it (Gupta et al. 2022, eval_utils.py)"

    def __call__(self, pair: Pair) -> float | None:
        """Return F1; None if no tagger found an entity in the true text."""
        if pair.tagged is None or not (true := set(map(same_entity, pair.tagged.true)) - {()}):
            return None
        guess = set(map(same_entity, pair.tagged.guess)) - {()}
        return 2 * len(true & guess) / (len(true) + len(guess))
