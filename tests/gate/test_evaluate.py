"""The evaluation: what passes, what fails, and what stays inconclusive."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leakaudit.gate import evaluate as gate
from leakaudit.gate.verdict import Status, Verdict, to_json
from leakaudit.results import bounds as stats
from leakaudit.results.schema import AttemptStatus
from tests.support.factories import NOW, attempt, audit, policy, results, step
from tests.support.judging import RATE, RED_LINE, judge


@pytest.mark.parametrize(
    ("leaks", "clean", "expected"),
    [
        (0, 59, Status.PASS),
        (0, 58, Status.INCONCLUSIVE),
        (2, 58, Status.INCONCLUSIVE),
        (7, 53, Status.FAIL),
        (1, 92, Status.PASS),
        (0, 1, Status.INCONCLUSIVE),
        (0, 0, Status.INCONCLUSIVE),
    ],
)
def test_a_rate_passes_or_fails_by_its_bounds(leaks: int, clean: int, expected: Status) -> None:
    """PASS needs an upper bound up to the limit, FAIL a lower bound above it."""
    assert judge(audit(leaks, clean), RATE).verdict is expected


def test_one_leak_over_the_count_is_proof() -> None:
    """A red line needs no statistics and no floor to fail."""
    verdict = judge(audit(1, 0), RED_LINE)
    assert verdict.verdict is Status.FAIL
    assert verdict.rules[0].worst is not None and verdict.rules[0].worst.step == "st-000000"


def test_a_count_passes_only_with_enough_evidence() -> None:
    """No leak in 58 steps is below the floor of 59."""
    assert judge(audit(0, 58), RED_LINE).verdict is Status.INCONCLUSIVE
    assert judge(audit(0, 59), RED_LINE).verdict is Status.PASS
    assert "The policy asks for 59 steps of evidence; there are 58." in judge(audit(0, 58), RED_LINE).sentence


@pytest.mark.parametrize(("clean", "expected"), [(59, Status.PASS), (58, Status.INCONCLUSIVE)])
def test_a_verdict_on_an_interrupted_audit_says_so(clean: int, expected: Status) -> None:
    """Also if it is PASS; that of a complete audit does not."""
    whole = audit(0, clean)
    stopped = whole.model_copy(update={"run": whole.run.model_copy(update={"interrupted": True})})
    assert judge(stopped, RED_LINE).verdict is judge(whole, RED_LINE).verdict is expected
    assert f"Training or audit was interrupted: this covers {clean} steps." in judge(stopped, RED_LINE).sentence
    assert "interrupted" not in judge(whole, RED_LINE).sentence


def test_a_verdict_on_an_interrupted_audit_counts_the_steps_that_lack_attempts() -> None:
    """The one that was being attacked lacks some."""
    short = results([step(i) for i in range(60)], [attempt(i) for i in range(59)])
    stopped = short.model_copy(update={"run": short.run.model_copy(update={"interrupted": True})})
    assert "this covers 60 steps; 1 step lacks attempts that were due." in judge(stopped, RED_LINE).sentence


def test_the_cheapest_way_to_green_is_the_same_policy_under_another_defence() -> None:
    """Every tested defence is judged as if it were shipped."""
    leaks = {"none": True, "prune": False, "noise": True}
    attempts = [attempt(i, defense=name, leaks=leak) for i in range(60) for name, leak in leaks.items()]
    found = judge(results([step(i) for i in range(60)], attempts), RED_LINE, RATE)
    assert [(a.defense, a.status, a.open_rules) for a in found.alternatives] == [
        ("prune", Status.PASS, ()),
        ("noise", Status.FAIL, ("red-line", "rate")),
    ]


def test_warnings_never_change_the_verdict() -> None:
    """A failing rule at level warn is shown and nothing more."""
    warning = RED_LINE | {"id": "warning", "level": "warn", "event": "exact_sequence", "max_count": 0}
    verdict = judge(audit(3, 100), warning, {"id": "rate", "event": "exact_sentence", "max_rate": 0.5})
    assert (verdict.verdict, verdict.exit_code) == (Status.PASS, 0)
    assert [(rule.id, rule.status) for rule in verdict.rules] == [("rate", Status.PASS), ("warning", Status.FAIL)]


def test_the_worst_rule_decides() -> None:
    """One rule fails, one passes, one is open: the verdict is FAIL and comes first."""
    open_rule = {"id": "open", "event": "label_counts", "max_rate": 0.2}
    verdict = judge(audit(1, 92), open_rule, RATE, RED_LINE)
    assert [rule.status for rule in verdict.rules] == [Status.FAIL, Status.INCONCLUSIVE, Status.PASS]
    assert (verdict.verdict, verdict.deciding_rule, verdict.exit_code) == (Status.FAIL, "red-line", 3)


@pytest.mark.parametrize(
    ("statistic", "limit", "n", "expected"),
    [
        ("max", 0.3, 60, Status.PASS),
        ("max", 0.1, 60, Status.FAIL),
        ("max", 0.1, 2, Status.FAIL),
        ("max", 0.3, 2, Status.INCONCLUSIVE),
        ("mean", 0.3, 60, Status.PASS),
        ("mean", 0.1, 60, Status.FAIL),
        ("mean", 0.15, 60, Status.INCONCLUSIVE),
        ("mean", 0.3, 29, Status.INCONCLUSIVE),
        ("p95", 0.3, 60, Status.PASS),
        ("p95", 0.1, 60, Status.FAIL),
        ("p95", 0.3, 58, Status.INCONCLUSIVE),
    ],
)
def test_a_score_is_judged_by_its_bounds(statistic: str, limit: float, n: int, expected: Status) -> None:
    """Recall is 0.1 to 0.2 over the steps; of two attacks the worse one counts."""
    attempts = [attempt(i, recall=0.1 + 0.1 * i / max(1, n - 1)) for i in range(n)]
    attempts += [attempt(i, "tag", recall=0.01) for i in range(n)]
    rule = {"id": "m", "metric": "token_recall", "statistic": statistic, "max_value": limit}
    assert judge(results([step(i) for i in range(n)], attempts), rule).verdict is expected


def test_results_that_contradict_themselves_are_an_error() -> None:
    """Evidence that cannot be true is not judged."""
    ghost = attempt(0, status=AttemptStatus.ERROR, events=("exact_sentence",))
    found = results([step(0), step(0)], [ghost, attempt(9)], positive=(2, 1))
    verdict = judge(found, RED_LINE)
    assert (verdict.verdict, verdict.exit_code) == (Status.ERROR, 5)
    assert verdict.problems == (
        "step st-000000 is recorded twice",
        "attempts on step st-000009, which is not recorded",
        "attack span on step st-000000 did not run, but it names an event",
        "the positive control counts 2 of 1",
    )
    assert gate.unreadable("no such file", policy(), now=NOW).exit_code == 5


@settings(deadline=None)
@given(st.integers(0, 80), st.integers(0, 80), st.floats(0.01, 0.9))
def test_no_pass_above_the_limit_and_no_fail_below_it(leaks: int, clean: int, limit: float) -> None:
    """For all counts PASS means a bound below the limit, FAIL one above it."""
    verdict = judge(audit(leaks, clean), RATE | {"max_rate": limit}, evidence={"min_steps": 1})
    upper, lower = stats.upper_bound(leaks, leaks + clean), stats.lower_bound(leaks, leaks + clean)
    assert (verdict.verdict is Status.PASS) == (leaks + clean > 0 and upper <= limit)
    assert (verdict.verdict is Status.FAIL) == (lower > limit)
    assert verdict.exit_code == verdict.verdict.exit_code == {"PASS": 0, "FAIL": 3, "INCONCLUSIVE": 4}[verdict.verdict]


def test_a_verdict_survives_its_own_json() -> None:
    """`verdict.json` read back is the same verdict."""
    verdict = judge(audit(7, 53), RED_LINE, RATE)
    assert Verdict.model_validate(to_json(verdict)) == verdict
    assert to_json(verdict)["schema"] == "leakaudit.verdict/1"


def test_a_verdict_repeats_the_digest_of_its_results() -> None:
    """That of the content, whatever the layout of the file."""
    found = audit(0, 60)
    assert found.digest is not None
    assert judge(found, RED_LINE).results_digest == found.digest


def test_the_gate_runs_without_torch() -> None:
    """Importing it must load neither torch nor scipy."""
    code = "import sys, leakaudit.gate.evaluate; print(sorted({'torch', 'scipy', 'numpy'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(("above", "expected"), [(10, Status.FAIL), (3, Status.FAIL), (1, Status.INCONCLUSIVE)])
def test_a_percentile_that_is_surely_above_its_limit_fails_with_few_steps(above: int, expected: Status) -> None:
    """Ten of ten scores above 0.5 show that more than 5 % of all scores are."""
    found = results([step(i) for i in range(10)], [attempt(i, recall=0.9 if i < above else 0.1) for i in range(10)])
    rule = {"id": "overlap", "metric": "rougeL", "statistic": "p95", "max_value": 0.5}
    assert (stats.lower_bound(above, 10) > 0.05) == (expected is Status.FAIL)
    assert judge(found, rule).verdict is expected
