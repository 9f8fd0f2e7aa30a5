"""Charts: the places of marks, bars and lines, known in closed form."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from math import sqrt
from typing import Any
from xml.etree import ElementTree

import pytest

from leakaudit.reports.charts import (
    LATE,
    LEAK,
    STATES,
    RateBar,
    SharePoint,
    StepMark,
    rate_chart,
    share_chart,
    step_chart,
)
from leakaudit.reports.svg import BAND, INK, LETTER
from leakaudit.reports.trend_chart import NARROW, SMALL, WIDE, NightMark, trend_chart

NAMESPACE = "{http://www.w3.org/2000/svg}"
DAY = timedelta(days=1)
FIRST = datetime(2026, 11, 30, tzinfo=UTC)


def drawn(chart: str, tag: str, **attributes: str) -> list[dict[str, str]]:
    """Return the attributes of elements, which also shows that the chart is XML."""
    found = [dict(element.attrib) for element in ElementTree.fromstring(chart).iter(NAMESPACE + tag)]
    wanted = {name.replace("_", "-"): value for name, value in attributes.items()}
    return [one for one in found if wanted.items() <= one.items()]


def places(elements: list[dict[str, str]]) -> list[Any]:
    """Return where elements were moved to, each as a pair (x, y)."""
    return [tuple(map(float, re.findall(r"[-\d.]+", one["transform"]))) for one in elements]


def marks(chart: str, **attributes: str) -> list[Any]:
    """Return the middles of the marks with some attributes."""
    return places([one for one in drawn(chart, "path", **attributes) if "transform" in one])


def test_a_rate_stands_where_its_share_of_the_width_is() -> None:
    """As do its bounds, and the limit; 520 pixels are 100 %."""
    bars = [
        RateBar("none", 0.5, 0.25, 0.75, "3 of 6", "leak"),
        RateBar("prune", 0.0, None, 0.3, "0 of 9", "clean"),
        RateBar("sign", 0.1, 0.0, 0.4, "1 of 9", "open"),
    ]
    chart = rate_chart(bars, 0.05, "at most 5%", "rates")
    assert marks(chart, fill=LEAK) == [(260, 17)]
    assert marks(chart, stroke=LATE) == [(52, 85)]
    spans = [(float(one["x"]), float(one["width"]), float(one["y"])) for one in drawn(chart, "rect", fill=BAND)]
    assert spans == [(130, 260, 12), (0, 156, 46), (0, 208, 80)]
    [limit] = drawn(chart, "line", stroke=INK)
    assert (limit["x1"], limit["y1"], limit["x2"], limit["y2"]) == ("26", "0", "26", "102")


@pytest.mark.parametrize("limit", [0.05, 0.5, 0.97, None])
def test_notes_and_limit_of_a_single_rate_do_not_meet(limit: float | None) -> None:
    """The note stands on the side without the limit's name, inside the picture."""
    chart = rate_chart([RateBar("", 0.5, 0.2, 0.8, "3 of 6 steps", "leak")], limit, "at most so much", "rate")
    above = [one for one in drawn(chart, "text") if float(places([one])[0][1]) < 0]
    rooms = []
    for one, words in zip(above, ("3 of 6 steps", "at most so much"), strict=limit is not None):
        x, width = places([one])[0][0], LETTER * len(words)
        rooms.append((x - width, x) if one["text-anchor"] == "end" else (x, x + width))
    assert all(start >= -30 and end <= 640 + 30 for start, end in rooms)
    assert len(rooms) == 1 or rooms[0][1] <= rooms[1][0] or rooms[1][1] <= rooms[0][0]


def test_every_state_has_its_own_look() -> None:
    """Shape, fill and edge tell twelve states apart without colour."""
    found = [StepMark(n, "span", state) for n, state in enumerate(STATES)]
    chart = step_chart(found, [(0, None), (6, 1.0), (11, 0.0)], "steps", "ROUGE-L")
    looks = [(one["d"], "fill" in one) for one in drawn(chart, "path") if "stroke" in one]
    assert len(looks) == len(STATES)
    assert len({*looks}) == len(STATES)
    # steps 0 to 11 with one step of room at both ends, on 640 pixels
    assert marks(chart, stroke_width="1.6") == [(pytest.approx(640 * (n + 1) / 13, abs=0.01), 111) for n in range(12)]
    assert [y for _, y in marks(chart, fill=INK)] == [0, 90], "shares of 100 % and 0 %"
    assert len(drawn(chart, "line", stroke_dasharray="2,3")) == 1, "a share that is missing is not zero"


def test_a_line_for_each_attack_goes_through_its_points() -> None:
    """In the order of the steps, whatever the order of the points."""
    points = [SharePoint(step, attack, share) for attack in ("idlg", "llg") for step, share in ((10, 0.5), (0, 1.0))]
    chart = share_chart(points, "labels", "accuracy")
    lines = [one["d"] for one in drawn(chart, "path", stroke_width="1.5")]
    assert lines == ["M46.67,0L513.33,90"] * 2  # steps -1 to 11 on 560 pixels
    assert {"idlg", "llg"} <= {element.text for element in ElementTree.fromstring(chart).iter(NAMESPACE + "text")}


@pytest.mark.parametrize("size", [WIDE, NARROW, SMALL])
def test_nights_stand_at_their_dates_and_at_the_root_of_their_rates(size: Any) -> None:
    """Four nights have four quarters; a rate of 25 % stands in the middle."""
    nights = [
        NightMark(FIRST, rate=0.25, state="leak", lower=0.09, upper=0.36, limit=0.04),
        NightMark(FIRST + DAY, gap=True),
        NightMark(FIRST + 3 * DAY, rate=0.0, lower=0.0, upper=1.0, limit=0.04, changed="data"),
    ]
    chart = trend_chart(nights, size, DAY, "nights", "in words")
    quarter, height = size.width / 4, size.height
    assert marks(chart, fill=LEAK) == [(pytest.approx(quarter / 2, abs=0.01), pytest.approx(height / 2))]
    first, last = [one["d"] for one in drawn(chart, "path", fill_opacity="0.5")]
    upper, lower = (height * (1 - sqrt(rate)) for rate in (0.36, 0.09))
    numbers = [float(n) for n in re.findall(r"[\d.]+", first)]
    assert numbers == pytest.approx([0, upper, quarter, upper, quarter, lower, 0, lower], abs=0.01)
    numbers = [float(n) for n in re.findall(r"[\d.]+", last)]
    assert numbers == pytest.approx(
        [3 * quarter, 0, 4 * quarter, 0, 4 * quarter, height, 3 * quarter, height], abs=0.01
    )
    dashed = drawn(chart, "line", stroke_dasharray="6,3")
    assert [float(one["y1"]) for one in dashed] == pytest.approx([height * 0.8] * len(dashed))
    assert "30 Nov" in chart or size is not WIDE
    assert "3 Dec" in chart and "<desc>in words</desc>" in chart


def test_markup_in_names_and_titles_stays_text() -> None:
    """Names of attacks and defences come from outside."""
    evil = '"><script>&'
    chart = rate_chart([RateBar(evil, 0.1, None, None, evil, "leak")], 0.2, evil, evil)
    chart += step_chart([StepMark(0, evil, "error")], [], evil, evil)
    chart += share_chart([SharePoint(0, evil, 0.1), SharePoint(1, evil, 0.2)], evil, evil)
    chart += trend_chart([NightMark(FIRST, rate=0.1, changed=evil)], WIDE, DAY, evil, evil)
    assert "<script" not in chart
    root = ElementTree.fromstring(f"<all>{chart}</all>")
    assert [one.attrib["aria-label"] for one in root] == [evil] * 4
