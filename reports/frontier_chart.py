"""The chart of what each defence costs the model against what leaks under it.

The horizontal axis is the loss of utility in the metric's own units, so worse is to the right. The vertical axis is the leak rate from 0 to
100 %; it is a square root, because limits are small. The best place is the lower left corner.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

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
    polyline,
    symbol,
    text,
)

State = Literal["passes", "fails", "open", "none"]

LOOKS: dict[State, tuple[str, str]] = {
    "passes": ("circle", CLEAN),
    "fails": ("square", LEAK),
    "open": ("triangle-up", LATE),
    "none": ("diamond", INK),
}
"""What the verdict under a defence would be -> shape and colour. `open`: undecided. `none`: the training without a defence."""

_LEFT = 44
"""Room for the labels of the axis of rates, in pixels."""
_LIMIT_ROOM = 90
"""Room for the name of the limit on the right, in pixels."""
_REACH = 7
"""From the middle of a mark to where a bar begins, in pixels: bars do not cross hollow marks."""
_CAP = 3
"""Half the length of the end of a bar, in pixels."""
_ROW = 13
"""Height of a name, in pixels."""
_TOP = 26
"""Room above the frame for the names of marks at 100 %, in pixels."""
_APART, _MOST_APART = 5, 4
"""How far bars at the same height stand apart, in pixels, and at most how many steps of it a mark is moved. Our choice: 20 pixels keep a mark
near its place, and the table has the numbers."""


@dataclass(frozen=True)
class FrontierPoint:
    """One defence on the chart."""

    label: str
    """Short name beside the mark, such as the number of its row in the table."""
    lost: float
    """How much worse the model is, in the units of the axis."""
    within: tuple[float, float] | None
    """95 % interval of `lost`; None if there is none."""
    upper: float
    """Upper bound of the leak rate; the mark stands here."""
    lower: float | None
    """Lower bound of the leak rate."""
    state: State
    family: str = ""
    """A line connects neighbouring points of one family; empty for none."""
    dominated: bool = False
    """Whether another point is as good in both and better in one; the mark is hollow."""
    chosen: bool = False
    """Whether it is the cheapest that passes; its name is bold."""


@dataclass(frozen=True)
class FrontierSize:
    """The room of the chart, in pixels; the axes and their titles come on top."""

    width: int
    height: int
    ticks: int
    """About how many ticks the horizontal axis has."""
    limit_room: int = 0
    """Room for the name of the limit on the right; 0 to leave it out."""


BROAD = FrontierSize(660, 300, 7, _LIMIT_ROOM)
SLIM = FrontierSize(268, 270, 4)
_RATES = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1)


def dominated(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Return for each point whether another one is as good in both and better in one.

    Args:
        points: (loss of utility, upper bound of the leak rate) of each; less is better.

    >>> dominated([(0.0, 1.0), (0.1, 0.05), (0.2, 0.05), (0.1, 0.05)])
    [False, False, True, False]
    """
    return [any(other != one and other[0] <= one[0] and other[1] <= one[1] for other in points) for one in points]


def frontier_chart(
    points: Sequence[FrontierPoint], limit: float | None, axis: str, size: FrontierSize, title: str, description: str
) -> Markup:
    """Draw defences by the loss of utility and the upper bound of the leak rate.

    Args:
        points: at least one; neighbours of one family are connected in this order.
        limit: largest leak rate that the policy allows; None if it limits none.
        axis: title of the horizontal axis.
        size: the room.
        title: what the chart shows.
        description: what it says, in words.
    """
    scale = _Scale.of(points, size)
    places = _apart(points, scale, limit)
    drawn = [
        *(_region(limit, size) if limit is not None else ()),
        left_axis([Tick(_height(rate, size), f"{rate:.0%}") for rate in _RATES], size.width, size.height),
        lower_axis(scale.ticks(), size.width, size.height, axis),
        line((scale.x(0.0), 0), (scale.x(0.0), size.height), MUTED, 1, "2,3"),
        *_limit_line(limit, size),
        *_families(points, places),
        *(bar for point, place in zip(points, places, strict=True) for bar in _bars(point, place, scale)),
        *(_mark(point, place) for point, place in zip(points, places, strict=True)),
        *_names(points, places, scale, limit),
    ]
    room = Margins(_LEFT, _TOP, max(14, size.limit_room), 2 * AXIS_ROOM + 4)
    return picture(drawn, (size.width, size.height), room, title, description)


@dataclass(frozen=True)
class _Scale:
    """The horizontal axis: the loss of utility, with zero always in it."""

    start: float
    end: float
    size: FrontierSize

    @classmethod
    def of(cls, points: Sequence[FrontierPoint], size: FrontierSize) -> _Scale:
        ends = [0.0, *(end for point in points for end in (point.lost, *(point.within or ())))]
        low, high = min(ends), max(ends)
        pad = 0.06 * (high - low) or 1.0
        return cls(low - pad, high + pad, size)

    def x(self, lost: float) -> float:
        """Return the place of a loss, in pixels."""
        return self.size.width * (lost - self.start) / (self.end - self.start)

    def place(self, point: FrontierPoint) -> tuple[float, float]:
        """Return the middle of a mark, in pixels."""
        return self.x(point.lost), _height(point.upper, self.size)

    def ticks(self) -> list[Tick]:
        """Return ticks at round numbers: 1, 2 or 5 times a power of ten apart."""
        least = (self.end - self.start) / self.size.ticks
        power = 10.0 ** math.floor(math.log10(least))
        gap = next(step * power for step in (1, 2, 5, 10) if step * power >= least)
        first, last = math.ceil(self.start / gap), math.floor(self.end / gap)
        return [Tick(self.x(n * gap), f"{n * gap:.6g}") for n in range(first, last + 1)]


def _height(rate: float, size: FrontierSize) -> float:
    return size.height * (1 - math.sqrt(rate))


def _region(limit: float, size: FrontierSize) -> list[str]:
    """Return the area in which a leak rate is within the policy."""
    y = _height(limit, size)
    return [area([(0, y), (size.width, y), (size.width, size.height), (0, size.height)], BAND)]


def _limit_line(limit: float | None, size: FrontierSize) -> list[str]:
    if limit is None:
        return []
    y = _height(limit, size)
    name = [middle_text(f"limit {percent(limit)}", (size.width + 6, y))] if size.limit_room else []
    return [line((0, y), (size.width, y), INK, 1.5, "6,3"), *name]


def _families(points: Sequence[FrontierPoint], places: Sequence[tuple[float, float]]) -> list[str]:
    """Return a line for each family of two points or more."""
    both = zip(points, places, strict=True)
    groups = [(family, [place for _, place in group]) for family, group in groupby(both, key=lambda one: one[0].family)]
    return [polyline(group, MUTED) for family, group in groups if family and len(group) > 1]


def _apart(points: Sequence[FrontierPoint], scale: _Scale, limit: float | None) -> list[tuple[float, float]]:
    """Return the places of the marks.

    Marks whose bars would cover each other are moved up or down a little. None is moved over the limit: those within it move down, the others up, or down at the upper end of the frame.
    """
    taken: list[_Box] = []
    found = []
    for point in points:
        x, y = scale.place(point)
        ends = [scale.x(end) for end in point.within or (point.lost,)]
        down = (limit is not None and point.upper <= limit) or y < _APART * _MOST_APART
        tries = [y + (_APART if down else -_APART) * turn for turn in range(_MOST_APART + 1)]
        boxes = [_Box(min(*ends, x - _REACH), at - 2, max(*ends, x + _REACH), at + 2) for at in tries]
        free = (n for n, box in enumerate(boxes) if not any(box.meets(other) for other in taken))
        turn = next(free, 0)
        taken.append(boxes[turn])
        found.append((x, min(tries[turn], scale.size.height)))
    return found


def _bars(point: FrontierPoint, place: tuple[float, float], scale: _Scale) -> Iterable[str]:
    """Yield the intervals of a point, which leave room for its mark."""
    x, y = place
    colour = LOOKS[point.state][1]
    for end in point.within or ():
        far = scale.x(end)
        if abs(far - x) > _REACH:
            yield line((x + math.copysign(_REACH, far - x), y), (far, y), colour, 1.5)
        if abs(far - x) > 1:
            yield line((far, y - _CAP), (far, y + _CAP), colour, 1.5)
    if point.lower is not None and (low := _height(point.lower, scale.size)) > y + _REACH:
        yield line((x, y + _REACH), (x, low), colour, 1.5)
        yield line((x - _CAP, low), (x + _CAP, low), colour, 1.5)


def _mark(point: FrontierPoint, place: tuple[float, float]) -> str:
    shape, colour = LOOKS[point.state]
    return symbol(shape, 100, place, fill=None if point.dominated else colour, stroke=colour)


class _Box(NamedTuple):
    """A rectangle, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: _Box) -> bool:
        """Return whether both have room in common."""
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


def _names(
    points: Sequence[FrontierPoint], places: Sequence[tuple[float, float]], scale: _Scale, limit: float | None
) -> Iterable[str]:
    """Yield the name of each mark, at the first place around it that is free.

    If no place is free of bars and of the limit, a name may cross these, but no mark and no other name.
    """
    taken = [_Box(x - _REACH, y - _REACH, x + _REACH, y + _REACH) for x, y in places]
    crossed = [box for point, place in zip(points, places, strict=True) for box in _barred(point, place, scale)]
    if limit is not None:
        crossed.append(_Box(0, _height(limit, scale.size) - 1, scale.size.width, _height(limit, scale.size) + 1))
    for point, (x, y) in zip(points, places, strict=True):
        boxes = _around(x, y, LETTER * len(point.label))
        inside = [box for box in boxes if box.left >= 0 and box.right <= scale.size.width + 12 and box.top >= -_TOP]
        free = [box for box in inside if not any(box.meets(other) for other in taken)]
        clear = (box for box in free if not any(box.meets(other) for other in crossed))
        box = next(clear, (free or boxes)[0])
        taken.append(box)
        yield text(point.label, (box.left, box.bottom - 3), bold=point.chosen)


def _barred(point: FrontierPoint, place: tuple[float, float], scale: _Scale) -> list[_Box]:
    """Return the room of the bars of a mark."""
    x, y = place
    ends = [x, *(scale.x(end) for end in point.within or ())]
    low = y if point.lower is None else max(y, _height(point.lower, scale.size))
    return [_Box(min(ends), y - 1, max(ends), y + 1), _Box(x - 1, y, x + 1, low)]


def _around(x: float, y: float, width: float) -> list[_Box]:
    """Return places for a name around a mark, the best one first."""
    off = _REACH + 2
    right, left, middle = x + off, x - off - width, x - width / 2
    corners = [(right, y - off - _ROW / 2), (left, y - off - _ROW / 2), (middle, y - off - _ROW)]
    corners += [(right, y + 2), (left, y + 2), (middle, y + off)]
    corners += [(side, y + 2 + _ROW * turn) for turn in (-2, 1, 2) for side in (right, left)]
    return [_Box(start, top, start + width, top + _ROW) for start, top in corners]
