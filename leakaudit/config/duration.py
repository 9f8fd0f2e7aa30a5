"""Lengths of time as a person writes them: `7d`, `12h`, `30m`, `90s`, `1.5h`."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

MAX_LENGTH = timedelta(days=999_999)
"""Longest accepted time. Our choice: 2,700 years, because a date that far ahead can still be written."""

_FORM = re.compile(r"([0-9]+(?:\.[0-9]+)?)([dhms])")
_UNITS = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}


def length_of(text: str) -> timedelta:
    """Read a length of time.

    Raises:
        ValueError: the text is not a number with a unit, or the time is longer than `MAX_LENGTH`.

    >>> length_of("1.5h")
    datetime.timedelta(seconds=5400)
    """
    found = _FORM.fullmatch(text)
    if found is None:
        raise ValueError(f"{_short(text)} is not a length of time; write a number and d, h, m or s, such as 7d")
    try:
        length = timedelta(**{_UNITS[found[2]]: float(found[1])})
    except OverflowError:
        length = timedelta.max
    if length > MAX_LENGTH:
        raise ValueError(f"{_short(text)} is too long; the longest is {MAX_LENGTH.days}d")
    return length


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")


def _more_than_nothing(text: str) -> str:
    if not length_of(text):
        raise ValueError(f"{text!r} is not above zero; write a number above 0 and d, h, m or s, such as 7d")
    return text


def _has_a_unit(value: Any) -> Any:
    if type(value) in (int, float):
        raise ValueError(f"{value:g} has no unit; write a number and d, h, m or s, such as {value:g}d")
    return value


Duration = Annotated[str, BeforeValidator(_has_a_unit), AfterValidator(_more_than_nothing)]
"""A length of time above zero in a YAML file, kept as it was written; `length_of` reads it."""
