"""The trend in the report: what it shows, what it hides, and that it can be read."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from pathlib import Path

import pytest

from leakaudit.history.saved_trend import FILE, SavedTrend, load_trend, save_trend
from leakaudit.reports import write_report
from leakaudit.reports.allowlist import without_paths
from leakaudit.reports.charts import COLOURS
from leakaudit.reports.sections.trend import MOST_SMALL
from leakaudit.reports.svg import LETTER
from leakaudit.reports.trend_chart import place
from leakaudit.results.files import to_json
from tests.support.factories import NOW, audit
from tests.support.nights import gap, night, night_id, rate, thirty_nights

FOUND = audit(3, 17)
RUN = FOUND.run.id
DAY = 86_400.0


def page_of(folder: Path, saved: SavedTrend | str | None) -> str:
    """Write the report of a folder with a trend and return it."""
    (folder / "results.json").write_text(json.dumps(to_json(FOUND)))
    if isinstance(saved, str):
        (folder / FILE).write_text(saved)
    elif saved is not None:
        save_trend(saved, folder)
    return write_report(folder, now=NOW).read_text(encoding="utf-8")


def section_of(page: str) -> str:
    """Return the section on the trend; empty if there is none."""
    return page.partition('<section id="trend"')[2].partition("</section>")[0]


@pytest.fixture(scope="module")
def thirty(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the page of thirty nights."""
    return page_of(tmp_path_factory.mktemp("thirty"), thirty_nights(RUN))


@pytest.fixture(scope="module")
def charts(thirty: str) -> list[str]:
    """Return the charts of the section: wide, narrow, and the small ones."""
    return re.findall(r'<svg role="img".*?</svg>', section_of(thirty), flags=re.DOTALL)


def test_a_folder_without_a_trend_has_no_word_of_it(tmp_path: Path) -> None:
    """Nor has a first night, a trend of another audit, or a file that cannot be read."""
    alone = page_of(tmp_path, None)
    assert section_of(alone) == "" and "#trend" not in alone
    one = SavedTrend(records=(night(0, run=RUN),), period_s=DAY)
    good = one.model_copy(update={"records": (night(0), night(1, run=RUN))}).model_dump(mode="json", by_alias=True)
    other = json.dumps(
        good | {"records": [json.loads(night(n, run="other").model_dump_json(by_alias=True)) for n in (0, 1)]}
    )
    backwards = json.dumps(good | {"records": good["records"][::-1]})
    no_date = json.dumps(good).replace(night_id(0), "2026-99-99T0000Z")
    broken = [
        "{",
        "[]",
        '"x"',
        other,
        backwards,
        no_date,
        *(json.dumps(good | {"period_s": p}) for p in (0, -1, 1e300)),
    ]
    assert page_of(tmp_path, one) == alone
    for text in broken:
        assert page_of(tmp_path, text) == alone
    assert section_of(page_of(tmp_path, json.dumps(good))), "the good file is shown"


def test_the_section_comes_first_and_says_what_to_do(thirty: str) -> None:
    """With the alarm, its night, and the night of the change."""
    assert re.search(r'<section id="(\w+)"', thirty.partition("</header>")[2])[1] == "trend"  # type: ignore[index]
    assert "Worse than the baseline since the night of 25 Nov; the change most likely came on 24 Nov." in thirty


def test_gaps_breaks_and_limit_are_drawn_and_named(thirty: str, charts: list[str]) -> None:
    """Six nights without results, five changes, one limit, in the words below as well."""
    section = html.unescape(section_of(thirty))
    for line in (
        "10 Nov: the data file is missing",
        "11 Nov to 12 Nov: no night was started",
        "22 Nov: the disk was full",
    ):
        assert f"<li>{line}</li>" in section
    for line in ("5 Nov: the data set", "6 Nov: the policy", "16 Nov: the defences that the run declares"):
        assert f"<li>{line}</li>" in section
    for chart in charts[:2]:
        texts = [text.text for text in texts_of(chart)]
        assert {"data", "policy", "attacks", "hardware", "shipped"} <= {*texts}
        assert chart.count('stroke-dasharray="2,3"') == 6 and 'stroke-dasharray="6,3"' in chart
    assert "limit 5%" in charts[0] and "limit of the policy (5%)" in section
    assert 'no rate</td><td class="n">none</td><td>the disk was full' in section, "a gap is not zero"


def test_a_leak_has_another_shape_and_not_only_another_colour(charts: list[str]) -> None:
    """Seven squares and seventeen circles."""
    paths = re.findall(r"<path [^>]*>", charts[0])
    squares = [path for path in paths if 'stroke="#a11d1d"' in path and re.search(r' d="[^"]*h', path)]
    circles = [path for path in paths if 'stroke="#17603c"' in path and re.search(r' d="[^"]*A', path)]
    assert (len(squares), len(circles)) == (7, 17)


def test_a_chart_says_in_words_what_it_shows(charts: list[str]) -> None:
    """As its name and its description."""
    assert (
        'aria-label="Share of the steps of each night in which a sentence came back (shipped, any attack)"' in charts[0]
    )
    description = html.unescape(re.search(r"<desc>(.*?)</desc>", charts[0])[1])  # type: ignore[index]
    for words in (
        "30 nights from 1 Nov to 30 Nov, 24 with a rate.",
        "Nights with a leak: 8 Nov 1 of 20, 24 Nov 3 of 20,",
        "New comparison on 6 Nov: the policy.",
        "No results on 22 Nov: the disk was full.",
    ):
        assert words in description


@dataclass(frozen=True)
class Text:
    """The room that a text of a chart takes, in pixels."""

    text: str
    left: float
    right: float
    y: float


def texts_of(chart: str) -> Iterator[Text]:
    """Yield the texts of a chart, each with its place in the whole picture."""
    moves: list[tuple[float, float]] = []
    for close, tag, attributes in re.findall(r"<(/?)(g|text)\b([^>]*)>", chart):
        if close:
            moves.pop()
            continue
        move = re.search(r"translate\(([-\d.]+),\s*([-\d.]+)\)", attributes)
        moves.append((float(move[1]), float(move[2])) if move else (0.0, 0.0))
        if tag == "text":
            x, y = (sum(part) for part in zip(*moves, strict=True))
            [anchor] = re.findall(r'text-anchor="(\w+)"', attributes) or ["start"]
            words = chart.split(attributes + ">", 1)[1].split("<", 1)[0]
            width = LETTER * len(words)
            left = {"start": x, "middle": x - width / 2, "end": x - width}[anchor]
            yield Text(words, left, left + width, y)


def test_labels_do_not_overlap_and_stay_in_the_picture(charts: list[str]) -> None:
    """At thirty nights with five breaks and six gaps, on a telephone as well."""
    assert len(charts) == 2 + MOST_SMALL
    for chart in charts:
        size = re.search(r'viewBox="0 0 (\d+) (\d+)"', chart)
        assert size is not None
        texts = list(texts_of(chart))
        assert len(texts) >= 6
        for one, other in combinations(texts, 2):
            apart = one.right <= other.left or other.right <= one.left or abs(one.y - other.y) >= 12
            assert apart, (one, other)
        for text in texts:
            assert text.left >= 0 and text.right <= float(size[1]) and 8 <= text.y <= float(size[2]), text
    assert float(re.search(r'width="(\d+)"', charts[1])[1]) <= 358, "fits beside the margins of 390 pixels"  # type: ignore[index]


@pytest.mark.parametrize("lines", [
    [(5.0 + 9 * n, "policy") for n in range(5)],
    [(280.0 - 9 * n, "hardware") for n in range(5)][::-1],
    [(136.0, "data, attacks"), (145.0, "data, attacks"), (154.0, "policy")],
    [(9.0, "policy"), (18.0, "a much longer name"), (260.0, "a much longer name"), (279.0, "x")],
])  # fmt: skip
def test_names_of_breaks_find_room_at_every_place(lines: list[tuple[float, str]]) -> None:
    """None is left out, none meets another one or the line of another one."""
    labels = place(lines, 280)
    assert [(label.x, label.text) for label in labels] == lines
    for one, other in combinations(labels, 2):
        for name, line in ((one, other), (other, one)):
            start, end = name.span
            assert not (line.lane >= name.lane and start <= line.x <= end), (name, line)
        if one.lane == other.lane:
            assert one.span[1] <= other.span[0] or other.span[1] <= one.span[0]


def test_many_breaks_leave_out_names_and_not_lines(tmp_path: Path) -> None:
    """The list below names them all."""
    records = tuple(night(n, keys={"data": str(n)}, run=RUN) for n in range(20))
    page = page_of(tmp_path, SavedTrend(records=records, period_s=DAY))
    chart = re.findall(r'<svg role="img".*?</svg>', section_of(page), flags=re.DOTALL)[1]
    names = [text for text in texts_of(chart) if text.text == "data"]
    assert 0 < len(names) < 19
    assert section_of(page).count("the data set</li>") == 19


def test_further_rates_get_small_charts_and_the_rest_a_row(thirty: str) -> None:
    """Eleven rates: one large, eight small, two in the table only."""
    section = section_of(thirty)
    assert section.count("<figcaption") == 1 + MOST_SMALL
    assert "2 more in the table of all rates." in section
    table = section.partition('aria-label="All rates"')[2]
    assert table.count('<th scope="row">') == 11
    assert "24 Nov: 3 of 20" in table


def test_a_night_without_a_rate_is_a_hole(tmp_path: Path) -> None:
    """A night that could judge nothing has no mark at 0 %."""
    records = (night(0), night(1, rates=(rate(0, 0, unjudged=20),)), night(2, run=RUN))
    page = page_of(tmp_path, SavedTrend(records=records, period_s=DAY))
    chart = re.findall(r'<svg role="img".*?</svg>', section_of(page), flags=re.DOTALL)[0]
    assert chart.count('stroke="#17603c"') == 2 and chart.count('stroke-dasharray="2,3"') == 1


def test_nothing_private_is_shown(tmp_path: Path) -> None:
    """No mark of a step, no key's value, no path; markup stays text."""
    secret = "ann-notes"
    records = (
        night(0, keys={"data": secret, "policy": "a"}, model_version="5ec2e7", units=("0123456789abcdef",)),
        gap(1, f"step 3: the file /home/ann/{secret}.jsonl is missing <script>alert(1)</script> \u202e"),
        night(2, keys={"data": f"{secret}-2", "policy": "a"}, since_last=f"they differ (data: {secret})", run=RUN),
    )
    page = page_of(tmp_path, SavedTrend(records=records, period_s=DAY, not_compared=f"see /home/ann/{secret}"))
    for private in (secret, "5ec2e7", "0123456789abcdef", "/home", "<script>", "\u202e"):
        assert private not in page, private
    assert "step 3: the file &lt;path&gt; is missing" in page
    assert without_paths("24 of 25 nights, 3.1 % (e.g. by span)") == "24 of 25 nights, 3.1 % (e.g. by span)"


def test_the_charts_use_the_colours_of_both_schemes_and_no_style(charts: list[str]) -> None:
    """The style sheet replaces colours by value in dark mode."""
    for chart in charts:
        assert {*re.findall(r"#[0-9a-fA-F]{3,8}\b", chart)} <= {*COLOURS}
        assert " style=" not in chart and "<style" not in chart


def test_the_saved_trend_keeps_what_the_advice_needs(tmp_path: Path) -> None:
    """Confidence and prior travel with the nights."""
    saved = thirty_nights(RUN).model_copy(update={"confidence": 0.99, "prior": (0.5, 0.5)})
    save_trend(saved, tmp_path)
    assert load_trend(tmp_path) == saved
    assert timedelta(seconds=saved.period_s) == timedelta(days=1)
