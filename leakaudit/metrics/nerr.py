"""`nerr`: the share of a text's named entities that were recovered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from leakaudit.plugins import Level, Pair, entities_held, entities_in_bag, metric


@metric("nerr")
@dataclass(frozen=True)
class NamedEntityRecovery:
    """Named entities of the true text that the guess holds, each counted once.

    This is the named entity recovery ratio as FILM's paper defines it: a recall. An entity counts as recovered if the guess holds all
    its words, in order and next to each other. Case, accents and spaces do not count, because tokenizers change them.

    The entities come from the data or, if it names none, from an entity tagger. An entity that was cut off with the end of its text does
    not count. Attacks that guess a bag of tokens are scored by `bag_nerr` instead.
    """

    label: ClassVar[str] = "named entities"
    meaning: ClassVar[str] = (
        "Share of the names, places, organisations and the like in a text that were recovered whole."
    )
    missing_because: ClassVar[str] = (
        "no named entity of the batch is known: the data names none, and no tagger found one"
    )
    higher_is_better: ClassVar[bool] = True
    level: ClassVar[Level] = "sequence"
    source: ClassVar[str] = "named entity recovery ratio (NERR) of FILM (Gupta et al. 2022, Sec. 6.1)"

    def __call__(self, pair: Pair) -> float | None:
        """Return the recall; None if no named entity of the true text is known."""
        known = entities_held(pair.entities or (), pair.true_text)
        return len(entities_held(pair.entities or (), pair.guess_text) & known) / len(known) if known else None


def bag_nerr(pair: Pair, bag: Sequence[int], decode: Callable[[Sequence[int]], str]) -> float | None:
    """Return the share of a text's named entities of which a bag names every piece.

    A bag has no order, so that a name's pieces need not stand together; a bag of all words has all names, as it has a token recall of 1.
    None if no named entity of the true text is known. Own definition.

    Args:
        pair: the true text; its guess is not read.
        bag: token ids.
        decode: function from token ids to text.
    """
    known = entities_held(pair.entities or (), pair.true_text)
    return len(entities_in_bag(pair.entities or (), pair.true_ids, bag, decode) & known) / len(known) if known else None
