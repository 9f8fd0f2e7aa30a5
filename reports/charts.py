"""Charts as inline SVG.

They hold no script and no style attribute, and load nothing.

Colours are attributes, so that a chart stays readable if a server removes the style sheet. For dark mode the style sheet replaces them
by value. A shape always says the same as a colour. Rates have a fixed axis from 0 to 100 %. For each chart the page also has a table
with the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from leakaudit.reports.svg import (
    AXIS_ROOM,
    BAND,
    HAIRLINE,
    INK,
    LETTER,
    MUTED,
    Margins,
    Tick,
    bar,
    hairline,
    left_axis,
    line,
    lower_axis,
    middle_text,
    picture,
    polyline,
    symbol,
    text,
)

LEAK, WORDS, LABELS = "#a11d1d", "#ad4324", "#8c5a3c"
"""Colours of leaked sentences, words and labels, from the worst to the least."""
CLEAN, LATE, CRASH = "#17603c", "#7d4a00", "#54308a"
"""Further colours. The style sheet repeats these values and those of `svg`: change them in both places (a test compares them)."""

COLOURS = (INK, MUTED, HAIRLINE, LEAK, WORDS, LABELS, CLEAN, LATE, CRASH, BAND)

STATES: dict[str, tuple[str, str, bool]] = {
    "text leaked": ("square", LEAK, True),
    "words leaked": ("diamond", WORDS, True),
    "labels leaked": ("triangle-down", LABELS, True),
    "in reach, not found": ("diamond", LATE, False),
    "out of time": ("triangle-up", LATE, False),
    "no leak event": ("circle", CLEAN, False),
    "error": ("cross", CRASH, True),
    "not needed": ("M-1,-0.45H1V-0.1H-1ZM-1,0.1H1V0.45H-1Z", MUTED, True),
    "not applicable": ("M-1,-0.18H1V0.18H-1Z", MUTED, True),
    "unverifiable": ("M-0.18,-1H0.18V1H-0.18Z", MUTED, True),
    "not judged": ("M-0.18,-1H0.18V1H-0.18Z", MUTED, False),
    "not run": ("M-0.5,-0.5L0.5,0.5M0.5,-0.5L-0.5,0.5", MUTED, False),
}
"""Cell state -> shape, colour, whether the shape is filled."""

_MOST_TEXT = 26
NAMES = 174
"""Room for the names of rows on the left, in pixels: fixed, so that charts below each other stand in line."""
_AIR = 4
"""Around a chart, in pixels."""
_HALF_LABEL = 6
"""Half the height of a label, in pixels."""
QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)
_ROW = 26
"""Height of a row of marks, in pixels."""


@dataclass(frozen=True)
class StepMark:
    """What one attack did on one step."""

    step: int
    attack: str
    state: str


@dataclass(frozen=True)
class RateBar:
    """A rate with its one-sided bounds."""

    name: str
    rate: float
    lower: float | None
    upper: float | None
    note: str
    found: Literal["leak", "clean", "open"]
    """`leak`: something leaked. `clean`: every search finished and nothing leaked. `open`: undecided."""


@dataclass(frozen=True)
class SharePoint:
    """The share that one attack recovered at one step."""

    step: int
    attack: str
    share: float


LINE_COLOURS = (INK, LEAK, CLEAN, LATE, CRASH, MUTED)
LINE_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-left")
"""Colours and shapes of successive lines. Six colours and seven shapes give 42 different pairs."""


def share_chart(points: Sequence[SharePoint], title: str, share: str) -> Markup:
    """Draw how much each attack recovered at each training step, as lines.

    Args:
        points: one for each attack and step, of two steps or more.
        title: what the chart says, in a sentence.
        share: title of the axis.
    """
    width, height = 560, 180
    axis = _StepAxis.of(sorted({point.step for point in points}), width)
    drawn = [_share_axis(share, width, height), axis.drawn(height)]
    attacks = list(dict.fromkeys(point.attack for point in points))
    for turn, attack in enumerate(attacks):
        colour, shape = LINE_COLOURS[turn % len(LINE_COLOURS)], LINE_SHAPES[turn % len(LINE_SHAPES)]
        mine = sorted((point.step, point.share) for point in points if point.attack == attack)
        places = [(axis.at(step), height * (1 - share)) for step, share in mine]
        drawn.append(polyline(places, colour))
        drawn += [symbol(shape, 50, place, fill=colour) for place in places]
        row = _HALF_LABEL + turn * 16
        drawn.append(symbol(shape, 90, (width + 24, row), fill=colour))
        drawn.append(middle_text(clip(attack), (width + 34, row), colour=MUTED))
    right = 34 + LETTER * max(len(clip(attack)) for attack in attacks) + _AIR
    below = max(2 * AXIS_ROOM, len(attacks) * 16 - height) + _AIR
    return picture(drawn, (width, height), Margins(NAMES, _AIR + _HALF_LABEL, right, below), title)


def step_chart(
    marks: Sequence[StepMark],
    shares: Sequence[tuple[int, float | None]],
    title: str,
    share: str,
    below: Callable[[Callable[[int], float], float, float], tuple[str, float]] | None = None,
) -> Markup:
    """Draw what each attack recovered at each training step, as marks.

    A chart above them shows the share of the text or of the labels that was recovered.

    Args:
        marks: one for each attack and step.
        shares: (step, share that the best attack recovered; None if there is no number).
        title: what the chart says, in a sentence.
        share: title of the axis of the share.
        below: draws something over the same steps. It gets the function from a step to its place, the width and the upper end, and returns
            elements and their height in pixels; None for nothing.
    """
    width, above = 640, 90
    steps = sorted({mark.step for mark in marks})
    axis = _StepAxis.of(steps, width)
    size = 90 if len(steps) <= 40 else 36
    drawn = [_share_axis(share, width, above)]
    drawn += [line((axis.at(s), 0), (axis.at(s), above), BAND, dash="2,3") for s, value in shares if value is None]
    known = [(axis.at(step), above * (1 - value)) for step, value in shares if value is not None]
    drawn += [line(place, (place[0], above), MUTED, 1.5) for place in known]
    drawn += [symbol("circle", size * 0.6, place, fill=INK) for place in known]
    rows = {attack: above + 8 + _ROW * (n + 0.5) for n, attack in enumerate(dict.fromkeys(m.attack for m in marks))}
    for attack, y in rows.items():
        drawn += [hairline((0, y), (width, y), HAIRLINE), middle_text(clip(attack), (-2, y), "end", MUTED)]
    height: float = above + 8 + _ROW * len(rows)
    if below is not None:
        more, room_below = below(axis.at, width, height)
        drawn.append(more)
        height += room_below
    drawn.append(axis.drawn(height))
    for one in marks:
        shape, colour, filled = STATES[one.state]
        place = axis.at(one.step), rows[one.attack]
        drawn.append(symbol(shape, size, place, fill=colour if filled else None, stroke=colour))
    room = Margins(NAMES, _AIR + _HALF_LABEL, _AIR, 2 * AXIS_ROOM + _AIR)
    return picture(drawn, (width, height), room, title)


DOTS = {"leak": ("square", LEAK, None), "clean": ("circle", CLEAN, None), "open": ("circle", None, LATE)}
"""What was found -> shape, colour inside and colour of the edge. An undecided rate is drawn as a hollow dot, because more time or more
steps might change it."""


def rate_chart(bars: Sequence[RateBar], limit: float | None, limit_name: str, title: str) -> Markup:
    """Draw rates with their bounds, one per row, against a limit."""
    one = len(bars) == 1 and not bars[0].name
    width = 640 if one else 520
    row = 34
    height = row * len(bars)
    drawn = [axis_of_rates(width, height)]
    for n, rate in enumerate(bars):
        y = row * (n + 0.5)
        low, high = (rate.rate if bound is None else bound for bound in (rate.lower, rate.upper))
        drawn.append(rate_mark(rate.rate, (low, high), rate.found, y, width, 130))
        # no bar may cross the note: it is right of the rows, or above a single row, on the side without the limit's name
        if not one:
            drawn.append(middle_text(clip(rate.name), (-12, y), "end", MUTED))
            drawn.append(middle_text(rate.note, (width + 12, y)))
        elif limit is not None and limit >= 0.5:
            drawn.append(text(rate.note, (0, -10)))
        else:
            drawn.append(text(rate.note, (width, -10), "end"))
    if limit is not None:
        x = width * limit
        drawn.append(line((x, 0), (x, height), INK, 2))
        left = limit < 0.5
        drawn.append(text(limit_name, (x - 2 if left else x + 2, -10), "start" if left else "end", bold=True))
    notes = LETTER * max(len(rate.note) for rate in bars) + 12
    half = LETTER * 2.5  # of the label 100%, which stands in the middle below its tick
    room = Margins(half if one else NAMES, 24, half if one else notes + _AIR, AXIS_ROOM + _AIR)
    return picture(drawn, (width, height), room, title)


def axis_of_rates(width: float, height: float) -> str:
    """Return a horizontal axis from 0 to 100 % with an upright line at each quarter."""
    lines = [hairline((width * at, 0), (width * at, height), HAIRLINE) for at in QUARTERS]
    return "".join(lines) + lower_axis([Tick(width * at, f"{at:.0%}") for at in QUARTERS], width, height)


def rate_mark(
    rate: float, bounds: tuple[float, float], found: Literal["leak", "clean", "open"], y: float, width: float, area: int
) -> str:
    """Return the dot of a rate on the bar of its bounds.

    Args:
        rate: from 0 to 1.
        bounds: of the rate.
        found: what the dot says.
        y: height of the row, in pixels.
        width: of the axis of rates, in pixels.
        area: of the dot, in square pixels.
    """
    shape, fill, stroke = DOTS[found]
    dot = symbol(shape, area, (width * rate, y), fill=fill, stroke=stroke)
    return bar(width * bounds[0], width * bounds[1], y, 10, BAND) + dot


@dataclass(frozen=True)
class _StepAxis:
    """An axis of training steps, with a little room at both ends."""

    steps: Sequence[int]
    start: int
    end: int
    width: float

    @classmethod
    def of(cls, steps: Sequence[int], width: float) -> _StepAxis:
        pad = max(1, round(0.03 * (steps[-1] - steps[0])))
        return cls(steps, steps[0] - pad, steps[-1] + pad, width)

    def at(self, step: int) -> float:
        """Return the place of a step, in pixels."""
        return self.width * (step - self.start) / (self.end - self.start)

    def drawn(self, y: float) -> str:
        """Return the axis, with every audited step as a tick, or every n-th.

        That is if there are more than twelve steps. Gaps of one size hide no step between others.
        """
        shown = self.steps[:: -(-len(self.steps) // 12)]
        return lower_axis([Tick(self.at(step), str(step)) for step in shown], self.width, y, "training step")


def _share_axis(title: str, width: float, height: float) -> str:
    return upright_axis_of_rates(width, height) + middle_text(title, (-48, 45), "end", MUTED)


def upright_axis_of_rates(width: float, height: float) -> str:
    """Return a vertical axis from 0 to 100 % with a level line at each quarter."""
    return left_axis([Tick(height * (1 - at), f"{at:.0%}") for at in QUARTERS], width, height)


def clip(name: str) -> str:
    """Return the name of a row, cut where it does not fit."""
    return name if len(name) <= _MOST_TEXT else name[: _MOST_TEXT - 1] + "…"
