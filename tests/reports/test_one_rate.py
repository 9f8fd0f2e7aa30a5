"""One rule, one rate: the report counts the steps that the gate counts."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from leakaudit.gate.wording import at_most
from leakaudit.reports import redact
from leakaudit.reports.cells import cell_for, cell_of
from leakaudit.reports.comparison import compare, outcomes
from leakaudit.reports.header import facts
from leakaudit.reports.terminal import print_audit
from leakaudit.results.schema import AttemptStatus, Results
from tests.support.factories import attempt, audit, results, step
from tests.support.judging import RATE, judge


def test_the_comparison_of_defences_leaves_out_what_the_rule_leaves_out() -> None:
    """A step without a long text is no clean step: 7 of 7, not 7 of 10."""
    attempts = [attempt(i, leaks=i < 7, long_enough=i < 7) for i in range(10)]
    found = results([step(i) for i in range(10)], attempts)
    rule, seen = judge(found, RATE).rules[0], outcomes(found, "none", "exact_sentence")
    assert (rule.k, rule.n) == (seen.leaked, seen.finished) == (7, 7)


def test_a_cell_and_the_comparison_name_the_steps_that_nobody_could_judge() -> None:
    """The gate's bound is that of the cell: 17 unjudged steps are not clean."""
    ran, refused = AttemptStatus.RAN, AttemptStatus.NOT_APPLICABLE
    attempts = [attempt(i, status=refused if i < 17 else ran) for i in range(60)]
    found = results([step(i) for i in range(60)], attempts)
    rule, cell = judge(found, RATE).rules[0], cell_for(found, "span", "none")
    assert rule.upper is not None
    assert cell.lines[:3] == ("0 of 43 steps", "17 steps not judged", f"rate at most {at_most(rule.upper)}")
    assert outcomes(found, "none", "exact_sentence").unjudged == rule.unjudged == 17


def _texts_of_any_length() -> Results:
    """Build 10 steps that leak a text each, 7 of them a long one."""
    attempts = [attempt(i, leaks=True, long_enough=i < 7) for i in range(10)]
    return results([step(i) for i in range(10)], attempts)


def test_a_cell_counts_each_event_as_the_rule_on_it_does() -> None:
    """Texts of any length leaked in 10 of 10 steps, and long ones in 7 of 7."""
    found = _texts_of_any_length()
    rule, cell = judge(found, RATE).rules[0], cell_for(found, "span", "none")
    assert (rule.k, rule.n, cell.state) == (7, 7, "text leaked")
    [said] = [line for line in cell.lines if line.startswith("leaked: ")]
    assert "a sentence in 7 of 7" in said and "a whole text in 10 of 10" in said


def test_the_terminal_counts_the_steps_that_the_page_counts() -> None:
    """17 steps that nobody could judge are named in both."""
    ran, refused = AttemptStatus.RAN, AttemptStatus.NOT_APPLICABLE
    attempts = [attempt(i, status=refused if i < 17 else ran) for i in range(60)]
    found = results([step(i) for i in range(60)], attempts)
    out = StringIO()
    print_audit(redact(found, [], judge(found, RATE)), Console(file=out, width=120))
    assert ", ".join(cell_for(found, "span", "none").steps) == "0 of 43 steps, 17 steps not judged"
    assert "no leak event, 0 of 43 steps, 17 steps not judged" in out.getvalue()


def test_an_attack_that_did_not_read_its_canary_has_no_clean_steps() -> None:
    """The gate does not trust it, so its cell is not green."""
    found = results([step(i) for i in range(60)], [attempt(i) for i in range(60)], positive=(0, 1))
    cell = cell_for(found, "span", "none")
    assert (cell.state, cell.lines[0]) == ("not judged", "60 steps not judged: it did not read its canary")
    assert not [line for line in cell.lines if "rate" in line]
    leaks = results([step(i) for i in range(4)], [attempt(i, leaks=i < 2) for i in range(4)], positive=(0, 1))
    assert cell_for(leaks, "span", "none").lines[0] == "2 of 2 steps"


def test_the_chart_has_the_bounds_of_the_rule() -> None:
    """A search out of time counts as the gate counts it."""
    late = AttemptStatus.BUDGET_EXHAUSTED
    found = results(
        [step(i) for i in range(60)], [attempt(i, status=late if i < 6 else AttemptStatus.RAN) for i in range(60)]
    )
    rule, seen = judge(found, RATE).rules[0], outcomes(found, "none", "exact_sentence")
    assert (seen.lower, seen.upper, seen.unjudged) == (rule.lower, rule.upper, 6)
    cell = cell_for(found, "span", "none")
    assert cell.steps == ("0 of 54 steps",)
    assert any(line.startswith("out of time on 6 of 60 steps") for line in cell.lines)
    assert "not finished on 6 of 60 steps" in compare(seen, outcomes(found, "none", "exact_sentence"))


def test_the_first_screen_names_the_kind_of_each_positive_control() -> None:
    """Three controls of one name could not be told apart."""
    found = audit(0, 60, positive=(1, 3), negative=(0, 3))
    verdict = judge(found, RATE)
    [shown] = [fact for fact in facts(found, verdict) if fact.name == "Controls"]
    kinds = [control.kind for control in verdict.controls if control.name == "positive"]
    assert kinds and all(f"{kind} 1/3" in shown.value for kind in kinds)
    assert "negative 0/3" in shown.value and "positive" not in shown.value + shown.note


def test_a_cell_counts_the_leak_that_it_names() -> None:
    """Labels of eleven other steps are not texts of twenty."""
    found = results(
        [step(i) for i in range(24)],
        [one for i in range(24) for one in (attempt(i, leaks=i < 9), attempt(i, "llg", kind="labels", leaks=i < 20))],
    )
    every = cell_of(found, found.attempts, "none", whole=True)
    assert (every.word, every.count, every.bound) == ("text", "9/24", "≥ 21.1%")
    assert every.steps == ("9 of 24 steps", "in 11 other steps less came back")
    labels = cell_for(found, "llg", "none")
    assert (labels.word, labels.count, labels.steps) == ("labels", "20/24", ("20 of 24 steps",))
