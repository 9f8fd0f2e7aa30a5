"""What the pictures and tables of a report leave out, and what they must not."""

from __future__ import annotations

import html
from typing import Any

from leakaudit.gate.verdict import Verdict
from leakaudit.reports import redact
from leakaudit.reports.cells import cell_for
from leakaudit.reports.charts import StepMark, step_chart
from leakaudit.reports.next_actions import next_actions
from leakaudit.reports.page import render_html
from leakaudit.reports.sections import coverage, labels, risk, steps
from leakaudit.results.schema import Attempt, AttemptStatus, Results, TextMode
from tests.support.factories import attempt, audit, changed, journal_entry, results, step
from tests.support.judging import RED_LINE, judge

REFUSED = AttemptStatus.NOT_APPLICABLE


def test_no_audited_step_between_two_ticks_is_left_out() -> None:
    """Ten steps have ten ticks; many have ticks at equal distances."""
    for many, shown in ((10, list(range(10))), (30, list(range(0, 30, 3)))):
        marks = [StepMark(i, "span", "no leak event") for i in range(many)]
        drawn = str(step_chart(marks, [(i, 0.5) for i in range(many)], "", ""))
        assert all(f">{i}</text>" in drawn for i in shown)
        assert many == 10 or not any(f">{i}</text>" in drawn for i in (1, 2, 4, 28))


def test_a_class_that_no_text_has_is_a_row_as_well() -> None:
    """Its true count of 0 is what the reader compares with."""
    done = attempt(0, "llg", kind="labels")
    found = results([step(0)], [done])
    kept = [journal_entry(done, counts=((2, 0), (2, 0)), names=["spam", "ham"])]
    page = redact(found, kept, judge(found, RED_LINE), TextMode.FULL, allow_full=True, environ={})
    section = labels.section(page)
    assert section is not None
    [table] = section.context["counts"]
    assert [(name, true) for name, true, _ in table["rows"]] == [("spam", 2), ("ham", 0)]


def _refused() -> Results:
    """Build four steps that an attack refuses for reasons of other numbers."""
    tried: list[Attempt] = [
        attempt(i, status=REFUSED, reason=f"found none among {count}: every word occurs several times")
        for i, count in enumerate(("9-16", "17-32", "5-8", "9-16"))
    ]
    return results([step(i) for i in range(4)], tried)


def test_a_reason_is_said_once_whatever_its_numbers() -> None:
    """Twelve and fourteen words are one reason, not two."""
    found = _refused()
    cell = cell_for(found, "span", "none")
    assert sum("every word occurs" in line for line in cell.lines) == 1
    groups = _data(coverage.section(redact(found, [], judge(found, RED_LINE))))["groups"]
    assert [item["why"] for group in groups for item in group.items if "span" in item["what"]] == [
        "not applicable in 4 attempts: found none among 9-16: every word occurs several times"
    ]


def _data(section: Any) -> dict[str, Any]:
    found: dict[str, Any] = section.context
    return found


def test_a_leak_has_the_bound_that_is_proved() -> None:
    """Four of ten leaked: at least 15 %, not at most 69.6 %."""
    lines = cell_for(audit(4, 6), "span", "none").lines
    assert "rate at least 15%" in lines and not any("at most" in line for line in lines)


def _steps_of(found: Results) -> dict[str, Any]:
    return _data(steps.section(redact(found, [], judge(found, RED_LINE))))


def test_the_steps_that_nobody_could_judge_are_not_drawn_as_clean() -> None:
    """Neither an attack that refused nor one that read no canary shows anything."""
    tried = [attempt(i, status=REFUSED if i < 17 else AttemptStatus.RAN) for i in range(60)]
    lead = _steps_of(results([step(i) for i in range(60)], tried))["lead"]
    assert lead == "No leak event in 43 audited steps. 17 steps could not be judged."
    blind = _steps_of(audit(1, 59, positive=(0, 1)))
    assert blind["lead"].startswith("One step was audited, step 0") and "59 steps could not be judged." in blind["lead"]
    assert {state for row in blind["table"] for state in row["states"]} == {"text leaked", "not judged"}


def _way_out(found: Results, verdict: Verdict) -> str:
    return next_actions(found, verdict)[0].text.partition(" The evidence is valid")[0]


def test_a_policy_is_met_only_under_the_defence_that_it_judges() -> None:
    """A simulation may judge a defence that nobody ships; the section names it."""
    tried = [attempt(i, defense=name, leaks=name == "none") for i in range(60) for name in ("none", "prune")]
    found = results([step(i) for i in range(60)], tried)
    found = changed(found, run=found.run.model_copy(update={"simulated": True}))
    elsewhere = RED_LINE | {"scope": {"defense": "prune"}}
    assert _way_out(found, judge(found, elsewhere)) == (
        "The policy is met under prune, which the run does not ship; from the update that it ships, 60 of 60 texts word for word came back."
    )
    clean = audit(0, 60)
    assert _way_out(clean, judge(clean, RED_LINE)) == "The policy is met already."


def test_what_was_found_names_the_steps_that_were_not_judged() -> None:
    """Nothing recovered is not all that there is to say."""
    tried = [attempt(i, status=REFUSED if i < 17 else AttemptStatus.RAN) for i in range(60)]
    found = results([step(i) for i in range(60)], tried)
    said = _data(risk.section(redact(found, [], judge(found, RED_LINE))))["risk"]
    assert said.endswith("Up to 17 steps could not be judged.")


def test_a_narrow_screen_shows_the_verdict_and_says_where_it_is_cut() -> None:
    """Nothing is hidden; what is wider than the screen scrolls and says so."""
    found = audit(0, 60)
    page = html.unescape(render_html(redact(found, [], judge(found, RED_LINE))))
    narrow = page.partition("@media (max-width:28rem)")[2].partition("@media")[0]
    assert "display:none" not in narrow and "overflow-x:auto" in narrow
    assert "Scroll sideways" in page.partition("@media (max-width:40rem)")[2].partition("@media")[0]
