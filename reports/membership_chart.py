"""The picture of who was in a step: members named over false alarms."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from leakaudit.reports.charts import CLEAN, LEAK, QUARTERS
from leakaudit.reports.svg import (
    AXIS_ROOM,
    HAIRLINE,
    MUTED,
    Margins,
    Tick,
    left_axis,
    line,
    lower_axis,
    middle_text,
    picture,
    polyline,
    symbol,
)
from leakaudit.results.membership import Curve, Membership

WIDTH, HEIGHT = 480, 240
"""Of the frame, in pixels."""

LEAST = 1e-3
"""Smallest share of false alarms on the axis. Our choice: an audit has a few thousand candidates of no step at most."""

_LINES = (
    ("the update", LEAK, "square"),
    ("the model before the step alone", MUTED, "circle"),
    ("an update without these texts", CLEAN, "triangle-up"),
)
"""Name, colour and shape of each line."""


def membership_chart(found: Membership, title: str) -> Markup | None:
    """Draw the share of members that are named over that of false alarms.

    The axis of false alarms is logarithmic, from 0.001 to 1. None if the results have no curves, as those of several runs.

    Args:
        found: the curves.
        title: what the picture says, in a sentence.
    """
    curves = (found.curve, found.base_curve, found.null_curve)
    if not found.curve:
        return None
    ticks = [Tick(_across(rate), f"{rate:g}") for rate in (0.001, 0.01, 0.1, 1.0)]
    heights = [Tick(HEIGHT * (1 - share), f"{share:.0%}") for share in QUARTERS]
    drawn = [
        left_axis(heights, WIDTH, HEIGHT),
        lower_axis(ticks, WIDTH, HEIGHT, "share of texts of no step above the threshold"),
    ]
    drawn.append(line((_across(0.01), 0), (_across(0.01), HEIGHT), MUTED, dash="2,3"))
    chance = [(_across(LEAST * 1000 ** (n / 40)), HEIGHT * (1 - LEAST * 1000 ** (n / 40))) for n in range(41)]
    drawn.append(polyline(chance, HAIRLINE))
    for turn, (curve, (name, colour, shape)) in enumerate(zip(curves, _LINES, strict=True)):
        if not curve:
            continue
        places = _places(curve)
        drawn.append(polyline(places, colour))
        drawn += [symbol(shape, 50, place, fill=colour) for place in places[:: max(1, len(places) // 6)]]
        row = 10 + 18 * turn
        drawn.append(symbol(shape, 90, (12, row), fill=colour))
        drawn.append(middle_text(name, (22, row), colour=MUTED))
    drawn.append(middle_text("grey line: chance", (22, 10 + 18 * len(_LINES)), colour=MUTED))
    return picture(drawn, (WIDTH, HEIGHT), Margins(44, 12, 16, 2 * AXIS_ROOM + 6), title)


def _across(rate: float) -> float:
    """Return the place of a share of false alarms; the smallest ones are at 0."""
    return WIDTH * (math.log10(max(rate, LEAST) / LEAST) / 3)


def _places(curve: Curve) -> Sequence[tuple[float, float]]:
    """Return the corners of a curve, which rises in steps."""
    found: list[tuple[float, float]] = []
    for rate, share in curve:
        here = _across(rate), HEIGHT * (1 - share)
        if found and found[-1][0] == here[0]:
            found[-1] = here
        else:
            found.append(here)
    return found
