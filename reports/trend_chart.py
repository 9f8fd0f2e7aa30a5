"""The chart of a leak rate over nights.

The axis of time is true: a night without a result is a hole. The axis of rates is fixed from 0 to 100 %; it is a square root, because limits are
small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from markupsafe import Markup

from leakaudit.gate.wording import percent
from leakaudit.reports.charts import BAND, CLEAN, INK, LATE, LEAK, MUTED, draw

State = Literal["leak", "open", "clean"]

LOOKS: dict[State, dict[str, Any]] = {
    "leak": {"shape": "square", "fill": LEAK, "stroke": LEAK},
    "open": {"shape": "triangle-up", "fill": "transparent", "stroke": LATE},
    "clean": {"shape": "circle", "fill": "transparent", "stroke": CLEAN},
}
"""What a night found -> its mark. `open`: nothing leaked, and some steps could not be judged."""

LETTER = 7.4
"""Width that we reserve for a letter of 12 pixels. Our choice: the mean of Helvetica is 6.2, and some browsers have a wider font."""
_RIGHT = 22
"""Room on the right for the half of the last date that stands over the chart, in pixels."""
_LANE = 15
"""Height of a line of labels above the chart, in pixels."""
_MOST_LANES = 6
_CROSS = "M-1,-1L1,1M1,-1L-1,1"


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
    start, end = marks[0].at - half, marks[-1].at + half
    x = _time_axis(marks, size, start, end)
    versions = size.words and any(mark.new_version for mark in marks)
    x["axis"]["offset"] = 32 if versions else 18
    rows = [_row(mark, half) | {"part": part} for mark, part in zip(marks, _parts(marks), strict=True)]
    lines = [(_across(mark.at - half, start, end) * size.width, mark.changed) for mark in marks if mark.changed]
    layers = [
        _gap_lines(x, size),
        _band(rows, x, size),
        *_limit(marks, half, x, size),
        *_breaks(lines, size),
        *(_points(state, x, size) for state in LOOKS),
        _event("gap", _CROSS, MUTED, size.height + 11, x, size),
    ]
    if size.words:
        layers.append(_event("worse", "triangle-down", LEAK, size.height + 11, x, size))
        layers.append(_event("version", "diamond", INK, size.height + 25, x, size))
    spec = {
        "width": size.width,
        "height": size.height,
        "padding": {"left": 4, "top": 4, "bottom": 4, "right": max(_RIGHT, size.limit_room)},
        "autosize": {"type": "pad", "contains": "content"},
        "data": {"values": rows},
        "layer": layers,
    }
    return draw(spec, title, description)


def _across(moment: datetime, start: datetime, end: datetime) -> float:
    return (moment - start) / (end - start)


def _ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def _row(mark: NightMark, half: timedelta) -> dict[str, Any]:
    return {
        "at": _ms(mark.at),
        "from": _ms(mark.at - half),
        "to": _ms(mark.at + half),
        "rate": mark.rate,
        "state": "" if mark.rate is None else mark.state,
        "lower": mark.lower,
        "upper": mark.upper,
        "gap": mark.gap,
        "worse": mark.worse,
        "version": mark.new_version,
    }


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


def _time_axis(marks: Sequence[NightMark], size: Size, start: datetime, end: datetime) -> dict[str, Any]:
    days = [mark.at.date() for mark in marks]
    timed = len(days) > len(set(days))
    room = LETTER * (12 if timed else 6) + 14
    shown: list[datetime] = []
    for mark in reversed(marks):
        if not shown or _across(shown[-1], start, end) - _across(mark.at, start, end) >= room / size.width:
            shown.append(mark.at)
    axis = {
        "values": [_ms(moment) for moment in reversed(shown)],
        "format": "%-d %b %H:%M" if timed else "%-d %b",
        "title": None,
        "grid": False,
        "labelOverlap": False,
        "labelFlush": False,
        "labelBound": False,
    }
    scale = {"type": "utc", "domain": [_ms(start), _ms(end)], "nice": False}
    return {"field": "at", "type": "temporal", "scale": scale, "axis": axis}


def _rate_axis(field: str, size: Size) -> dict[str, Any]:
    axis = {"format": ".0%", "title": None, "values": list(size.ticks), "minExtent": 40, "maxExtent": 40}
    axis["labelOverlap"] = False
    scale = {"type": "sqrt", "domain": [0, 1], "nice": False}
    return {"field": field, "type": "quantitative", "scale": scale, "axis": axis}


def _pixels(field: str) -> dict[str, Any]:
    return {"field": field, "type": "quantitative", "scale": None}


def _gap_lines(x: dict[str, Any], size: Size) -> dict[str, Any]:
    return {
        "transform": [{"filter": "datum.gap"}],
        "mark": {"type": "rule", "color": BAND, "strokeDash": [2, 3]},
        "encoding": {"x": x, "y": {"value": 0}, "y2": {"value": size.height}},
    }


def _band(rows: Sequence[dict[str, Any]], x: dict[str, Any], size: Size) -> dict[str, Any]:
    """Return the bounds as steps: each holds for its whole night."""
    edges = [
        {"at": row[side], "lower": row["lower"] or 0.0, "upper": row["upper"], "part": row["part"]}
        for row in rows
        if row["upper"] is not None
        for side in ("from", "to")
    ]
    encoding = {"x": x, "y": _rate_axis("lower", size), "y2": {"field": "upper"}, "detail": {"field": "part"}}
    return {
        "data": {"values": edges},
        "mark": {"type": "area", "color": BAND, "opacity": 0.5, "line": False},
        "encoding": encoding,
    }


def _limit(marks: Sequence[NightMark], half: timedelta, x: dict[str, Any], size: Size) -> list[dict[str, Any]]:
    """Return a dashed line for each stretch of nights with the same limit."""
    found: list[dict[str, Any]] = []
    known = None
    for mark in marks:
        known = mark.limit if mark.rate is not None or mark.limit is not None else known
        if known is None:
            continue
        if found and found[-1]["limit"] == known and found[-1]["to"] == _ms(mark.at - half):
            found[-1]["to"] = _ms(mark.at + half)
        else:
            found.append({"at": _ms(mark.at - half), "to": _ms(mark.at + half), "limit": known})
    if not found:
        return []
    data, y = {"data": {"values": found}}, _rate_axis("limit", size)
    rule = {"type": "rule", "color": INK, "strokeWidth": 1.5, "strokeDash": [6, 3]}
    layers = [data | {"mark": rule, "encoding": {"x": x, "x2": {"field": "to"}, "y": y}}]
    if size.limit_room and known is not None:
        text = [{"limit": known, "text": f"limit {percent(known)}"}]
        name = {"type": "text", "color": INK, "fontSize": 12, "align": "left", "x": size.width + 6}
        layers.append({"data": {"values": text}, "mark": name, "encoding": {"y": y, "text": {"field": "text"}}})
    return layers


def _breaks(lines: Sequence[tuple[float, str]], size: Size) -> list[dict[str, Any]]:
    """Return an upright line for each break.

    Its name stands above the chart if there is room.
    """
    if not lines:
        return []
    labels = place(lines, size.width) if size.words else []
    tops = {label.x: -_LANE * (label.lane + 1) + 3 for label in labels}
    drawn = [{"x": x, "top": tops.get(x, 0), "bottom": size.height} for x, _ in lines]
    rule = {"type": "rule", "color": MUTED, "strokeWidth": 1.25}
    at = {"x": _pixels("x")}
    layers: list[dict[str, Any]] = [
        {
            "data": {"values": drawn},
            "mark": rule,
            "encoding": at | {"y": _pixels("top"), "y2": {"field": "bottom"}},
        }
    ]
    for left in (True, False):
        side = {"align": "right", "dx": -4} if left else {"align": "left", "dx": 4}
        texts = [
            {"x": label.x, "y": -_LANE * label.lane - 8, "text": label.text} for label in labels if label.left is left
        ]
        layers.append(
            {
                "data": {"values": texts},
                "mark": {"type": "text", "color": INK, "fontSize": 12, "baseline": "middle"} | side,
                "encoding": at | {"y": _pixels("y"), "text": {"field": "text"}},
            }
        )
    return layers


def _points(state: State, x: dict[str, Any], size: Size) -> dict[str, Any]:
    return {
        "transform": [{"filter": f"datum.state === '{state}'"}],
        "mark": {"type": "point", "size": size.dot, "opacity": 1, "strokeWidth": 1.6} | LOOKS[state],
        "encoding": {"x": x, "y": _rate_axis("rate", size)},
    }


def _event(field: str, shape: str, colour: str, y: float, x: dict[str, Any], size: Size) -> dict[str, Any]:
    """Return marks below the chart, at the nights with a property."""
    fill = "transparent" if field == "gap" else colour
    return {
        "transform": [{"filter": f"datum.{field}"}],
        "mark": {"type": "point", "shape": shape, "size": size.dot, "opacity": 1, "stroke": colour, "fill": fill},
        "encoding": {"x": x, "y": {"value": y}},
    }
