"""Rules on how many texts of the steps an update names."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from leakaudit.gate.early import decided
from leakaudit.gate.explained import Seen, rule_topic
from leakaudit.gate.lint import Battery, lint
from leakaudit.gate.policy_diff import Direction, compare_policies
from leakaudit.gate.pooling import pool
from leakaudit.gate.verdict import RuleVerdict, Status
from leakaudit.reports.outputs.annex import annex
from leakaudit.reports.outputs.model_card import model_card
from leakaudit.reports.page import render_html
from leakaudit.reports.redaction import redact
from leakaudit.results.membership import Membership, MembershipPoint, MembershipStep
from leakaudit.results.schema import TextMode
from tests.support.factories import NOW, audit, policy, step_id
from tests.support.judging import RATE, judge

RULE = {"id": "members", "membership": {"max_tpr": 0.1}}


def named(found: int, of: int = 200, nonmembers: int = 600, steps: int = 20, **more: Any) -> Membership:
    """Return an audit that names some members, with an honest null."""
    counts: dict[str, Any] = {"found": found, "false": 6, "null": 8, "calibration": 20, "base": 3} | {
        key: more.pop(key) for key in ("false", "null") if key in more
    }
    each = tuple(
        MembershipStep(
            step=step_id(number),
            members=of // steps,
            nonmembers=nonmembers // steps,
            found=_share(found, number, steps),
            false=_share(counts["false"], number, steps),
            auc=0.7,
            base_auc=0.5,
            null_auc=0.5,
            null="another step",
        )
        for number in range(steps)
    )
    totals = {
        "calibration": 2000,
        "calibration_texts": 1500,
        "null_candidates": 800,
        "control_found": 4,
        "control_texts": 4,
        "guesses": 40,
        "right": 38,
        "pairs": of,
    }
    points = (MembershipPoint(false_rate=0.01, **counts),)
    return Membership(steps=each, points=points, **totals | more)


def _share(count: int, number: int, steps: int) -> int:
    """Return the part of a count that falls to one of the steps."""
    return count // steps + (number < count % steps)


def answer(found: Membership | None, rule: dict[str, Any] = RULE) -> RuleVerdict:
    """Judge 20 clean steps with this finding, and return the verdict on membership."""
    verdict = judge(audit(0, 20, membership=found), RATE, rule)
    return next(one for one in verdict.rules if one.id == rule["id"])


def test_few_named_texts_pass() -> None:
    """The upper bound decides, and the numbers are in the verdict."""
    found = answer(named(8))
    assert found.status is Status.PASS, found.reasons
    assert (found.kind, found.observed, found.threshold, found.k, found.n) == ("membership", 0.04, 0.1, None, 0)
    assert found.upper is not None
    assert found.upper < 0.1
    assert found.attacks == ("membership",)
    assert found.sentence.startswith(
        "8 of 200 texts of 20 steps are named at one false alarm in 100 (95% bounds 2% to 7%)"
    )


def test_many_named_texts_fail() -> None:
    """The lower bound is above the limit."""
    found = answer(named(60))
    assert found.status is Status.FAIL
    assert "Policy allows 10% at one false alarm in 100." in found.sentence


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (None, "It was not asked who was in the steps"),
        (named(60, null=60), "An update that holds none of the candidates names 60 of 800"),
        (named(60, false=60), "60 of 600 candidates of no step are named"),
        (named(60, nonmembers=80), "Only 80 candidates of no step; 100 are the fewest"),
        (named(60, null_candidates=0, null=0), "There is no update without the candidates"),
        (named(20), "on both sides of 0.1: audit more steps"),
        (named(8, control_found=3), "The attack names 3 of 4 texts of a known batch; 90% are asked for."),
        (named(8, control_found=0, control_texts=0), "The attack names 0 of 0 texts of a known batch"),
        (named(8, steps=10, left_out=("10 steps: parts",)), "10 of 20 steps were not asked (10 steps: parts)"),
    ],
)
def test_what_decides_nothing_has_a_reason(found: Membership | None, why: str) -> None:
    """Neither few nor many named texts count then."""
    verdict = answer(found)
    assert verdict.status is Status.INCONCLUSIVE
    assert any(why in reason for reason in verdict.reasons), verdict.reasons


def test_many_named_texts_fail_although_the_control_did_not_work() -> None:
    """A control shows that nothing was overlooked, and here something was found."""
    assert answer(named(60, control_found=0)).status is Status.FAIL


def test_another_rate_needs_its_threshold() -> None:
    """An audit with too few calibration texts has none."""
    rule = {"id": "members", "membership": {"max_tpr": 0.1, "false_rate": 0.05}}
    assert "are too few for one false alarm in 20" in answer(named(8), rule).reasons[0]
    with pytest.raises(ValidationError, match=r"audits fix a threshold for 0.01, 0.02, 0.05, 0.1; found 0.03"):
        policy(RATE, {"id": "members", "membership": {"max_tpr": 0.1, "false_rate": 0.03}})


def test_another_defence_was_not_asked() -> None:
    """Only the update that the run ships is."""
    found = answer(named(8), RULE | {"scope": {"defense": "prune(share=0.9)"}})
    assert found.status is Status.INCONCLUSIVE
    assert "of no other defence" in found.reasons[0]


def test_several_runs_add_up() -> None:
    """Counts are summed, and the names of steps tell the runs apart."""
    runs = [audit(0, 20, membership=named(n)) for n in (4, 6)]
    other = tuple(one.model_copy(update={"snapshot": f"{one.snapshot}0", "loss": 0.5}) for one in runs[1].steps)
    runs[1] = runs[1].model_copy(update={"steps": other})
    runs = [
        run.model_copy(update={"run": run.run.model_copy(update={"id": name})})
        for run, name in zip(runs, "ab", strict=True)
    ]
    found = pool(runs).results.membership
    assert found is not None
    assert (found.members, found.points[0].found, found.control_texts) == (400, 10, 8)
    assert (found.steps[0].step, found.steps[20].step) == (f"a/{step_id(0)}", f"b/{step_id(0)}")
    assert pool([audit(0, 20), audit(0, 20)]).results.membership is None
    again = [runs[0], runs[0].model_copy(update={"run": runs[1].run})]
    once = pool(again).results.membership
    assert once is not None
    assert once.members == 200  # the same steps count once


def test_nothing_is_decided_early() -> None:
    """Further steps may change the share that is named."""
    rules = policy(RATE, RULE)
    assert decided(audit(0, 20, membership=named(60)), rules, now=NOW) is None


def test_a_higher_limit_is_looser() -> None:
    """So is a lower false alarm rate, at which fewer texts are named."""
    old = policy(RATE, RULE)
    looser = policy(RATE, {"id": "members", "membership": {"max_tpr": 0.2}})
    tighter = policy(RATE, {"id": "members", "membership": {"max_tpr": 0.1, "false_rate": 0.05}})
    assert [change.direction for change in compare_policies(old, looser)] == [Direction.LOOSER]
    assert [change.direction for change in compare_policies(old, tighter)] == [Direction.TIGHTER]


def test_weak_rules_are_warned_of() -> None:
    """A limit that most texts may pass, and a rule without texts of no step."""
    rules = policy(RATE, {"id": "members", "membership": {"max_tpr": 0.6}})
    battery = Battery({"span": "text"}, frozenset({"none"}), 8, 3, 60.0, nonmembers=False)
    found = {(one.id, one.path[-1]) for one in lint(rules, battery)}
    assert {("wide-limit", "max_tpr"), ("not-configured", "membership")} <= found


def test_a_policy_of_membership_alone_is_refused() -> None:
    """No recovered text could fail it."""
    with pytest.raises(ValidationError, match="no recovered text could fail the policy"):
        policy(RULE)


CURVE = ((0.0, 0.2), (0.01, 0.3), (0.1, 0.5), (1.0, 1.0))


def test_report_card_and_annex_say_it() -> None:
    """Each has the sentence, and the report the picture with three lines."""
    found = audit(0, 20, membership=named(64, curve=CURVE, base_curve=CURVE, null_curve=CURVE))
    verdict = judge(found, RATE, RULE)
    said = "64 of 200 texts of 20 steps are named at one false alarm in 100"
    page = render_html(redact(found, [], verdict, TextMode.HASH))
    assert page.count(said) >= 2
    assert 'aria-label="Members named over false alarms"' in page
    for name in ("the update", "the model before the step alone", "an update without these texts"):
        assert f">{name}</text>" in page
    assert "Texts of the steps that the update names" in page
    assert f"**Membership:** {said}" in model_card(found, verdict)
    (row,) = [line for line in annex(found, verdict).splitlines() if "attribute and membership inference" in line]
    assert said in row
    assert "Membership" not in model_card(audit(0, 20), judge(audit(0, 20), RATE))


def test_the_rule_explains_itself() -> None:
    """What it limits, when it fails and passes, and what to do."""
    rules = policy(RATE, RULE)
    found = audit(0, 20, membership=named(60))
    said = dict(rule_topic(rules, rules.rules[1], Seen(found, judge(found, RATE, RULE))).parts)
    assert said["It limits"].startswith(
        "the share of the texts of the steps that the update names, at one false alarm in 100"
    )
    assert said["Allowed"].startswith("10%.")
    assert said["It fails if"] == "the 95% lower bound is above 10%."
    assert said["What to do"] == "Do not ship. Add noise, or send updates of more texts."
