"""The two controls and the age of the evidence: what keeps a rule from passing."""

from __future__ import annotations

from datetime import timedelta

import pytest

from leakaudit.gate import evaluate as gate
from leakaudit.gate.verdict import Status
from tests.support.factories import NOW, audit, changed, policy
from tests.support.judging import RED_LINE, judge


def test_a_blind_audit_cannot_pass_but_what_it_saw_stands() -> None:
    """A failed positive control makes a pass undecided and leaves a fail alone."""
    assert judge(audit(0, 60, positive=(0, 1)), RED_LINE).verdict is Status.INCONCLUSIVE
    assert "so this audit may be blind" in judge(audit(0, 60, positive=(0, 1)), RED_LINE).sentence
    assert judge(audit(1, 59, positive=(0, 1)), RED_LINE).verdict is Status.FAIL
    assert judge(audit(0, 60, positive=(0, 0)), RED_LINE).verdict is Status.INCONCLUSIVE


def test_a_broken_audit_decides_nothing() -> None:
    """If the text of another batch is "recovered", not even a leak is believed."""
    verdict = judge(audit(60, 0, negative=(1, 1)), RED_LINE)
    assert verdict.verdict is Status.INCONCLUSIVE
    assert "the scores of this audit are wrong" in verdict.sentence


@pytest.mark.parametrize(
    ("k", "n", "state"),
    [(1, 1, "ok"), (0, 1, "failed"), (9, 10, "ok"), (29, 29, "ok"), (28, 29, "failed"), (0, 0, "not run")],
)
def test_controls_use_the_bound_where_it_can_be_reached(k: int, n: int, state: str) -> None:
    """Nine of ten is as good as it gets below 29 steps; 28 of 29 no longer is."""
    assert judge(audit(0, 60, positive=(k, n)), RED_LINE).controls[0].state == state
    mirrored = {"failed": "failed" if n == 1 else "unproven"}.get(state, state)
    assert judge(audit(0, 60, negative=(n - k, n)), RED_LINE).controls[1].state == mirrored


def test_old_evidence_does_not_pass() -> None:
    """Results that are too old or have no date leave every rule inconclusive.

    Results from the future are an error.
    """
    found, rules = audit(0, 60), policy(RED_LINE)
    assert gate.evaluate(found, rules, now=NOW + timedelta(days=6)).verdict is Status.PASS
    late = gate.evaluate(found, rules, now=NOW + timedelta(days=8))
    assert "The evidence is 8.1 days old; the policy allows 7d." in late.sentence
    early = gate.evaluate(found, rules, now=NOW - timedelta(days=1))
    assert (early.verdict, early.problems) == (Status.ERROR, ("the results are dated in the future",))
    assert judge(audit(0, 60, finished=""), RED_LINE).verdict is Status.INCONCLUSIVE
    backwards = changed(found, run=found.run.model_copy(update={"started": "2026-11-02T11:30:00Z"}))
    assert "By its own clock the audit finished before it started" in gate.evaluate(backwards, rules, now=NOW).sentence
    assert gate.evaluate(backwards, rules, now=NOW).verdict is Status.INCONCLUSIVE
    assert late.valid_until == "2026-11-09T10:00:00Z"
