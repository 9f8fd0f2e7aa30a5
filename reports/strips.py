"""Strips, which show the recovered sixteenths of a text as bars or in words."""

from __future__ import annotations

from itertools import groupby


def strip_in_words(strip: str) -> str:
    """Return a strip in words, for people who use a screen reader."""
    whole, none = sum(cell in "4d" for cell in strip), strip.count("0")
    order = sum(cell in "1234" for cell in strip)
    return (
        f"of {len(strip)} equal parts of the text {whole} came back, {len(strip) - whole - none} in part, {none} not; "
        f"{order} of them in order"
    )


_BARS = "▁▂▄▆█"


def strip_runs(strip: str) -> list[tuple[str, str]]:
    """Return a strip as pairs (kind, bars), one for each run of the same kind.

    The kind is `b` for recovered in order, `u` for recovered without order, and `.` for not recovered.
    """
    return [(kind, "".join(map(_bar, cells))) for kind, cells in groupby(strip, key=_kind)]


def _kind(cell: str) -> str:
    return "." if cell == "0" else "b" if cell.isdigit() else "u"


def _bar(cell: str) -> str:
    return _BARS[int(cell) if cell.isdigit() else " abcd".index(cell)]
