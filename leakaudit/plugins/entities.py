"""Named entities of texts: when two are the same, and which a text holds.

A tokenizer changes spaces, and many remove case and accents. Entities are therefore compared by their words and marks alone.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence

_PIECES = re.compile(r"\w+|[^\w\s]")
"""Words and single marks. Spaces are left out, because a tokenizer may write `12-B` as `12 - B`."""


def same_entity(text: str) -> tuple[str, ...]:
    r"""Return the form of an entity that is equal for all its spellings.

    >>> same_entity("Zo\u00eb Smith-Jones") == same_entity("zoe smith - jones")
    True
    """
    plain = "".join(sign for sign in unicodedata.normalize("NFKD", text) if not unicodedata.combining(sign))
    return tuple(_PIECES.findall(plain.casefold()))


def entities_held(entities: Iterable[str], text: str) -> frozenset[tuple[str, ...]]:
    """Return the entities that occur in a text as whole words, in one form each.

    An entity without a word or a mark is left out.

    >>> len(entities_held(["Ann", "Ann Lee", "Bo"], "ann lee met anna"))
    2
    """
    pieces = same_entity(text)
    asked = {same_entity(entity) for entity in entities} - {()}
    return frozenset(one for one in asked if _contains(pieces, one))


def _contains(pieces: tuple[str, ...], part: tuple[str, ...]) -> bool:
    return any(pieces[start : start + len(part)] == part for start in range(len(pieces) - len(part) + 1))


def entities_in_bag(
    entities: Iterable[str], ids: Sequence[int], bag: Iterable[int], decode: Callable[[Sequence[int]], str]
) -> frozenset[tuple[str, ...]]:
    """Return the entities of a text of which a bag of tokens has every piece.

    A piece is a token of one place at which the text holds the entity, as its tokenizer cut it there.

    Args:
        entities: as the data spells them.
        ids: (T,) tokens of the text.
        bag: token ids.
        decode: function from token ids to text.
    """
    whole = same_entity(decode(ids))
    # A cut between two tokens is a cut between two pieces if both sides have the pieces of the whole.
    cuts = {
        cut: len(before)
        for cut in range(len(ids) + 1)
        if (before := same_entity(decode(ids[:cut]))) + same_entity(decode(ids[cut:])) == whole
    }
    known = set(bag)

    def named(first: int, end: int) -> bool:
        start = max(cut for cut, pieces in cuts.items() if pieces <= first)
        stop = min(cut for cut, pieces in cuts.items() if pieces >= end)
        return known.issuperset(ids[start:stop])

    asked = {same_entity(entity) for entity in entities} - {()}
    return frozenset(
        one
        for one in asked
        if any(whole[first : first + len(one)] == one and named(first, first + len(one)) for first in range(len(whole)))
    )
