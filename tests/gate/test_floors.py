"""Floors: with too few steps in a phase, or too few texts, no rule passes."""

from __future__ import annotations

from typing import Any

import pytest

from leakaudit.capture.plan import steps_to_pass
from leakaudit.gate.verdict import Status
from leakaudit.results.schema import Results, VerificationStatus
from tests.support.factories import attempt, audit, changed, of_sequences, policy, results, sequence, step
from tests.support.judging import RATE, RED_LINE, judge

PHASES = ("early", "middle", "late")
LABELS = {"id": "labels", "event": "label_counts", "max_rate": 0.9}


def by_phase(*phases: str, **extra: Any) -> Results:
    """Build a clean audit whose steps lie in these phases."""
    steps = [step(i).model_copy(update={"phase": phase}) for i, phase in enumerate(phases)]
    return results(steps, [attempt(i) for i in range(len(phases))], **extra)


EVEN = by_phase(*PHASES * 20)
FEW_LATE = by_phase(*["early"] * 40, *["middle"] * 17, *["late"] * 3)
UNKNOWN = by_phase(*["simulated"] * 60)
EARLY_AND_LATE = {"min_steps_per_phase": {"early": 15, "middle": 15, "late": 15}}


@pytest.mark.parametrize(
    ("found", "floor", "said"),
    [
        (FEW_LATE, EARLY_AND_LATE, "there are 40 of 15 early, 17 of 15 middle, 3 of 15 late."),
        (UNKNOWN, EARLY_AND_LATE, "60 steps do not say in which part of a run they lie"),
        (EVEN, {"min_steps_per_phase": {"late": 21}}, "there are 20 of 21 late."),
        (EVEN, {"min_texts": 61}, "The policy asks for 61 texts that can have the event or score; there are 60."),
    ],
)
def test_a_rule_does_not_pass_below_a_floor(found: Results, floor: dict[str, Any], said: str) -> None:
    """The sentence says how many are asked for and how many are there."""
    assert judge(found, RATE).verdict is Status.PASS
    verdict = judge(found, RATE, evidence=floor)
    assert verdict.verdict is Status.INCONCLUSIVE and said in verdict.sentence
    assert any(said in reason for reason in verdict.rules[0].reasons)


@pytest.mark.parametrize("floor", [EARLY_AND_LATE, {"min_texts": 60}, {"min_steps_per_phase": {"late": 20}}])
def test_a_floor_that_is_reached_changes_nothing(floor: dict[str, Any]) -> None:
    """The number itself is enough."""
    assert judge(EVEN, RATE, evidence=floor) == judge(EVEN, RATE).model_copy(
        update={"policy_digest": judge(EVEN, RATE, evidence=floor).policy_digest}
    )


@pytest.mark.parametrize("floor", [EARLY_AND_LATE, {"min_texts": 10_000}])
def test_a_floor_never_hides_a_leak(floor: dict[str, Any]) -> None:
    """A recovered text fails with any amount of evidence."""
    assert judge(audit(1, 2), RED_LINE, evidence=floor).verdict is Status.FAIL


def test_steps_that_cannot_be_verified_reach_no_floor() -> None:
    """Only verified steps are evidence, so neither they nor their texts count."""
    steps = [
        step(i, VerificationStatus.VERIFIED if i < 60 else VerificationStatus.UNVERIFIABLE).model_copy(
            update={"phase": "early" if i < 60 else "late"}
        )
        for i in range(70)
    ]
    found = results(steps, [attempt(i) for i in range(70)])
    loose = {"max_unjudged": 0.5}
    assert judge(found, RATE, evidence=loose).verdict is Status.PASS
    late = judge(found, RATE, evidence=loose | {"min_steps_per_phase": {"late": 1}})
    assert late.verdict is Status.INCONCLUSIVE and "there are 0 of 1 late." in late.sentence
    texts = judge(found, RATE, evidence=loose | {"min_texts": 61})
    assert texts.verdict is Status.INCONCLUSIVE and "there are 60." in texts.sentence


def test_a_text_that_is_too_short_for_a_rule_is_no_text_of_it() -> None:
    """Each rule counts its own texts; two attacks on a text count it once."""
    both = (sequence("sq-0", 0.1), sequence("sq-1", 0.1, long_enough=False))
    tried = [of_sequences(attempt(i, name), both) for i in range(60) for name in ("span", "tag")]
    found = results([step(i, n_sequences=2) for i in range(60)], tried)
    found = changed(found, steps=tuple(s.model_copy(update={"n_tokens_bucket": "17-32"}) for s in found.steps))
    whole = {"id": "whole", "event": "exact_sequence", "max_rate": 0.05}
    verdict = judge(found, RATE, whole, evidence={"min_texts": 120})
    status = {rule.id: rule.status for rule in verdict.rules}
    assert status == {"rate": Status.INCONCLUSIVE, "whole": Status.PASS}
    assert "there are 60." in verdict.sentence


def test_copies_of_an_update_reach_no_floor() -> None:
    """Ten names for one step are one step and its texts."""
    copies = [step(i).model_copy(update={"snapshot": step(i % 59).snapshot}) for i in range(70)]
    found = results(copies, [attempt(i) for i in range(70)])
    verdict = judge(found, RATE, evidence={"min_steps_per_phase": {"early": 60}, "min_texts": 60})
    assert "there are 59 of 60 early." in verdict.sentence and "there are 59." in verdict.sentence


def test_an_audit_of_labels_holds_no_texts() -> None:
    """Pictures are no texts: a floor on texts is not reached by them."""
    found = results(
        [step(i) for i in range(60)],
        [attempt(i, "llg", kind="labels", sequences=()) for i in range(60)],
    )
    assert judge(found, LABELS).verdict is Status.PASS
    assert "there are 0." in judge(found, LABELS, evidence={"min_texts": 1}).sentence


def test_the_recorder_keeps_enough_steps_for_the_floors() -> None:
    """Kept steps are spread evenly, so the largest third decides."""
    assert steps_to_pass(policy(evidence={"min_steps_per_phase": {"late": 30}})) == 90
    assert steps_to_pass(policy(evidence={"min_steps_per_phase": {"late": 2}})) == 59
