"""The panel of what each defence costs: marks, words, and what it leaves out."""

from __future__ import annotations

import html
import io
import math
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from leakaudit.gate.evaluate import evaluate
from leakaudit.gate.verdict import Verdict
from leakaudit.reports import print_verdict
from leakaudit.reports.charts import CLEAN, COLOURS, LATE, LEAK
from leakaudit.reports.frontier import best_attack, compared_defences, compared_rule
from leakaudit.reports.frontier_chart import BROAD, SLIM, FrontierPoint, frontier_chart
from leakaudit.reports.outputs.markdown import summary
from leakaudit.reports.page import render_html
from leakaudit.reports.redaction import redact
from leakaudit.reports.section import Section
from leakaudit.reports.sections.frontier import section
from leakaudit.reports.wording import next_step
from leakaudit.results.schema import (
    Attempt,
    AttemptStatus,
    Coverage,
    NotTested,
    Price,
    Privacy,
    Results,
    Utility,
    Verification,
    VerificationStatus,
)
from tests.gate.test_way_out import STEPS, clean, utility
from tests.reports.test_charts import drawn, marks
from tests.support.factories import NOW, attempt, policy, results, step


def leaking(defense: str, k: int) -> dict[str, list[Attempt]]:
    return {defense: [attempt(i, defense=defense, leaks=i < k) for i in range(STEPS)]}


def audited(tested: dict[str, list[Attempt]], **extra: Any) -> Results:
    """Return an audit whose undefended update leaks in every step."""
    attempts = [attempt(i, leaks=True) for i in range(STEPS)] + [one for ours in tested.values() for one in ours]
    return results([step(i) for i in range(STEPS)], attempts, **extra)


def judged(found: Results) -> Verdict:
    return evaluate(found, policy(), now=NOW)


def panel(found: Results) -> Section:
    shown = section(redact(found, [], judged(found)))
    assert shown is not None
    return shown


def page(found: Results) -> str:
    """Return the panel as a reader gets it, without tags."""
    whole = render_html(redact(found, [], judged(found)))
    part = whole.partition('<section id="frontier"')[2].partition("</section>")[0]
    return html.unescape(re.sub(r"<[^>]*>", "", part))


def test_without_another_defence_there_is_no_panel() -> None:
    """An empty chart would look like a result."""
    found = audited({})
    assert section(redact(found, [], judged(found))) is None


@pytest.mark.parametrize("count", [1, 3, 12])
def test_every_measured_defence_has_one_mark_and_one_row(count: int) -> None:
    """None is lost where many stand at the same place."""
    names = [f"noise(scale={n})" for n in range(count)]
    found = audited(
        {name: one for each in names for name, one in clean(each).items()},
        utility=tuple(utility(name, -0.01, (-0.02, 0.0)) for name in names),
    )
    shown = panel(found).context
    for chart in (shown["chart"], shown["slim"]):
        assert len(drawn(chart, "path", stroke_width="1.6")) == count + 1
        words = [element.text for element in ElementTree.fromstring(chart).iter("{http://www.w3.org/2000/svg}text")]
        assert {"none", *map(str, range(1, count + 1))} <= {*words}
    assert [row["number"] for row in shown["rows"]] == ["", *map(str, range(1, count + 1))]
    assert len(shown["table"]) == count + 1


def test_a_mark_stands_at_the_loss_and_at_the_upper_bound_that_the_gate_gives() -> None:
    """The axis of losses ends 6 % beyond the data, that of rates is a square root."""
    found = audited(leaking("prune", 30), utility=(utility("prune", -0.1, (-0.2, 0.0)),))
    [figures] = judged(found).alternatives[0].rules
    assert figures.upper is not None
    # from 0 to 20 points with 1.2 points of room at both ends; the loss is 10 points, in the middle
    assert marks(panel(found).context["chart"], fill=LEAK) == [
        (
            pytest.approx(BROAD.width / 2, abs=0.01),
            pytest.approx(BROAD.height * (1 - math.sqrt(figures.upper)), abs=0.01),
        )
    ]


def test_where_lower_is_better_an_increase_stands_on_the_right() -> None:
    """Worse is always on the right, and the axis says of what."""
    worse = Utility(defense="prune", metric="loss", value=3.0, baseline=2.0, higher_is_better=False, difference=1.0)
    shown = panel(audited(clean("prune"), utility=(worse,))).context
    [(x, _)] = marks(shown["chart"], fill=CLEAN)
    [(origin, _)] = marks(shown["chart"], fill="#23211e")
    assert x > origin
    assert "increase of loss" in shown["chart"] and "points" not in shown["caption"]


def test_a_missing_interval_is_not_drawn_and_not_zero() -> None:
    """One seed gives no interval: the table says none, and no bar stands in the chart."""
    alone = panel(audited(clean("prune"), utility=(utility("prune", -0.1, None),))).context
    both = panel(audited(clean("prune"), utility=(utility("prune", -0.1, (-0.2, 0.0)),))).context
    assert alone["table"][1]["within"] == "none" and both["table"][1]["within"] == "0.0 to +20.0"
    bars = [len(drawn(shown["chart"], "line", stroke=CLEAN)) for shown in (alone, both)]
    assert bars == [2, 6], "the bound downwards with its end; and two sides with their ends"


def test_a_dominated_defence_is_hollow_and_the_others_are_filled() -> None:
    """Also one that is worse than no defence at all."""
    costs = (utility("good", -0.01), utility("dear", -0.05), utility("useless", -0.02))
    shown = panel(audited(clean("good") | clean("dear") | leaking("useless", STEPS), utility=costs)).context
    assert {row["name"]: row["hollow"] for row in shown["table"]} == {
        "none": "no",
        "1. good": "no",
        "2. dear": "yes",
        "3. useless": "yes",
    }
    assert (
        len(marks(shown["chart"], fill=CLEAN)) == 1
        and len(marks(shown["chart"], stroke=CLEAN, stroke_width="1.6")) == 2
    )


def test_strengths_of_one_defence_stand_in_their_order_on_one_line() -> None:
    """A line through 0.1, 1 and 0.01 would go back and forth."""
    names = ["noise(scale=0.1)", "prune", "noise(scale=1)", "noise(scale=0.01)"]
    costs = tuple(utility(name, -0.01 * n) for n, name in enumerate(names, start=1))
    found = audited({name: one for each in names for name, one in clean(each).items()}, utility=costs)
    assert [row.defense for row in compared_defences(found, judged(found))] == [
        "none",
        "noise(scale=0.01)",
        "noise(scale=0.1)",
        "noise(scale=1)",
        "prune",
    ]
    assert [one["d"].count("L") for one in drawn(panel(found).context["chart"], "path", stroke_width="1.5")] == [2]


def test_a_defence_without_a_measured_utility_is_listed_with_the_reason() -> None:
    """It has no place in the chart, and certainly not at zero."""
    costs = (utility("known", -0.01), utility("breaks", 0.0, diverged=2))
    said = Coverage(
        not_tested=(NotTested(what="utility under unfit", why="it needs a gradient of each example."),),
        audited_steps=STEPS,
    )
    tested = clean("known") | clean("breaks") | clean("unmeasured") | clean("unfit")
    found = audited(tested, utility=costs, coverage=said)
    assert panel(found).context["left_out"] == [
        ("breaks", "2 trainings under it diverged"),
        ("unmeasured", "its utility was not measured"),
        ("unfit", "it needs a gradient of each example"),
    ]
    assert len(drawn(panel(found).context["chart"], "path", stroke_width="1.6")) == 2


def test_without_any_utility_the_panel_says_so_and_gives_the_command() -> None:
    """With the tested defences, quoted for a shell."""
    found = audited(clean("noise(scale=0.1)") | clean("it's"))
    assert panel(found).context["chart"] is None
    words = page(found)
    assert "What the defences cost the model was not measured, so there is no chart." in words
    assert "--defenses 'none,noise(scale=0.1),it'\"'\"'s' --out FOLDER" in words


def test_epsilon_stands_beside_a_point_only_where_an_accountant_gave_one() -> None:
    """A claim without a number is a reason, and never 0."""
    claims = (
        Privacy(defense="a", epsilon=8.0, delta=1e-5, accountant="opacus rdp"),
        Privacy(defense="b", why_not="the noise is not accounted for"),
    )
    costs = tuple(utility(name, -0.01) for name in "abc")
    found = audited(clean("a") | clean("b") | clean("c"), utility=costs, privacy=claims)
    shown = panel(found).context
    assert shown["chart"].count("ε") == 1 and "1, ε 8" in shown["chart"]
    assert [row["epsilon"] for row in shown["rows"]] == [
        "none",
        "8, delta 1e-05 (opacus rdp)",
        "none: the noise is not accounted for",
        "none",
    ]


def test_prices_are_multiples_and_missing_ones_are_said() -> None:
    """No price is 1 or 0 because nobody measured it."""
    found = audited(clean("a") | clean("b"), prices=(Price(defense="a", seconds=1.25, traffic=0.03125),))
    rows = panel(found).context["rows"]
    assert [(row["seconds"], row["traffic"]) for row in rows] == [
        ("1", "1"),
        ("1.25", "0.03"),
        ("not measured", "not measured"),
    ]
    assert "Step time and traffic are multiples" in page(found)
    assert "Step time and traffic were not measured. No accountant stated an epsilon." in page(audited(clean("a")))


def test_the_strongest_attack_is_named_with_what_it_knew() -> None:
    """If nothing came back, all that could have shown it are named."""
    attempts = {
        "d": [
            *(attempt(i, "span", "d", leaks=i < 3, adaptive=False) for i in range(STEPS)),
            *(attempt(i, "tag", "d", leaks=i < 2) for i in range(STEPS)),
        ],
        "e": [
            *(attempt(i, "span", "e") for i in range(STEPS)),
            *(attempt(i, "llg", "e", kind="labels") for i in range(STEPS)),
            *(attempt(i, "late", "e", status=AttemptStatus.NOT_APPLICABLE) for i in range(STEPS)),
        ],
    }
    found = audited(attempts)
    rows = panel(found).context["rows"]
    assert [row["attack"] for row in rows] == [
        "span (60 of 60 steps)",
        "span (3 of 60 steps); it did not know the defence",
        "none of span; it knew the defence",
    ]
    rule = compared_rule(judged(found))
    assert rule is not None and best_attack(found, "nobody", rule) is None


def test_a_naive_pass_is_not_drawn_as_one_that_passes() -> None:
    """Its mark is that of an undecided defence, and the table says why."""
    found = audited(clean("naive", adaptive=False), utility=(utility("naive", 0.0, (-0.01, 0.01)),))
    shown = panel(found).context
    assert not marks(shown["chart"], stroke=CLEAN, stroke_width="1.6") and len(marks(shown["chart"], stroke=LATE)) == 1
    assert shown["rows"][1]["passes"] == "only against attacks that did not know it" and not shown["rows"][1]["chosen"]
    assert shown["line"] == ""


def test_panel_summary_and_terminal_name_the_same_defence_with_its_cost() -> None:
    """A reader of one of them gets the same advice."""
    costs = (utility("freeze(first=2)", -0.003, (-0.009, 0.002)), utility("noise", -0.1, (-0.12, -0.08)))
    found = audited(clean("noise") | clean("freeze(first=2)"), utility=costs)
    verdict = judged(found)
    words = page(found)
    seen = "no sentence in 60 steps (at most 4.9%)"
    assert f"Cheapest way to green: freeze(first=2): {seen}, accuracy -0.3 points [-0.9, +0.2]." in words
    assert 'In the training script: LeakAuditCallback(defense="freeze(first=2)")' in words
    step = f"ship freeze(first=2): {seen}, at a cost of accuracy -0.3 points [-0.9, +0.2]."
    assert next_step(verdict) == step
    out = io.StringIO()
    print_verdict(verdict, console=Console(file=out, width=200, no_color=True))
    assert f"next: {step}" in out.getvalue()
    assert "choose a defence that passes, and audit again. Ship freeze" in summary(verdict)


def test_a_verdict_that_passes_recommends_nothing() -> None:
    """What is shipped is good enough, so nobody is told to change it."""
    attempts = [attempt(i, defense=name) for i in range(STEPS) for name in ("none", "d")]
    found = results([step(i) for i in range(STEPS)], attempts, utility=(utility("d", -0.1, (-0.2, 0.0)),))
    shown = panel(found).context
    assert (next_step(judged(found)), shown["line"], shown["way_out"]) == ("", "", "The policy is met already.")


def test_what_the_run_sends_has_a_row_of_its_own_beside_no_defence() -> None:
    """If something changed the update, `no defence` is what the training produced."""
    leaks = {"none": STEPS, "as-sent": 30, "d": 0}
    attempts = [attempt(i, defense=name, leaks=i < k) for name, k in leaks.items() for i in range(STEPS)]
    stamp = Verification(status=VerificationStatus.VERIFIED, relative_error=1e-6)
    steps = [step(i, shipped="noise").model_copy(update={"sent": stamp}) for i in range(STEPS)]
    found = results(steps, attempts, utility=(utility("d", -0.1, (-0.2, 0.0)),))
    shown = panel(found).context
    assert [(row["name"], row["leak"].partition(",")[0], row["status"]) for row in shown["rows"]] == [
        ("no defence", "60 of 60 steps", ""),
        ("as sent", "30 of 60 steps", "FAIL"),
        ("d", "0 of 60 steps", "PASS"),
    ]
    assert shown["left_out"] == [("as sent", "its utility was not measured")]


def test_one_step_gives_no_chart() -> None:
    """Its bound is 95 %, whatever the defence."""
    attempts = [attempt(0, leaks=True), attempt(0, defense="d")]
    found = results([step(0)], attempts, utility=(utility("d", -0.1, (-0.2, 0.0)),))
    assert panel(found).context["chart"] is None
    assert panel(found).context["left_out"] == [("d", "one step gives no bound")]


def test_a_policy_without_a_rate_and_results_that_contradict_themselves_still_get_a_panel() -> None:
    """Both without a chart, and with the reason."""
    cost = (utility("d", -0.1, (-0.2, 0.0)),)
    found = audited(clean("d"), utility=cost)
    by_value = policy({"id": "value", "metric": "rougeL", "statistic": "mean", "max_value": 0.2})
    shown = section(redact(found, [], evaluate(found, by_value, now=NOW)))
    assert shown is not None and shown.context["chart"] is None
    twice = results([step(0), step(0)], [attempt(0, defense="d")], utility=cost)
    words = page(twice)
    assert "Fix the problems with the evidence first." in words and "no rule of the policy was applied to it" in words


def test_long_and_hostile_names_stay_in_the_table() -> None:
    """The chart has numbers, so no name can leave its frame."""
    name = "<b>" + "W" * 300 + "(knob=1"
    cost = Utility(defense=name, metric="M" * 300, value=0.8, baseline=0.9, difference=-0.1)
    whole = render_html(redact(found := audited(clean(name), utility=(cost,)), [], judged(found)))
    assert "<b>W" not in whole
    chart = panel(found).context["slim"]
    labels = [one.text or "" for one in ElementTree.fromstring(chart).iter("{http://www.w3.org/2000/svg}text")]
    assert max(map(len, labels)) < 45


@pytest.mark.parametrize("size", [BROAD, SLIM])
def test_names_of_six_marks_at_one_place_do_not_meet_and_colours_are_known(size: Any) -> None:
    """Six defences that cost nothing and stop nothing: the worst case for names."""
    points = [FrontierPoint(str(n), 0.01 * n, (-1.0, 1.0), 1.0, 0.95, "fails") for n in range(1, 7)]
    chart = frontier_chart(points, 0.05, "loss", size, "title", "words")
    names = [one for one in drawn(chart, "text", fill="#23211e")][-6:]
    rooms = [tuple(map(float, re.findall(r"[-\d.]+", one["transform"]))) for one in names]
    assert len({*rooms}) == 6
    assert all(abs(a[0] - b[0]) >= 7 or abs(a[1] - b[1]) >= 12 for a in rooms for b in rooms if a != b)
    assert {*re.findall(r"#[0-9a-f]{6}\b", chart)} <= {*COLOURS}
    assert " style=" not in chart and 'aria-label="title"' in chart and "<desc>words</desc>" in chart
