"""Ranges instead of exact lengths, for whatever leaves an audit."""

from __future__ import annotations

import math
import re
from functools import lru_cache

STARTS = (1, 2, *(2**power + 1 for power in range(1, 30)))
"""First lengths of the ranges."""

_RANGE = re.compile(r"(0|[1-9][0-9]{0,8})(?:-([1-9][0-9]{0,8}))?")

_NUMBER = re.compile(r"(?<![\w.])(?:(\d+)-(\d+)|\d+(?:,\d{3})*(?:\.\d+)?(?:[eE][+-]?\d+)?)(?!\.?\w)")
"""A range, or a number by itself: no part of a name such as `layer.3.weight`, and of no version."""


def bucket(count: int) -> str:
    """Return the range between powers of two that contains a count.

    >>> bucket(1), bucket(9), bucket(16), bucket(17)
    ('1', '9-16', '9-16', '17-32')
    """
    if count <= 1:
        return str(count)
    top = 1 << (count - 1).bit_length()
    return f"{top // 2 + 1}-{top}" if top > 2 else "2"


def without_counts(sentence: str) -> str:
    """Return a sentence whose numbers above 1 are ranges between powers of two.

    What an attack says of a batch may count its tokens. Every number is replaced, because only the attack knows what it counts.

    >>> without_counts("none among 12: all 1,234 of 2 in layer.3.weight, 0.25 apart, 12.5 a text, 9-16 words")
    'none among 9-16: all 1025-2048 of 2 in layer.3.weight, 0.25 apart, 9-16 a text, 9-16 words'
    """
    return _NUMBER.sub(_ranged, sentence)


def _ranged(found: re.Match[str]) -> str:
    written, low, high = found[0], found[1], found[2]
    if high is not None:
        return written if written == bucket(int(high)) else f"{bucket(int(low))} to {bucket(int(high))}"
    value = float(written.replace(",", ""))
    return bucket(math.ceil(value)) if 1 < value < math.inf else written


@lru_cache(1024)
def bounds_of(written: str) -> tuple[int, int] | None:
    """Return the ends of a range such as `9-16`; None if the text is not a range.

    Ranges end at powers of two; see `bucket`.

    >>> bounds_of("9-16"), bounds_of("2"), bounds_of("9-15")
    ((9, 16), (2, 2), None)
    """
    found = _RANGE.fullmatch(written)
    if found is None:
        return None
    low, high = int(found[1]), int(found[2] or found[1])
    single = found[2] is None and low <= 2
    double = found[2] is not None and high > 2 and high.bit_count() == 1 and low == high // 2 + 1
    return (low, high) if single or double else None
