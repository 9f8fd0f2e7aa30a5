"""Numbers in plain English: counts with their nouns, ordinals, lengths of time."""

from __future__ import annotations


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun.

    >>> counted(1, "step"), counted(2, "step"), counted(2, "batch", "batches")
    ('1 step', '2 steps', '2 batches')
    """
    return f"{number} {one}" if number == 1 else f"{number} {many or one + 's'}"


def ordinal(number: int) -> str:
    """Return a number as a place in order.

    >>> [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 20, 101)]
    ['1st', '2nd', '3rd', '4th', '11th', '12th', '20th', '101st']
    """
    teens = number % 100 in (11, 12, 13)
    return f"{number}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def duration(seconds: float) -> str:
    """Return a length of time, as precise as an estimate is.

    >>> [duration(s) for s in (4, 50, 89, 3600, 13200, 190000)]
    ['4 s', '50 s', '1 min', '1 h', '3 h 40 min', '2 d 5 h']
    """
    if round(seconds) < 60:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours} h" if hours else f"{days} d"
