"""Elements of a chart as inline SVG: lines, texts, marks and axes.

Places are pixels within the frame of a chart: x to the right, y down, (0, 0) at its upper left corner. Every function returns one or
more elements as text; `picture` joins them. Every colour is an attribute, and texts are escaped here and nowhere else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from markupsafe import Markup, escape

INK, MUTED, HAIRLINE = "#23211e", "#5e5a52", "#dcd7cb"
BAND = "#b9b2a3"

LETTER = 7.4
"""Width that we reserve for a letter of 12 pixels. Our choice: the mean of Helvetica is 6.2, and some browsers have a wider font."""

AXIS_ROOM = 22
"""Height of an axis with its labels, in pixels: 5 for a tick, 2 of air, 12 for the label and 3 below it."""

_FONT = 'font-family="Helvetica, Arial, Liberation Sans, sans-serif" font-size="12px"'
_TICK = 5
"""Length of a tick, in pixels."""
_MIDDLE, _TOP = 4, 10
"""From the middle, and from the top, of a text of 12 pixels down to its base line."""

_OUTLINES = {
    "square": "M-1,-1h2v2h-2Z",
    "diamond": "M0,-1L1,0L0,1L-1,0Z",
    "triangle-up": "M0,-0.87L-1,0.87H1Z",
    "triangle-down": "M0,0.87L-1,-0.87H1Z",
    "triangle-left": "M-0.87,0L0.87,-1V1Z",
    "cross": "M-1,-0.4V0.4H-0.4V1H0.4V0.4H1V-0.4H0.4V-1H-0.4V-0.4Z",
}
"""Name of a shape -> its outline within -1 to 1. Any other path without arcs is an outline, too."""


class Margins(NamedTuple):
    """Room around the frame, in pixels."""

    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True)
class Tick:
    """A place on an axis, in pixels, and its label."""

    at: float
    label: str


def picture(
    elements: Iterable[str], size: tuple[float, float], room: Margins, title: str, description: str = ""
) -> Markup:
    """Return a picture of a frame and what is around it.

    Args:
        elements: from the lowest to the uppermost.
        size: width and height of the frame, in pixels.
        room: around the frame.
        title: name of the picture, for people who use a screen reader.
        description: the same as the picture in words, if the name does not say it.
    """
    left, top = math.ceil(room.left), math.ceil(room.top)
    width, height = math.ceil(left + size[0] + room.right), math.ceil(top + size[1] + room.bottom)
    words = f"<desc>{escape(description)}</desc>" if description else ""
    return Markup(
        f'<svg role="img" aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">{words}'
        f'<g fill="none" {_FONT} transform="translate({left},{top})">{"".join(elements)}</g></svg>'
    )


def line(start: tuple[float, float], end: tuple[float, float], colour: str, width: float = 1, dash: str = "") -> str:
    """Return a straight line.

    `dash` holds the lengths of dashes and gaps, such as `2,3`.
    """
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    ends = f'x1="{_n(start[0])}" y1="{_n(start[1])}" x2="{_n(end[0])}" y2="{_n(end[1])}"'
    thick = f' stroke-width="{_n(width)}"' if width != 1 else ""
    return f'<line {ends} stroke="{colour}"{thick}{dashes}/>'


def hairline(start: tuple[float, float], end: tuple[float, float], colour: str) -> str:
    """Return a line of one pixel, upright or level.

    It runs through the middle of pixels, so that no screen spreads it over two.
    """
    sharp = [(math.floor(x) + 0.5, math.floor(y) + 0.5) for x, y in (start, end)]
    return line(sharp[0], sharp[1], colour)


def text(
    words: str,
    at: tuple[float, float],
    anchor: Literal["start", "middle", "end"] = "start",
    colour: str = INK,
    *,
    bold: bool = False,
) -> str:
    """Return one line of text whose base line is at a place."""
    weight = ' font-weight="600"' if bold else ""
    place = f'text-anchor="{anchor}" transform="translate({_n(at[0])},{_n(at[1])})"'
    return f'<text {place}{weight} fill="{colour}">{escape(words)}</text>'


def middle_text(
    words: str, at: tuple[float, float], anchor: Literal["start", "middle", "end"] = "start", colour: str = INK
) -> str:
    """Return one line of text whose middle is at a height."""
    return text(words, (at[0], at[1] + _MIDDLE), anchor, colour)


def symbol(shape: str, area: float, at: tuple[float, float], *, fill: str | None, stroke: str | None = None) -> str:
    """Return a mark.

    Args:
        shape: `circle`, another name of a shape, or an outline within -1 to 1.
        area: of the square around the mark, in square pixels.
        at: its middle.
        fill: colour of its area; None for a hollow mark.
        stroke: colour of its edge.
    """
    half = math.sqrt(area) / 2
    if shape == "circle":
        r = _n(half)
        path = f"M{r},0A{r},{r},0,1,1,-{r},0A{r},{r},0,1,1,{r},0"
    else:
        path = re.sub(r"-?\d+(?:\.\d+)?", lambda n: _n(float(n[0]) * half), _OUTLINES.get(shape, shape))
    inside = f' fill="{fill}"' if fill else ""
    edge = f' stroke="{stroke}" stroke-width="1.6"' if stroke else ""
    return f'<path transform="translate({_n(at[0])},{_n(at[1])})" d="{path}"{inside}{edge}/>'


def bar(start: float, end: float, y: float, height: float, colour: str) -> str:
    """Return a bar with round ends around the height y."""
    place = f'x="{_n(start)}" y="{_n(y - height / 2)}" width="{_n(end - start)}" height="{_n(height)}"'
    return f'<rect {place} rx="{_n(min(height, end - start) / 2)}" fill="{colour}"/>'


def block(x: float, y: float, width: float, height: float, colour: str, opacity: float = 1.0) -> str:
    """Return a rectangle whose upper left corner is at (x, y)."""
    faint = f' fill-opacity="{_n(opacity)}"' if opacity < 1 else ""
    return f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" fill="{colour}"{faint}/>'


def hatched(x: float, y: float, width: float, height: float, colour: str) -> str:
    """Return a rectangle filled with slanted lines, for what could not be judged.

    The lines are one path and no pattern, because a pattern needs an id and is printed as a picture. Empty for a rectangle without area.
    """
    if width <= 0 or height <= 0:
        return ""
    gap, parts = 5.0, [f"M{_n(x)},{_n(y)}h{_n(width)}v{_n(height)}h{_n(-width)}Z"]
    for turn in range(1, math.ceil((width + height) / gap)):
        across = turn * gap  # where the line x + y = across enters and leaves the rectangle
        start = max(0.0, across - height), min(across, height)
        end = min(across, width), max(0.0, across - width)
        parts.append(f"M{_n(x + start[0])},{_n(y + start[1])}L{_n(x + end[0])},{_n(y + end[1])}")
    return f'<path d="{"".join(parts)}" stroke="{colour}"/>'


def polyline(points: Sequence[tuple[float, float]], colour: str) -> str:
    """Return straight lines through points."""
    return f'<path d="{_through(points)}" stroke="{colour}" stroke-width="1.5"/>'


def area(points: Sequence[tuple[float, float]], colour: str) -> str:
    """Return a half transparent area within straight edges."""
    return f'<path d="{_through(points)}Z" fill="{colour}" fill-opacity="0.5"/>'


def lower_axis(ticks: Sequence[Tick], width: float, y: float, title: str = "") -> str:
    """Return a horizontal axis with labels below it, and a title below these."""
    parts = [hairline((0, y), (width, y), BAND)]
    for tick in ticks:
        parts.append(hairline((tick.at, y), (tick.at, y + _TICK), BAND))
        parts.append(text(tick.label, (tick.at, y + _TICK + 2 + _TOP), "middle", MUTED))
    if title:
        parts.append(text(title, (width / 2, y + AXIS_ROOM + _TOP), "middle", MUTED))
    return "".join(parts)


def left_axis(ticks: Sequence[Tick], width: float, height: float) -> str:
    """Return a vertical axis with labels on its left.

    A hairline crosses the frame at each tick.
    """
    parts = [hairline((0, tick.at), (width, tick.at), HAIRLINE) for tick in ticks]
    parts.append(hairline((0, 0), (0, height), BAND))
    for tick in ticks:
        parts.append(hairline((-_TICK, tick.at), (0, tick.at), BAND))
        parts.append(middle_text(tick.label, (-_TICK - 2, tick.at), "end", MUTED))
    return "".join(parts)


def _through(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_n(x)},{_n(y)}" for x, y in points)


def _n(number: float) -> str:
    """Return a number of pixels to a hundredth, without needless digits."""
    return f"{round(number, 2) + 0.0:.10g}"
