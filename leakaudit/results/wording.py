"""Numbers in plain English: counts, ordinals, lengths of time, sizes.

The short forms such as `3 h 40 min` are our own, because `humanize` has none.
"""

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
    import humanize

    return humanize.ordinal(number)


def duration(seconds: float) -> str:
    """Return an estimated length of time in its two largest units.

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


def short_duration(seconds: float) -> str:
    """Return a length of time in its largest unit, for a table.

    >>> [short_duration(s) for s in (4, 90, 13200, 190000)]
    ['4 s', '2 min', '4 h', '2 d']
    """
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def size_on_disk(size: int) -> str:
    """Return a number of bytes in MB or GB (10^6, 10^9), for a table.

    >>> size_on_disk(400_000), size_on_disk(12_300_000), size_on_disk(5_000_000_000)
    ('0.4 MB', '12.3 MB', '5.0 GB')
    """
    return f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.1f} GB"
