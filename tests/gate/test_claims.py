"""Rules on the epsilon that an accountant gives."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from leakaudit.gate.early import decided
from leakaudit.gate.verdict import RuleVerdict, Status
from leakaudit.results.schema import Privacy
from tests.support.factories import NOW, attempt, audit, policy, results, step
from tests.support.judging import RATE, judge

CLAIM = {"id": "epsilon", "claimed_epsilon": {"max": 8, "delta_max": 1e-5}}

TOLD = Privacy(
    epsilon=3.1,
    delta=1e-5,
    accountant="opacus rdp",
    origin="accountant",
    steps=400,
    sampling="poisson",
    sampling_rate=0.01,
)


def answer(*found: Privacy, rule: dict[str, Any] = CLAIM, **extra: Any) -> RuleVerdict:
    """Judge 60 clean steps with these statements, and return the verdict on the claim."""
    verdict = judge(audit(0, 60, privacy=found, **extra), RATE, rule)
    return next(one for one in verdict.rules if one.id == rule["id"])


def changed(**keys: Any) -> Privacy:
    """Return the accountant's statement with other keys."""
    return TOLD.model_copy(update=keys)


def test_an_epsilon_within_the_limit_passes() -> None:
    """Wrong: a sentence that lends the number the audit's word."""
    found = answer(TOLD)
    assert found.status is Status.PASS
    assert found.sentence == (
        "The accountant (opacus rdp) says epsilon = 3.1 at delta = 1e-05 for 400 steps. The audit does not confirm this number. "
        "Policy allows epsilon up to 8 at delta up to 1e-05."
    )
    assert (found.kind, found.observed, found.threshold, found.k, found.n) == ("claimed_epsilon", 3.1, 8.0, None, 0)


@pytest.mark.parametrize(("epsilon", "status"), [(8.0, Status.PASS), (8.000001, Status.FAIL), (0.0, Status.PASS)])
def test_the_limit_itself_passes(epsilon: float, status: Status) -> None:
    """Wrong: a limit that excludes itself."""
    assert answer(changed(epsilon=epsilon)).status is status


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ((), "needs an accountant"),
        ((changed(epsilon=None, why_not="the noise multiplier was 0, so epsilon is infinite"),), "needs an accountant"),
        ((changed(origin="claim", accountant=""),), "does not name the accountant"),
        ((changed(covers="message"),), "of one message"),
        ((changed(delta=1e-4),), "at a delta of 0.0001, above 1e-05"),
        ((changed(delta=None),), "does not say at which delta"),
        ((changed(defense="dp-sgd"),), "needs an accountant"),
    ],
)
def test_what_no_accountant_shows_is_not_decided(found: tuple[Privacy, ...], why: str) -> None:
    """Wrong: PASS without an accountant, for one message, or at another delta."""
    got = answer(*found)
    assert got.status is Status.INCONCLUSIVE and why in " ".join(got.reasons)


def test_the_reason_of_a_missing_epsilon_is_said() -> None:
    """Wrong: "no accountant" where there is one that gives infinity."""
    assert "so epsilon is infinite" in answer(changed(epsilon=None, why_not="z is 0, so epsilon is infinite")).sentence


@pytest.mark.parametrize("keys", [{"delta": 1e-4}, {"covers": "message"}, {"origin": "claim", "accountant": ""}])
def test_too_large_an_epsilon_fails_whatever_else_is_unknown(keys: dict[str, Any]) -> None:
    """Wrong: INCONCLUSIVE where a smaller delta only makes epsilon larger."""
    assert answer(changed(epsilon=9.0, **keys)).status is Status.FAIL


def test_the_largest_of_several_epsilons_counts() -> None:
    """Wrong: a small claim hides what the accountant of the run says."""
    claim = changed(origin="claim", epsilon=1.0)
    assert answer(claim, changed(epsilon=9.0)).status is Status.FAIL
    assert answer(claim, TOLD).observed == 3.1


def test_a_claim_does_not_replace_an_accountant_that_saw_no_step() -> None:
    """Wrong: PASS by a claim where the run's accountant counted another run."""
    broken = changed(epsilon=None, why_not="the accountant counted 0 of the 5 steps of this run")
    got = answer(broken, changed(origin="claim"))
    assert got.status is Status.INCONCLUSIVE and "counted 0 of the 5 steps" in " ".join(got.reasons)
    absent = changed(epsilon=None, accountant="", why_not="no accountant is attached to the optimizer")
    assert answer(absent, changed(origin="claim")).status is Status.PASS


def test_shuffled_batches_are_named() -> None:
    """Wrong: an epsilon of Poisson samples for a run that shuffles, without a word."""
    assert "this run shuffles its batches" in answer(changed(sampling="shuffled")).sentence


def test_gaps_of_the_audit_keep_it_from_passing() -> None:
    """Wrong: PASS where the audit recovered a text from the update of another batch."""
    assert answer(TOLD, negative=(1, 1)).status is Status.INCONCLUSIVE


def test_a_claim_cannot_be_waved_through_without_an_attack() -> None:
    """Wrong: a policy that passes although no attack could fail it."""
    with pytest.raises(ValidationError, match="no recovered text could fail the policy"):
        policy(CLAIM)
    with pytest.raises(ValidationError, match="no recovered text could fail the policy"):
        policy(CLAIM, {**RATE, "level": "warn"})


@pytest.mark.parametrize(
    "rule",
    [
        {**CLAIM, "event": "exact_sentence"},
        {**CLAIM, "max_rate": 0.05},
        {"id": "epsilon", "claimed_epsilon": {"max": 0}},
        {"id": "epsilon", "claimed_epsilon": {"max": float("inf")}},
        {"id": "epsilon", "claimed_epsilon": {"max": 8, "delta_max": 0}},
        {"id": "epsilon", "claimed_epsilon": {"max": 8, "delta_max": 1}},
    ],
)
def test_limits_that_mean_nothing_are_refused(rule: dict[str, Any]) -> None:
    """Wrong: a rule with two limits, or one that no epsilon could violate."""
    with pytest.raises(ValidationError):
        policy(RATE, rule)


def test_a_defence_of_the_battery_has_its_own_epsilon() -> None:
    """Wrong: the shipped epsilon in the verdict on another defence."""
    rule = {**CLAIM, "scope": {"defense": "dp-sgd"}}
    found = answer(TOLD, changed(defense="dp-sgd", origin="computed", epsilon=20.0), rule=rule)
    assert (found.status, found.observed) == (Status.FAIL, 20.0)


def test_an_early_verdict_knows_the_claim() -> None:
    """Wrong: an exception, or a claim taken for a rate."""
    failed = audit(0, 60, privacy=(changed(epsilon=9.0),))
    assert decided(failed, policy(RATE, CLAIM), now=NOW) is Status.FAIL
    assert decided(audit(0, 200, privacy=(TOLD,)), policy(RATE, CLAIM), now=NOW) is Status.PASS


def test_a_claim_is_no_look_at_what_is_shipped() -> None:
    """Wrong: PASS where the attacks judged only a defence that the run does not ship."""
    other = RATE | {"scope": {"defense": "prune"}}
    found = results(
        [step(number) for number in range(60)],
        [
            attempt(number, defense=defense, leaks=defense == "none")
            for number in range(60)
            for defense in ("none", "prune")
        ],
        privacy=(TOLD,),
    )
    assert judge(found, other).verdict is Status.INCONCLUSIVE
    both = judge(found, other, CLAIM)
    assert both.verdict is Status.INCONCLUSIVE
    assert "No rule at level error looks at the update that the run ships" in both.sentence


def test_no_defence_is_recommended_by_an_accountant_alone() -> None:
    """Wrong: a defence that passes because no rule asks what attacks read under it."""
    other = RATE | {"scope": {"defense": "prune"}}
    computed = changed(defense="dp", origin="computed")
    tried = [attempt(n, defense=one, leaks=one != "prune") for n in range(60) for one in ("none", "prune", "dp")]
    found = judge(results([step(n) for n in range(60)], tried, privacy=(computed,)), other, CLAIM)
    assert not found.alternatives and found.way_out is not None and not found.way_out.defense
