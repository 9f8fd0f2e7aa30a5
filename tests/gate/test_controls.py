"""The two controls and the age of the evidence: what keeps a rule from passing."""

from __future__ import annotations

from datetime import timedelta

import pytest

from leakaudit.gate import early
from leakaudit.gate import evaluate as gate
from leakaudit.gate.policy import round_policy
from leakaudit.gate.verdict import Status
from leakaudit.history.rates import rates_of
from leakaudit.results.schema import AttackEntry, Attempt, AttemptStatus, Kind, KindControl, Results, Tally
from tests.support.factories import NOW, attempt, audit, changed, policy, results, step
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


CLEAN = 60
LABELS = {"id": "labels", "event": "label_counts", "max_rate": 0.05}
WORDS = {"id": "words", "event": "all_words", "max_rate": 0.05}


def _controlled(by: dict[Kind, dict[str, int]], *tried: Attempt, of: int = 3) -> Results:
    """Build an audit whose attacks recovered some kinds from `of` canary steps."""
    found = results([step(i) for i in range(CLEAN)], tried, positive=(of, of), negative=(0, of))
    kinds = {
        kind: KindControl(k=max(own.values()), n=of, by={name: Tally(k=k, n=of) for name, k in own.items()})
        for kind, own in by.items()
    }
    return changed(found, controls=found.controls.model_copy(update={"kinds": kinds}))


def _both() -> list[Attempt]:
    """Return clean attempts of an attack on texts and of one on labels."""
    return [one for i in range(CLEAN) for one in (attempt(i, "dlg"), attempt(i, "llg", kind="labels"))]


def test_a_label_attack_is_no_control_of_a_rule_on_texts() -> None:
    """Each rule takes the control of its own kind."""
    found = _controlled({"text": {"dlg": 0}, "words": {"dlg": 0}, "labels": {"llg": 3}}, *_both())
    verdict = judge(found, RED_LINE, WORDS, LABELS)
    assert {r.id: r.status for r in verdict.rules} == {
        "red-line": Status.INCONCLUSIVE,
        "words": Status.INCONCLUSIVE,
        "labels": Status.PASS,
    }
    said = "None of the attacks behind this rule (dlg) read its canary as the policy asks. The text of the canary was recovered by dlg in 0 of 3"
    assert said in verdict.sentence
    assert [(c.kind, c.by, c.state, c.k) for c in verdict.controls] == [
        ("text", "dlg", "failed", 0),
        ("words", "dlg", "failed", 0),
        ("labels", "llg", "ok", 3),
        (None, "", "ok", 0),
    ]
    assert gate.evaluate_step(found, round_policy(), "st-000000", now=NOW)[0] is Status.INCONCLUSIVE


def test_a_control_of_an_attack_without_evidence_helps_no_rule() -> None:
    """Span read the canary and did not apply to a step; what counts is only tag."""
    refused = [attempt(i, "span", status=AttemptStatus.NOT_APPLICABLE) for i in range(CLEAN)]
    tried = [*refused, *(attempt(i, "tag") for i in range(CLEAN))]
    assert judge(_controlled({"text": {"span": 3, "tag": 0}}, *tried), RED_LINE).verdict is Status.INCONCLUSIVE
    assert judge(_controlled({"text": {"span": 0, "tag": 3}}, *tried), RED_LINE).verdict is Status.PASS


def test_a_step_on_which_only_a_blind_attack_found_nothing_is_not_judged() -> None:
    """One step that span judged does not vouch for 59 that it did not."""
    ran, refused = AttemptStatus.RAN, AttemptStatus.NOT_APPLICABLE
    tried = [attempt(i, "span", status=refused if i else ran) for i in range(CLEAN)]
    tried += [attempt(i, "tag") for i in range(CLEAN)]
    rule = judge(_controlled({"text": {"span": 3, "tag": 0}}, *tried), RED_LINE).rules[0]
    assert (rule.status, rule.n, rule.unjudged, rule.trusted) == (Status.INCONCLUSIVE, 1, 59, ("span",))
    assert "59 of 60 audited steps could not be judged (only attacks that did not read their canary" in rule.sentence
    tried[-1] = attempt(CLEAN - 1, "tag", leaks=True)
    assert judge(_controlled({"text": {"span": 3, "tag": 0}}, *tried), RED_LINE).verdict is Status.FAIL


def test_results_that_do_not_name_the_reader_of_the_canary_do_not_pass() -> None:
    """Results before schema 1.5 have one count for all attacks."""
    found = audit(0, CLEAN)
    old = changed(found, controls=found.controls.model_copy(update={"kinds": {}}))
    assert judge(old, RED_LINE).verdict is Status.INCONCLUSIVE
    assert "audit again with this version" in judge(old, RED_LINE).sentence


def _goal(goal: Kind) -> AttackEntry:
    return AttackEntry(label="", meaning="", source="", goal=goal, threat_model="")


@pytest.mark.parametrize(("goal", "expected"), [("labels", Status.PASS), ("text", Status.INCONCLUSIVE)])
def test_an_audit_of_labels_alone_needs_no_negative_control(goal: Kind, expected: Status) -> None:
    """It compares texts and words, and such an audit guesses none."""
    tried = [attempt(i, "llg", kind="labels") for i in range(CLEAN)]
    found = results([step(i) for i in range(CLEAN)], tried, negative=(0, 0))
    described = found.catalogue.model_copy(update={"attacks": {"llg": _goal(goal)}})
    assert judge(changed(found, catalogue=described), LABELS).verdict is expected


def test_an_early_stop_and_the_nights_trust_whom_the_gate_trusts() -> None:
    """Steps that only a blind attack found clean are not judged there either."""
    ran, refused, many = AttemptStatus.RAN, AttemptStatus.NOT_APPLICABLE, 400
    tried = [attempt(i, "span", status=ran if i < many - 20 else refused) for i in range(many)]
    tried += [attempt(i, "tag") for i in range(many)]
    whole = results([step(i) for i in range(many)], tried, positive=(3, 3), negative=(0, 3))
    by = {"span": Tally(k=3, n=3), "tag": Tally(k=0, n=3)}
    controls = whole.controls.model_copy(update={"kinds": {"text": KindControl(k=3, n=3, by=by)}})
    blind = changed(whole, controls=controls)
    rate = policy({"id": "rate", "event": "exact_sentence", "max_rate": 0.08})
    assert early.decided(whole, rate, now=NOW) is Status.PASS
    assert gate.evaluate(blind, rate, now=NOW).verdict is Status.PASS
    assert early.decided(blind, rate, now=NOW) is None
    counts = {night.attack: (night.n, night.unjudged) for night in rates_of(blind, rate)}
    assert counts["any"] == (many - 20, 20)


def test_an_early_fail_counts_unjudged_steps_as_clean() -> None:
    """Thirty leaks of forty judged steps say less if 260 were not judged."""
    tried = [
        attempt(i, leaks=i < 30, status=AttemptStatus.RAN if i < 40 else AttemptStatus.NOT_APPLICABLE)
        for i in range(300)
    ]
    found = results([step(i) for i in range(300)], tried)
    rate = policy({"id": "rate", "event": "exact_sentence", "max_rate": 0.07})
    assert gate.evaluate(found, rate, now=NOW).verdict is Status.FAIL
    assert early.decided(found, rate, now=NOW) is None
