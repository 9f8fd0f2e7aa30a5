"""The chart of a leak rate over nights.

The axis of time is true: a night without a result is a hole. The axis of rates is fixed from 0 to 100 %; it is a square root, because limits are
small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Literal

from markupsafe import Markup

from leakaudit.gate.wording import percent
from leakaudit.reports.charts import CLEAN, LATE, LEAK
from leakaudit.reports.svg import (
    AXIS_ROOM,
    BAND,
    INK,
    LETTER,
    MUTED,
    Margins,
    Tick,
    area,
    left_axis,
    line,
    lower_axis,
    middle_text,
    picture,
    symbol,
)

State = Literal["leak", "open", "clean"]

LOOKS: dict[State, tuple[str, str, bool]] = {
    "leak": ("square", LEAK, True),
    "open": ("triangle-up", LATE, False),
    "clean": ("circle", CLEAN, False),
}
"""What a night found -> shape, colour, whether the shape is filled. `open`: nothing leaked, and some steps could not be judged."""

_LEFT = 44
"""Room for the labels of the axis of rates, in pixels."""
_RIGHT = 22
"""Room on the right for the half of the last date that stands over the chart, in pixels."""
_LANE = 15
"""Height of a line of labels above the chart, in pixels."""
_MOST_LANES = 6
_CROSS = "M-1,-1L1,1M1,-1L-1,1"
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


@dataclass(frozen=True)
class NightMark:
    """One night on the chart."""

    at: datetime
    rate: float | None = None
    """Share of the steps that leaked; None if there is none."""
    state: State = "clean"
    lower: float | None = None
    upper: float | None = None
    limit: float | None = None
    gap: bool = False
    """Whether the night has no results."""
    changed: str = ""
    """What changed, in a few words; the bounds begin anew here."""
    new_version: bool = False
    worse: bool = False
    """Whether the nights up to this one are worse than the baseline."""


@dataclass(frozen=True)
class Size:
    """The room of a chart, in pixels; the axes and the labels come on top."""

    width: int
    height: int
    ticks: tuple[float, ...]
    dot: int
    """Area of the mark of a night, in square pixels."""
    words: bool = True
    """Whether breaks have names, and the chart has marks for new versions and alarms."""
    limit_room: int = 0
    """Room for the name of the limit on the right; 0 to leave it out."""


WIDE = Size(720, 190, (0, 0.01, 0.05, 0.25, 0.5, 1), dot=46, limit_room=90)
NARROW = Size(274, 190, (0, 0.01, 0.05, 0.25, 0.5, 1), dot=28)
SMALL = Size(210, 80, (0, 0.05, 0.25, 1), dot=16, words=False)


@dataclass(frozen=True)
class Label:
    """A name beside an upright line."""

    x: float
    text: str
    lane: int
    """0 is the line of labels that is nearest to the chart."""
    left: bool
    """Whether the name ends at the line; else it begins there."""

    @property
    def span(self) -> tuple[float, float]:
        """The room of the text, with a little air."""
        width = LETTER * len(self.text) + 8
        return (self.x - width, self.x - 1) if self.left else (self.x + 1, self.x + width)


def place(lines: Sequence[tuple[float, str]], width: float, *, left_room: float = 40.0) -> list[Label]:
    """Return the places of names beside upright lines.

    No two names overlap, and no line crosses a name. Names on the left part of the chart begin at their line, the others end there. A name for
    which there is no room is left out.

    Args:
        lines: place and name of each line, from left to right.
        width: of the chart.
        left_room: free room on the left of the chart.
    """
    tries = [_placed(lines, split, width, left_room) for split in range(len(lines) + 1)]
    return max(tries, key=lambda found: (len(found), -max((label.lane for label in found), default=0)))


def _placed(lines: Sequence[tuple[float, str]], split: int, width: float, left_room: float) -> list[Label]:
    # a name covers lines on its own side only, so those lines must end below it: the far end comes first
    order = [*((*line, False) for line in reversed(lines[:split])), *((*line, True) for line in lines[split:])]
    found: list[Label] = []
    for x, text, left in order:
        every = (Label(x, text, lane, left) for lane in range(_MOST_LANES))
        label = next((label for label in every if _fits(label, found)), None)
        if label is not None and label.span[0] >= -left_room and label.span[1] <= width + 8:
            found.append(label)
    return sorted(found, key=lambda label: label.x)


def _fits(new: Label, others: Sequence[Label]) -> bool:
    return not any(_hits(new, other) or _hits(other, new) for other in others)


def _hits(name: Label, line: Label) -> bool:
    """Return whether a name meets the line or the name of another label."""
    start, end = name.span
    if line.lane >= name.lane and start <= line.x <= end:
        return True
    return line.lane == name.lane and start < line.span[1] and line.span[0] < end


def trend_chart(marks: Sequence[NightMark], size: Size, period: timedelta, title: str, description: str) -> Markup:
    """Draw the leak rate of each night with the bounds over all nights so far.

    Args:
        marks: the nights, earliest first.
        size: the room.
        period: time from one night to the next.
        title: what the chart shows.
        description: what it says, in words.
    """
    half = period / 2
    axis = _NightAxis(marks[0].at - half, marks[-1].at + half, size)
    breaks = [(axis.at(mark.at - half), mark.changed) for mark in marks if mark.changed]
    names = place(breaks, size.width) if size.words else []
    below = size.height + (32 if size.words and any(mark.new_version for mark in marks) else 18)
    drawn = [
        left_axis([Tick(_height(rate, size), f"{rate:.0%}") for rate in size.ticks], size.width, size.height),
        lower_axis(axis.ticks(marks), size.width, below),
        *_gap_lines(marks, axis),
        *_bands(marks, half, axis),
        *_limits(marks, half, axis),
        *_breaks(breaks, names, size),
        *(_night(mark, axis) for mark in marks if mark.rate is not None),
        *_events(marks, axis),
    ]
    lanes = max((label.lane + 1 for label in names), default=0)
    room = Margins(_LEFT, max(10, 4 + _LANE * lanes), max(_RIGHT, size.limit_room), below - size.height + AXIS_ROOM + 4)
    return picture(drawn, (size.width, size.height), room, title, description)


@dataclass(frozen=True)
class _NightAxis:
    """The axis of time."""

    start: datetime
    end: datetime
    size: Size

    def at(self, moment: datetime) -> float:
        """Return the place of a moment, in pixels."""
        return self.size.width * ((moment - self.start) / (self.end - self.start))

    def ticks(self, marks: Sequence[NightMark]) -> list[Tick]:
        """Return the nights whose dates find room, from the last one on."""
        days = [mark.at.date() for mark in marks]
        timed = len(days) > len(set(days))
        room = LETTER * (12 if timed else 6) + 14
        shown: list[Tick] = []
        for mark in reversed(marks):
            if not shown or shown[-1].at - self.at(mark.at) >= room:
                shown.append(Tick(self.at(mark.at), _date(mark.at, timed=timed)))
        return shown[::-1]


def _date(moment: datetime, *, timed: bool) -> str:
    """Return the day in UTC, in English in every locale."""
    there = moment.astimezone(UTC)
    day = f"{there.day} {_MONTHS[there.month - 1]}"
    return f"{day} {there:%H:%M}" if timed else day


def _height(rate: float, size: Size) -> float:
    """Return the height of a rate in the frame; the axis is a square root."""
    return size.height * (1 - math.sqrt(rate))


def _parts(marks: Sequence[NightMark]) -> list[int]:
    """Return the number of the band of each night.

    A band ends at a break and where a night has no bounds.
    """
    parts, part = [], 0
    for mark in marks:
        part += bool(mark.changed or mark.upper is None)
        parts.append(part)
        part += mark.upper is None
    return parts


def _gap_lines(marks: Sequence[NightMark], axis: _NightAxis) -> list[str]:
    places = [axis.at(mark.at) for mark in marks if mark.gap]
    return [line((x, 0), (x, axis.size.height), BAND, dash="2,3") for x in places]


def _bands(marks: Sequence[NightMark], half: timedelta, axis: _NightAxis) -> list[str]:
    """Return the bounds as steps: each holds for its whole night."""
    found = []
    numbered = zip(_parts(marks), marks, strict=True)
    for _, part in groupby(numbered, key=lambda one: one[0]):
        upper: list[tuple[float, float]] = []
        lower: list[tuple[float, float]] = []
        for _, mark in part:
            if mark.upper is not None:
                for x in (axis.at(mark.at - half), axis.at(mark.at + half)):
                    upper.append((x, _height(mark.upper, axis.size)))
                    lower.append((x, _height(mark.lower or 0.0, axis.size)))
        found += [area([*upper, *reversed(lower)], BAND)] if upper else []
    return found


def _limits(marks: Sequence[NightMark], half: timedelta, axis: _NightAxis) -> list[str]:
    """Return a dashed line for each stretch of nights with the same limit."""
    found: list[tuple[datetime, datetime, float]] = []
    known = None
    for mark in marks:
        known = mark.limit if mark.rate is not None or mark.limit is not None else known
        if known is None:
            continue
        start, end = mark.at - half, mark.at + half
        if found and found[-1][1:] == (start, known):
            found[-1] = (found[-1][0], end, known)
        else:
            found.append((start, end, known))
    size = axis.size
    drawn = []
    for start, end, limit in found:
        y = _height(limit, size)
        drawn.append(line((axis.at(start), y), (axis.at(end), y), INK, 1.5, "6,3"))
    if size.limit_room and known is not None:
        drawn.append(middle_text(f"limit {percent(known)}", (size.width + 6, _height(known, size))))
    return drawn


def _breaks(lines: Sequence[tuple[float, str]], names: Sequence[Label], size: Size) -> list[str]:
    """Return an upright line for each break.

    Its name stands above the chart if there is room.
    """
    tops = {label.x: -_LANE * (label.lane + 1) + 3 for label in names}
    drawn = [line((x, tops.get(x, 0)), (x, size.height), MUTED, 1.25) for x, _ in lines]
    for label in names:
        x = label.x - 4 if label.left else label.x + 4
        drawn.append(middle_text(label.text, (x, -_LANE * label.lane - 8), "end" if label.left else "start"))
    return drawn


def _night(night: NightMark, axis: _NightAxis) -> str:
    assert night.rate is not None  # a night without a rate is a hole
    shape, colour, filled = LOOKS[night.state]
    place = axis.at(night.at), _height(night.rate, axis.size)
    return symbol(shape, axis.size.dot, place, fill=colour if filled else None, stroke=colour)


def _events(marks: Sequence[NightMark], axis: _NightAxis) -> list[str]:
    """Return the marks below the chart: gaps, alarms and new versions."""
    size = axis.size
    drawn = []
    for night in marks:
        x = axis.at(night.at)
        if night.gap:
            drawn.append(symbol(_CROSS, size.dot, (x, size.height + 11), fill=None, stroke=MUTED))
        if night.worse and size.words:
            drawn.append(symbol("triangle-down", size.dot, (x, size.height + 11), fill=LEAK, stroke=LEAK))
        if night.new_version and size.words:
            drawn.append(symbol("diamond", size.dot, (x, size.height + 25), fill=INK, stroke=INK))
    return drawn
