"""Pictures that answer one question each: their places, and their captions."""

from __future__ import annotations

import re
from typing import Any

import pytest

from leakaudit.reports import redact
from leakaudit.reports.charts import COLOURS, LEAK
from leakaudit.reports.page import render_html
from leakaudit.reports.personal_data import classes_in
from leakaudit.reports.pictures import (
    Column,
    Curve,
    Limited,
    counts_chart,
    distribution_chart,
    group_chart,
    groups_of,
    limits_chart,
    seconds_chart,
)
from leakaudit.reports.redaction import RedactedResult
from leakaudit.reports.sections import confidence, cost, labels, samples, steps
from leakaudit.reports.svg import INK, hatched
from leakaudit.results.schema import AttemptStatus, Results, TextMode
from tests.reports.test_charts import drawn, marks
from tests.support.factories import attempt, audit, changed, journal_entry, results, step
from tests.support.judging import RED_LINE, judge


def _shown(found: Results, *rules: Any) -> RedactedResult:
    return redact(found, [], judge(found, *(rules or (RED_LINE,))))


def _data(section: Any) -> dict[str, Any]:
    found: dict[str, Any] = section.context
    return found


def _timed() -> Results:
    """Build four steps: two leak after 2 s and 4 s, two do not within 8 s."""
    seconds = (2.0, 4.0, 8.0, 8.0)
    late = AttemptStatus.BUDGET_EXHAUSTED
    return results(
        [step(i) for i in range(4)],
        [attempt(i, leaks=i < 2, wall_s=s, status=AttemptStatus.RAN if i < 2 else late) for i, s in enumerate(seconds)],
    )


def test_a_thousand_steps_are_columns_in_which_every_leak_is_seen() -> None:
    """One leak among a thousand steps is red, in the column of its step."""
    every = [(i, {"span": "text leaked" if i == 500 else "no leak event"}, 0.1, 1.0, None) for i in range(1000)]
    groups = groups_of(every)
    assert len(groups) <= 60 and sum(sum(one.states["span"].values()) for one in groups) == 1000
    chart = group_chart(groups, "t", "share of the text")
    [red] = drawn(chart, "rect", fill=LEAK)
    assert float(red["height"]) == 2.0
    at = float(red["x"]) / 640 * len(groups)
    assert groups[int(at)].first <= 500 <= groups[int(at)].last


def test_the_page_of_a_thousand_steps_is_short() -> None:
    """The picture has columns, and the page stays below a megabyte."""
    found = audit(100, 900)
    shown = _data(steps.section(_shown(found)))
    assert shown["grouped"] and str(shown["chart"]).count("<") < 500
    assert shown["when"] == (
        "Early or late: 100 of the first 500 audited steps leaked (20%), and 0 of the last 500 (0%)."
    )
    assert len(render_html(_shown(found))) < 1_000_000


def test_the_loss_is_drawn_only_where_results_hold_it() -> None:
    """No line at zero stands for a loss that is missing."""
    found = audit(2, 4)
    assert "loss" not in str(_data(steps.section(_shown(found)))["chart"])
    losing = tuple(one.model_copy(update={"loss": 2.0 - one.step / 10}) for one in found.steps)
    with_loss = changed(found, steps=losing)
    shown = _data(steps.section(_shown(with_loss)))
    assert ">loss</text>" in str(shown["chart"]) and shown["table"][5]["loss"] == "1.5"


def test_a_share_curve_rises_at_the_seconds_of_its_leaks() -> None:
    """On a logarithmic axis, and hollow where the time limit cut a search off."""
    curve = Curve("span", (1.0, 10.0), 4, 100.0, "text leaked", cut=True)
    chart = seconds_chart([curve], "t")
    [path] = [one["d"] for one in drawn(chart, "path", stroke_width="1.5")]
    places = [tuple(map(float, pair.split(","))) for pair in re.findall(r"[\d.]+,[\d.]+", path)]
    assert places == [(0, 170), (0, 127.5), (280, 127.5), (280, 85), (560, 85)]
    assert not marks(chart, fill=LEAK) and len(marks(chart, stroke=LEAK)) == 2


def test_the_caption_of_the_seconds_is_computed() -> None:
    """Half of four steps is two, and the second took 4 s."""
    shown = _data(cost.section(_shown(_timed())))
    assert shown["said"] == (
        "The first leak of text is in step 0, number 1 of 4 searched steps. The quickest one took 2.0 s (span), "
        "and half of the steps had one within 4.0 s of attack."
    )
    [row] = shown["curves"]
    assert (row["quarter"], row["half"], row["most"], row["longest"]) == (
        "2.0 s",
        "4.0 s",
        "not reached",
        "8.0 s, cut off",
    )
    assert _data(cost.section(_shown(audit(0, 3))))["chart"] is None


def test_how_much_came_back_is_a_distribution() -> None:
    """Each text is counted once, by the attack that recovered most of it."""
    shares = (0.0, 0.1, 0.3, 0.6, 0.9, 1.0)
    tried = [attempt(i, recall=share) for i, share in enumerate(shares)]
    tried += [attempt(i, "tag", recall=0.0) for i in range(6)]
    shown = _data(samples.section(_shown(results([step(i) for i in range(6)], tried))))
    assert [count for _, count in shown["columns"]] == [1] * 6
    assert shown["said"] == "1 of 6 texts came back word for word (16.7%), and 2 more by half or more (33.3%)."


def test_columns_have_the_height_of_their_share() -> None:
    """Half of the texts is half of 150 pixels; what was not judged is hatched."""
    columns = [Column("a", 2, "text leaked"), Column("b", 1, "no leak event"), Column("c", 1, "unsure")]
    chart = distribution_chart(columns, "t", "texts")
    assert [float(one["height"]) for one in drawn(chart, "rect", fill=LEAK)] == [75]
    assert hatched(0, 0, 10, 0, INK) == ""
    assert len(drawn(chart, "rect")) == 2


def test_each_rate_has_its_own_limit() -> None:
    """430 pixels are 100 %."""
    rows = [Limited(name, 0.5, 0.25, 0.75, limit, "1 of 2", "leak") for name, limit in (("a", 0.1), ("b", 0.2))]
    chart = limits_chart(rows, "t")
    assert [float(one["x1"]) for one in drawn(chart, "line", stroke=INK)] == [43, 86]


def test_how_many_steps_are_missing_is_what_the_gate_says() -> None:
    """The picture repeats the verdict's number."""
    found = audit(0, 6)
    rule = {"id": "rate", "event": "exact_sentence", "max_rate": 0.05}
    verdict = judge(found, rule)
    shown = _data(confidence.section(redact(found, [], verdict)))
    [row] = shown["rows"]
    assert row["note"] == f"0 of 6, passes after {verdict.rules[0].more_clean_steps} more clean steps"


@pytest.mark.parametrize("mode", list(TextMode))
def test_class_counts_are_drawn_in_mode_full_only(mode: TextMode) -> None:
    """They are private elsewhere."""
    text, guess = attempt(0, leaks=True), attempt(0, "llg", kind="labels", recall=0.5)
    found = results([step(0)], [text, guess])
    kept = [journal_entry(text, ("a", "b")), journal_entry(guess, counts=((3, 1), (2, 1)), names=("x", "y"))]
    section = labels.section(redact(found, kept, judge(found, RED_LINE), mode, allow_full=True, environ={}))
    pictures = _data(section)["pictures"]
    assert [one["said"] for one in pictures] == (
        ["llg: 1 of 2 class counts are right (50%); the others are wrong by 1.0 examples on average."]
        if mode is TextMode.FULL
        else []
    )


def test_texts_that_came_back_whole_fold_into_one() -> None:
    """In mode masked as a list, whose entries keep the anchors of the rules."""
    page = render_html(_shown(audit(12, 3)))
    assert "12 texts, all word for word" in page
    assert page.count('<li id="s-') == 12 and page.count('<article class="pair" id="s-') == 3


def test_an_equal_pair_is_shown_once_in_mode_full() -> None:
    """The true text is the recovered one."""
    one, other = attempt(0, leaks=True), attempt(1, recall=0.5)
    found = results([step(0), step(1)], [one, other])
    words = ("mail", "ann@example.org", "or", "not")
    kept = [journal_entry(one, words), journal_entry(other, words, ("mail", "ann@example.org", "xx", "not"))]
    page = render_html(redact(found, kept, judge(found, RED_LINE), TextMode.FULL, allow_full=True, environ={}))
    first = page.partition('id="s-0001"')[2].partition("</article>")[0]
    assert "True and recovered" in first and first.count("ann@example.org") == 1
    second = page.partition('id="s-0002"')[2].partition("</article>")[0]
    assert "Longest run" in second and "2 tokens side by side" in second
    assert page.count('<span class="tag">e-mail</span>') == 2


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see you on monday at 5", []),
        ("born 3.4.1987", ["date"]),
        ("call +49 171 5550199", ["phone or other long number"]),
        ("DE44 5001 0517 5407 3249 31", ["account number", "phone or other long number"]),
    ],
)
def test_a_class_of_personal_data_is_found_by_its_form(text: str, found: list[str]) -> None:
    """Ordinary words have none."""
    assert classes_in(text) == found


def test_every_colour_of_the_pictures_has_a_dark_one_and_markup_stays_text() -> None:
    """Names come from outside."""
    evil = '"><script>&'
    every = [(i, {evil: state}, None, 1.0, None) for i, state in enumerate(("error", "text leaked", "no leak event"))]
    chart = group_chart(groups_of(every), evil, evil)
    chart += distribution_chart([Column(evil, 1, "unsure")], evil, evil)
    chart += seconds_chart([Curve(evil, (1.0,), 2, 2.0, "words leaked", cut=False)], evil)
    chart += limits_chart([Limited(evil, 0.0, 0.0, 1.0, 0.1, evil, "open")], evil)
    chart += counts_chart({(0, 0): 3, (9, 1): 1}, evil)
    assert "<script" not in chart and " style=" not in chart
    assert set(re.findall(r"#[0-9a-fA-F]{6}\b", chart)) <= set(COLOURS)
