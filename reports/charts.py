"""Charts as inline SVG, drawn by Vega-Lite through vl-convert.

They hold no script and no style attribute, and load nothing.

Colours are attributes, so that a chart stays readable if a server removes the style sheet. For dark mode the style sheet replaces them
by value. A shape always says the same as a colour. Rates have a fixed axis from 0 to 100 %. For each chart the page also has a table
with the same data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from markupsafe import Markup, escape

INK, MUTED, HAIRLINE = "#23211e", "#5e5a52", "#dcd7cb"
LEAK, WORDS, LABELS = "#a11d1d", "#ad4324", "#8c5a3c"
"""Colours of leaked sentences, words and labels, from the worst to the least."""
CLEAN, LATE, CRASH, BAND = "#17603c", "#7d4a00", "#54308a", "#b9b2a3"
"""Further colours. The style sheet repeats all these values: change them in both places (a test compares them)."""

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

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
"""Name of the schema, which is never fetched. The tests check each specification against it with Altair."""

_MOST_TEXT = 26
_LEFT = {"minExtent": 170, "maxExtent": 170, "labelLimit": 0}
"""Fixed room for names, in pixels, so that the layout does not depend on the fonts of the machine that draws."""
_WIDEST_DIGIT = 4
"""Further room for each character of a note, in pixels: the font of the reader may be wider than that of the machine that draws."""
_FONT = "Helvetica, Arial, Liberation Sans, sans-serif"


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
    x = _step_axis(sorted({point.step for point in points}))
    attacks = list(dict.fromkeys(point.attack for point in points))
    colours = [LINE_COLOURS[turn % len(LINE_COLOURS)] for turn in range(len(attacks))]
    shapes = [LINE_SHAPES[turn % len(LINE_SHAPES)] for turn in range(len(attacks))]
    named: dict[str, Any] = {"field": "attack", "type": "nominal"}
    legend = {"title": None, "labelLimit": 0, "labelColor": MUTED, "labelFontSize": 12, "orient": "right"}
    chart = {
        "width": 560,
        "height": 180,
        "data": {"values": [{"step": p.step, "attack": _clip(p.attack), "share": p.share} for p in points]},
        "mark": {"type": "line", "strokeWidth": 1.5, "point": {"filled": True, "opacity": 1, "size": 50}},
        "encoding": {
            "x": x,
            "y": _percent_axis("share", share),
            "color": named
            | {
                "scale": {"domain": [_clip(a) for a in attacks], "range": colours},
                "legend": legend,
            },
            "shape": named
            | {
                "scale": {"domain": [_clip(a) for a in attacks], "range": shapes},
                "legend": legend,
            },
        },
    }
    return draw(chart, title)


def step_chart(marks: Sequence[StepMark], shares: Sequence[tuple[int, float | None]], title: str, share: str) -> Markup:
    """Draw what each attack recovered at each training step, as marks.

    A chart above them shows the share of the text or of the labels that was recovered.

    Args:
        marks: one for each attack and step.
        shares: (step, share that the best attack recovered; None if there is no number).
        title: what the chart says, in a sentence.
        share: title of the axis of the share.
    """
    steps = sorted({mark.step for mark in marks})
    x = _step_axis(steps)
    size = 90 if len(steps) <= 40 else 36
    above = {
        "height": 90,
        "width": 640,
        "layer": [
            {
                "data": {"values": [{"step": s} for s, value in shares if value is None]},
                "mark": {"type": "rule", "strokeDash": [2, 3], "color": BAND},
                "encoding": {"x": x | {"axis": None}},
            },
            {
                "data": {"values": [{"step": s, "share": value} for s, value in shares if value is not None]},
                "encoding": {"x": x | {"axis": None}, "y": _percent_axis("share", share)},
                "layer": [
                    {"mark": {"type": "rule", "color": MUTED, "strokeWidth": 1.5}},
                    {"mark": {"type": "point", "filled": True, "opacity": 1, "color": INK, "size": size * 0.6}},
                ],
            },
        ],
    }
    attacks = [_clip(name) for name in dict.fromkeys(mark.attack for mark in marks)]
    seen = [name for name in STATES if any(mark.state == name for mark in marks)]
    below = {
        "width": 640,
        "height": {"step": 26},
        "data": {"values": [{"step": m.step, "attack": _clip(m.attack), "state": m.state} for m in marks]},
        "layer": [_state_layer(state, x, attacks, size) for state in seen],
    }
    return draw({"vconcat": [above, below], "spacing": 8}, title)


_DOTS: dict[str, dict[str, Any]] = {
    "leak": {"shape": "square", "color": LEAK},
    "clean": {"shape": "circle", "color": CLEAN},
    "open": {"shape": "circle", "filled": False, "stroke": LATE, "strokeWidth": 1.6, "fill": "transparent"},
}
"""An undecided rate is drawn as a hollow dot, because more time or more steps might change it."""


def rate_chart(bars: Sequence[RateBar], limit: float | None, limit_name: str, title: str) -> Markup:
    """Draw rates with their bounds, one per row, against a limit."""
    rows = [
        {
            "name": _clip(bar.name),
            "rate": bar.rate,
            "lower": bar.rate if bar.lower is None else bar.lower,
            "upper": bar.rate if bar.upper is None else bar.upper,
            "note": bar.note,
            "found": bar.found,
        }
        for bar in bars
    ]
    one = len(rows) == 1 and not rows[0]["name"]
    y: dict[str, Any] = {
        "field": "name",
        "type": "nominal",
        "sort": None,
        "axis": None if one else {"title": None, "domain": False, "ticks": False, "labelPadding": 12} | _LEFT,
    }
    x = _percent_axis("rate", None)
    dot: dict[str, Any] = {"type": "point", "opacity": 1, "filled": True, "size": 130}
    # no bar may cross the note: it is right of the rows, or above a single row, on the side without the limit's name
    width = 640 if one else 520
    aside: dict[str, Any] = {"align": "left", "x": width + 12}
    if one:
        left = limit is not None and limit >= 0.5
        aside = {"align": "left" if left else "right", "x": 0 if left else width, "baseline": "bottom"}
    layers: list[dict[str, Any]] = [
        {
            "mark": {"type": "bar", "height": 10, "color": BAND, "cornerRadius": 5},
            "encoding": {"x": x | {"field": "lower"}, "x2": {"field": "upper"}, "y": y},
        },
        *(
            {
                "transform": [{"filter": f"datum.found === {json.dumps(found)}"}],
                "mark": dot | looks,
                "encoding": {"x": x, "y": y},
            }
            for found, looks in _DOTS.items()
        ),
        {
            "mark": {"type": "text", "color": INK, "fontSize": 12} | aside,
            "encoding": {"y": y, "text": {"field": "note"}} | ({"y": {"value": -7}} if one else {}),
        },
    ]
    if limit is not None:
        line = {"data": {"values": [{"limit": limit, "text": limit_name}]}}
        at = {"x": {"field": "limit", "type": "quantitative"}}
        layers.append(line | {"mark": {"type": "rule", "color": INK, "strokeWidth": 2}, "encoding": at})
        above = {"type": "text", "y": -7, "color": INK, "fontSize": 12, "fontWeight": 600, "baseline": "bottom"}
        side = {"align": "left", "dx": -2} if limit < 0.5 else {"align": "right", "dx": 2}
        layers.append(line | {"mark": above | side, "encoding": at | {"text": {"field": "text"}}})
    height: Any = 34 if one else {"step": 34}
    room = 0 if one else max(len(bar.note) for bar in bars) * _WIDEST_DIGIT
    return draw({"width": width, "height": height, "data": {"values": rows}, "layer": layers}, title, room=room)


def _state_layer(state: str, x: dict[str, Any], attacks: Sequence[str], size: float) -> dict[str, Any]:
    shape, colour, filled = STATES[state]
    return {
        "transform": [{"filter": f"datum.state === {json.dumps(state)}"}],
        "mark": {
            "type": "point",
            "shape": shape,
            "size": size,
            "opacity": 1,
            "strokeWidth": 1.6,
            "stroke": colour,
            "fill": colour if filled else "transparent",
        },
        "encoding": {
            "x": x,
            "y": {
                "field": "attack",
                "type": "nominal",
                "scale": {"domain": list(attacks)},
                "axis": {"title": None, "domain": False, "ticks": False, "grid": True} | _LEFT,
            },
        },
    }


def _percent_axis(field: str, title: str | None) -> dict[str, Any]:
    upright = {"titleAngle": 0, "titleAlign": "right", "titleX": -48, "titleY": 45, "titleBaseline": "middle"} | _LEFT
    extra = upright if title is not None else {}  # only the upright axis has a title
    return {
        "field": field,
        "type": "quantitative",
        "scale": {"domain": [0, 1]},
        "axis": {"format": ".0%", "title": title, "values": [0, 0.25, 0.5, 0.75, 1]} | extra,
    }


def _step_axis(steps: Sequence[int]) -> dict[str, Any]:
    """Return the axis of training steps, with a little room at both ends."""
    pad = max(1, round(0.03 * (steps[-1] - steps[0])))
    return {
        "field": "step",
        "type": "quantitative",
        "scale": {"domain": [steps[0] - pad, steps[-1] + pad], "nice": False},
        "axis": {"title": "training step", "format": "d", "grid": False, "tickMinStep": 1, "values": _ticks(steps)},
    }


def _ticks(steps: Sequence[int]) -> list[int]:
    """Return the places of the ticks: every audited step, or every n-th.

    That is if there are more than twelve steps. Gaps of one size hide no step between others.
    """
    return list(steps[:: -(-len(steps) // 12)])


def _clip(name: str) -> str:
    return name if len(name) <= _MOST_TEXT else name[: _MOST_TEXT - 1] + "…"


def draw(spec: dict[str, Any], title: str, description: str = "", room: int = 0) -> Markup:
    """Return the SVG of a Vega-Lite specification as a picture.

    Args:
        spec: the specification.
        title: name of the picture, for people who use a screen reader.
        description: the same as the picture in words, if the name does not say it.
        room: further pixels at the right.
    """
    import vl_convert

    axis = {
        "labelColor": MUTED,
        "titleColor": MUTED,
        "gridColor": HAIRLINE,
        "domainColor": BAND,
        "tickColor": BAND,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
    }
    padding = {"left": 4, "top": 4, "bottom": 4, "right": 4 + room}
    whole = (
        {"padding": padding}
        | spec
        | {
            "$schema": SCHEMA,
            "background": "transparent",
            "config": {"aria": False, "font": _FONT, "view": {"stroke": None}, "axis": axis},
        }
    )
    drawn = vl_convert.vegalite_to_svg(whole)
    drawn = re.sub(r' (?:pointer-events|aria-[a-z]+|role|class|xmlns:xlink)="[^"]*"', "", drawn)
    drawn = re.sub(r"<path d=\"(?:M0,0h0v0h0Z)?\"[^>]*/>", "", drawn)  # frames that draw nothing
    drawn = drawn.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
    return Markup(drawn.replace(">", f"><desc>{escape(description)}</desc>", 1) if description else drawn)
