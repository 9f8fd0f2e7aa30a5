"""The gate: what passes, what fails, and above all what is not decided."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leakaudit import registry
from leakaudit.errors import ConfigError
from leakaudit.gate import evaluate as gate
from leakaudit.gate.policy import Policy, default_policy, load_policy
from leakaudit.gate.verdict import Status, Verdict, to_json
from leakaudit.gate.wording import percent
from leakaudit.plugins import names as catalogue
from leakaudit.results import bounds as stats
from leakaudit.results.schema import Attempt, AttemptStatus, Results, Score, StepRecord, VerificationStatus
from tests.support.factories import (
    NOW,
    attempt,
    audit,
    changed,
    of_sequences,
    policy,
    results,
    sequence,
    step,
    with_scores,
)

RED_LINE = {"id": "red-line", "severity": "critical", "event": "exact_sentence", "max_count": 0}
RATE = {"id": "rate", "event": "exact_sentence", "max_rate": 0.05}


def judge(found: Results, *rules: dict[str, Any], **extra: Any) -> Verdict:
    return gate.evaluate(found, policy(*rules, **extra), now=NOW)


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


def test_a_failed_rate_says_so_in_numbers() -> None:
    """The sentence of the design, word by word."""
    steps = [step(i, shipped="noise 0.05") for i in range(60)]
    assert judge(results(steps, [attempt(i, leaks=i < 7) for i in range(60)]), RATE).sentence == (
        "In 7 of 60 audited client steps (11.7%, 95% lower bound 5.6%) at least one sentence of 8+ tokens was "
        "recovered exactly under the defence you ship (noise 0.05). Policy allows 5%."
    )


def test_an_undecided_rate_says_how_many_more_steps_would_decide() -> None:
    """0 of 12 may still be 22 %; 47 more clean steps make 59."""
    verdict = judge(audit(0, 12), RATE, evidence={"min_steps": 1})
    assert verdict.sentence == (
        "In none of 12 audited client steps was a sentence of 8+ tokens recovered exactly from the updates you ship "
        "(no defence); 95% upper bound 22.1%. Policy allows 5%. 47 more clean steps would decide."
    )
    assert verdict.rules[0].more_clean_steps == 47
    assert judge(audit(0, 59), RATE, evidence={"min_steps": 1}).verdict is Status.PASS


def test_one_step_gets_no_interval() -> None:
    """With one step there is nothing to dress up."""
    verdict = judge(audit(0, 1), RATE)
    assert "1 client step audited: no sentence of 8+ tokens was recovered exactly" in verdict.sentence
    assert "The rate may be anything up to 95%." in verdict.sentence


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


@pytest.mark.parametrize("status", [AttemptStatus.ERROR, AttemptStatus.NOT_APPLICABLE, AttemptStatus.SKIPPED])
def test_an_attack_that_did_not_run_is_never_a_pass(status: AttemptStatus) -> None:
    """Sixty attempts that crashed, did not apply or were skipped are no evidence."""
    found = results([step(i) for i in range(60)], [attempt(i, status=status) for i in range(60)])
    verdict = judge(found, RED_LINE)
    assert (verdict.verdict, verdict.rules[0].n) == (Status.INCONCLUSIVE, 0)
    assert f"60 {status.value.replace('_', ' ')}" in verdict.sentence
    assert "Not tested is not a pass." in verdict.sentence


@pytest.mark.parametrize("kind", ["bag", "labels"])
def test_an_attack_of_another_kind_is_no_evidence(kind: str) -> None:
    """A bag of words or a count of labels cannot show that a sentence came back."""
    found = results([step(i) for i in range(60)], [attempt(i, "other", kind=kind) for i in range(60)])
    assert judge(found, RED_LINE).rules[0].n == 0


def test_a_step_without_a_long_sentence_is_left_out() -> None:
    """A step that has nothing to lose does not dilute the rate."""
    attempts = [attempt(i, long_enough=i < 40) for i in range(60)]
    rule = judge(results([step(i) for i in range(60)], attempts), RED_LINE).rules[0]
    assert (rule.n, rule.left_out, rule.status) == (40, 20, Status.INCONCLUSIVE)
    assert "Not counted: 20 steps without a sentence that long." in rule.sentence


def test_a_step_that_fails_verification_does_not_count() -> None:
    """Neither for nor against: its update comes from another batch."""
    steps = [step(i, VerificationStatus.MISMATCH if i < 2 else VerificationStatus.VERIFIED) for i in range(70)]
    states = [AttemptStatus.SKIPPED if i < 2 else AttemptStatus.RAN for i in range(70)]
    verdict = judge(results(steps, [attempt(i, status=state) for i, state in enumerate(states)]), RED_LINE)
    assert (verdict.unverified_steps, verdict.rules[0].k, verdict.rules[0].n) == (2, 0, 68)
    assert "2 of 70 attempts (2.9%) crashed, were skipped or had no usable update" in verdict.sentence


def test_out_of_time_counts_as_no_event_but_not_without_limit() -> None:
    """Ten of sixty attempts out of time may pass, fifteen may not."""

    def late(many: int) -> Verdict:
        states = [AttemptStatus.BUDGET_EXHAUSTED if i < many else AttemptStatus.RAN for i in range(60)]
        attempts = [attempt(i, status=state) for i, state in enumerate(states)]
        return judge(results([step(i) for i in range(60)], attempts), RED_LINE)

    assert (late(10).verdict, late(10).rules[0].censored) == (Status.PASS, 10)
    assert late(15).verdict is Status.INCONCLUSIVE
    assert "15 of 60 attempts (25%) ran out of time; the policy allows 20%." in late(15).sentence


def test_crashes_of_one_attack_are_not_hidden_by_another() -> None:
    """If the strong attack crashed and the weak one found nothing, nothing is clean."""
    attempts = [attempt(i, "tag") for i in range(60)]
    attempts += [attempt(i, "span", status=AttemptStatus.ERROR) for i in range(60)]
    verdict = judge(results([step(i) for i in range(60)], attempts), RED_LINE)
    assert verdict.verdict is Status.INCONCLUSIVE
    assert "60 of 120 attempts (50%) crashed" in verdict.sentence


def test_an_attempt_that_was_never_made_is_lost_as_well() -> None:
    """An interrupted audit lacks attempts; they are due all the same."""
    attempts = [attempt(i, name) for i in range(60) for name in ("span", "tag") if name == "tag" or i < 30]
    verdict = judge(results([step(i) for i in range(60)], attempts), RED_LINE)
    assert (verdict.verdict, verdict.rules[0].lost, verdict.rules[0].due) == (Status.INCONCLUSIVE, 30, 120)


def test_a_step_leaks_if_any_attack_in_scope_leaks() -> None:
    """Two attacks that take turns leak every step."""
    attempts = [attempt(i, name, leaks=(i % 2 == 0) == (name == "span")) for i in range(10) for name in ("span", "tag")]
    found = results([step(i) for i in range(10)], attempts)
    assert judge(found, RED_LINE).rules[0].k == 10
    assert judge(found, RED_LINE | {"scope": {"attack": "tag"}}).rules[0].k == 5
    assert judge(found, RED_LINE | {"scope": {"attack": ["tag", "span"]}}).rules[0].k == 10


def test_shipped_is_the_update_as_observed() -> None:
    """Leaks under a simulated defence do not fail what is shipped, and vice versa."""
    attempts = [attempt(i, defense=name, leaks=name == "none") for i in range(60) for name in ("none", "prune")]
    found = results([step(i) for i in range(60)], attempts)
    assert judge(found, RED_LINE).verdict is Status.FAIL
    assert judge(found, RED_LINE | {"scope": {"defense": "prune"}}).verdict is Status.PASS


def test_the_cheapest_way_to_green_is_the_same_policy_under_another_defence() -> None:
    """Every tested defence is judged as if it were shipped."""
    leaks = {"none": True, "prune": False, "noise": True}
    attempts = [attempt(i, defense=name, leaks=leak) for i in range(60) for name, leak in leaks.items()]
    found = judge(results([step(i) for i in range(60)], attempts), RED_LINE, RATE)
    assert [(a.defense, a.status, a.open_rules) for a in found.alternatives] == [
        ("prune", Status.PASS, ()),
        ("noise", Status.FAIL, ("red-line", "rate")),
    ]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (RED_LINE | {"scope": {"attack": "spam"}}, r"attack 'spam' is not in this battery; did you mean 'span'\?"),
        (RED_LINE | {"scope": {"defense": "prune"}}, r"defence 'prune' was not tested \(none\)"),
        (
            {"id": "m", "metric": "rougel", "statistic": "max", "max_value": 0.5},
            r"nothing was scored by 'rougel'; did you mean 'rougeL'\?",
        ),
    ],
)
def test_a_name_that_matches_nothing_does_not_switch_a_rule_off(rule: dict[str, Any], message: str) -> None:
    """A misspelt attack, defence or metric leaves the rule open and is named."""
    verdict = judge(audit(0, 60), rule)
    assert verdict.verdict is Status.INCONCLUSIVE
    assert re.search(message, verdict.sentence)


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
    assert "the scores of this audit cannot be believed" in verdict.sentence


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


def reached(number: int, attack: str = "span", *, passes: bool | None, leaks: bool = False, **extra: Any) -> Attempt:
    """Build an attempt on one text whose attack could tell whether it was in reach."""
    done = attempt(number, attack, leaks=leaks, **extra)
    return of_sequences(done, [s.model_copy(update={"passes": passes}) for s in done.sequences])


def test_a_verdict_says_where_a_search_gave_up_on_what_was_in_reach() -> None:
    """No sentence came back, but a longer search may find those in reach."""
    attempts = [reached(i, passes=i < 2) for i in range(60)]
    attempts += [reached(i, "tag", passes=None) for i in range(60)]
    verdict = judge(results([step(i) for i in range(60)], attempts), RATE)
    assert verdict.verdict is Status.PASS
    assert verdict.sentence.endswith(
        "2 of the 60 texts that did not come back were in reach of an attack whose search gave up: that is no protection."
    )
    one = judge(results([step(0)], [reached(0, passes=True)]), RATE)
    assert "The text that did not come back was in reach" in one.sentence


def test_a_verdict_says_that_these_attacks_find_nothing_only_where_they_can_tell() -> None:
    """Only an attack that knows its reach can tell; otherwise nothing is said."""
    steps = [step(i) for i in range(2)]
    out = "What did not come back cannot be found by these attacks; another attack may find it."
    assert out in judge(results(steps, [reached(i, passes=False) for i in range(2)]), RATE).sentence
    assert "reach" not in judge(results(steps, [attempt(i) for i in range(2)]), RATE).sentence
    both = [reached(0, passes=True), reached(1, passes=False), attempt(0, "tag", leaks=True), attempt(1, "tag")]
    assert "gave up" not in judge(results(steps, both), RATE).sentence
    short = [reached(i, passes=i > 0, long_enough=i == 0) for i in range(2)]
    assert out in judge(results(steps, short), RATE).sentence  # the short text is no sentence


def test_a_text_of_which_no_attack_can_tell_is_not_called_out_of_reach() -> None:
    """What one attack says of one text says nothing of the others."""
    steps = [step(i) for i in range(3)]
    verdict = judge(results(steps, [reached(0, passes=False), *(attempt(i, "tag") for i in range(3))]), RATE)
    assert "1 of the 3 texts that did not come back cannot be found by these attacks" in verdict.sentence
    assert "What did not come back cannot be found" not in verdict.sentence


def test_an_attack_that_named_nothing_is_a_clean_step_for_most_words() -> None:
    """Without a guess there is no precision, and none is needed."""
    silent = with_scores(sequence(recall=0.0, bag=True), token_precision=None)
    attempts = [of_sequences(attempt(i, "bag", kind="bag", recall=0.0), [silent]) for i in range(60)]
    rule = {"id": "most", "event": "most_words", "max_rate": 0.05}
    verdict = judge(results([step(i) for i in range(60)], attempts), rule)
    assert (verdict.verdict, verdict.rules[0].n) == (Status.PASS, 60), verdict.sentence


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


def test_the_default_policy_fails_on_one_sentence_and_says_what_a_pass_takes() -> None:
    """Used where no policy is given."""
    default = default_policy()
    assert gate.evaluate(audit(1, 2), default, now=NOW).verdict is Status.FAIL
    assert gate.evaluate(audit(0, 3), default, now=NOW).verdict is Status.INCONCLUSIVE
    told = [reached(i, passes=False) for i in range(59)]
    assert gate.evaluate(results([step(i) for i in range(59)], told), default, now=NOW).verdict is Status.PASS
    untold = gate.evaluate(audit(0, 59), default, now=NOW)
    assert untold.verdict is Status.INCONCLUSIVE
    assert "no attack that finished can tell what was in reach of its search" in untold.sentence


UNVERIFIABLE = VerificationStatus.UNVERIFIABLE


@pytest.mark.parametrize("stamp", [VerificationStatus.UNVERIFIABLE, VerificationStatus.STOCHASTIC])
def test_a_leak_of_an_unverifiable_step_is_proof(stamp: VerificationStatus) -> None:
    """Nobody can recover a sentence of the batch from an update without it."""
    verdict = judge(results([step(0, stamp)], [attempt(0, leaks=True)]), RED_LINE)
    assert (verdict.verdict, verdict.rules[0].k, verdict.unverifiable_steps) == (Status.FAIL, 1, 1)
    assert (verdict.unverified_steps, verdict.rules[0].worst is not None) == (0, True)


@pytest.mark.parametrize("stamp", [VerificationStatus.UNVERIFIABLE, VerificationStatus.STOCHASTIC])
def test_an_unverifiable_step_without_a_leak_is_no_evidence(stamp: VerificationStatus) -> None:
    """Sixty such steps count neither in n nor in a bound nor in the floor."""
    verdict = judge(results([step(i, stamp) for i in range(60)], [attempt(i) for i in range(60)]), RED_LINE, RATE)
    assert verdict.verdict is Status.INCONCLUSIVE
    assert {(rule.status, rule.n, rule.silent, rule.due) for rule in verdict.rules} == {(Status.INCONCLUSIVE, 0, 60, 0)}
    assert (
        "60 steps cannot be verified, and nothing of the kind came back from them. Not tested is not a pass."
        in verdict.sentence
    )
    one = judge(results([step(0, stamp)], [attempt(0)]), RED_LINE)
    assert "1 step cannot be verified, and nothing of the kind came back from it." in one.sentence


def test_unverifiable_steps_bound_a_rate_from_neither_side() -> None:
    """Leaking ones would make the rate too large, the others too small."""
    steps = [step(i, UNVERIFIABLE if i < 50 else VerificationStatus.VERIFIED) for i in range(108)]
    found = results(steps, [attempt(i, leaks=i < 5) for i in range(108)])
    rule = judge(found, RATE).rules[0]
    assert (rule.k, rule.n, rule.silent, rule.status) == (5, 63, 45, Status.INCONCLUSIVE)
    assert rule.lower == stats.lower_bound(5, 108) and rule.upper == stats.upper_bound(5, 63)
    assert "Not counted: 45 unverifiable steps from which nothing of the kind came back." in rule.sentence
    assert "The policy asks for 59 steps of evidence; there are 58." in rule.reasons


@pytest.mark.parametrize(
    ("statistic", "n", "k", "expected"),
    [
        ("max", 60, 1, Status.FAIL),
        ("max", 60, 0, Status.PASS),
        ("mean", 60, 1, Status.PASS),
        ("p95", 60, 1, Status.PASS),
    ],
)
def test_a_score_of_an_unverifiable_step_counts_only_where_it_is_proof(
    statistic: str, n: int, k: int, expected: Status
) -> None:
    """A score above a maximum is proof; a mean of leaking steps would be biased."""
    steps = [*(step(i) for i in range(n)), step(n, UNVERIFIABLE)]
    attempts = [*(attempt(i, recall=0.1) for i in range(n)), attempt(n, recall=0.9 if k else 0.3)]
    rule = {"id": "m", "metric": "rougeL", "statistic": statistic, "max_value": 0.5}
    found = judge(results(steps, attempts), rule).rules[0]
    assert (found.status, found.n, found.silent) == (
        expected,
        n + (statistic == "max") * k,
        1 - (statistic == "max") * k,
    )


def of_eight(done: Attempt) -> Attempt:
    """Return an attempt with its text eight times."""
    if not done.sequences:
        return done
    texts = [done.sequences[0].model_copy(update={"id": f"sq-{i}"}) for i in range(8)]
    means = {name: Score(value=found.value, n=8) for name, found in done.scores.items() if isinstance(found, Score)}
    precise = texts[0].token_precision
    means |= {} if precise is None else {"token_precision": Score(value=precise, n=8)}
    return done.model_copy(update={"sequences": tuple(texts), "scores": dict(done.scores) | means})


def words(number: int) -> list[Attempt]:
    """Build three attempts on eight texts: a bag, labels, and an empty search."""
    bag = attempt(number, "rows", kind="bag", recall=1.0, events=("all_words", "most_words"))
    labels = attempt(number, "llg", kind="labels", leaks=True)
    return [of_eight(bag), of_eight(labels), of_eight(attempt(number, "span", recall=0.0))]


def eight(number: int) -> StepRecord:
    """Build a step of eight texts."""
    return step(number, n_sequences=8).model_copy(update={"n_tokens_bucket": "65-128"})


def test_the_headline_says_what_came_back_beside_the_rule_that_decides() -> None:
    """Every word of eight texts and all labels are named, though no sentence is."""
    found = results([eight(0)], words(0))
    verdict = gate.evaluate(found, default_policy(), now=NOW)
    assert verdict.sentence.startswith("1 client step audited: no sentence of 8+ tokens was recovered exactly")
    assert "But every word of 8 of 8 texts and all labels came back." in verdict.sentence
    assert "leak seen" not in verdict.sentence
    assert "But" not in judge(audit(0, 60), RED_LINE).sentence  # nothing came back
    assert "But" not in judge(audit(3, 60), RED_LINE).sentence  # the rule itself says what did


def test_the_built_in_policy_judges_words_overlap_and_reach_at_level_error() -> None:
    """Sixty steps that lose words, most of a text or a text in reach do not pass."""
    default = default_policy()
    steps = [step(i) for i in range(60)]

    def verdict(attempts: list[Attempt], steps: list[StepRecord] = steps) -> tuple[Status, set[str]]:
        found = gate.evaluate(results(steps, attempts), default, now=NOW)
        return found.verdict, {r.id for r in found.rules if r.status is Status.FAIL and r.level == "error"}

    worded = verdict([a for i in range(60) for a in words(i)], [eight(i) for i in range(60)])
    assert worded == (Status.FAIL, {"all-words-rate", "most-words-rate"})
    most = [attempt(i, recall=11 / 12) for i in range(60)]
    assert verdict(most)[0] is Status.FAIL and "overlap" in verdict(most)[1]
    told = [a.model_copy(update={"events": ("most_words",)}) for a in most]
    assert verdict(told) == (Status.FAIL, {"overlap", "most-words-rate"})
    open_search = [reached(i, passes=True, status=AttemptStatus.BUDGET_EXHAUSTED) for i in range(60)]
    assert verdict(open_search) == (Status.FAIL, {"in-reach-rate"})
    gave_up = [reached(i, passes=True) for i in range(60)]
    assert verdict(gave_up) == (Status.FAIL, {"in-reach-rate"})
    assert verdict([reached(i, passes=False) for i in range(60)]) == (Status.PASS, set())


def test_a_chance_overlap_in_one_step_does_not_fail_the_built_in_policy() -> None:
    """Short unrelated texts share half of their words sometimes."""
    attempts = [reached(i, passes=False, recall=0.6 if i == 0 else 0.1, long_enough=i > 0) for i in range(100)]
    found = gate.evaluate(results([step(i) for i in range(100)], attempts), default_policy(), now=NOW)
    assert found.verdict is Status.PASS


POLICY = """\
schema: leakaudit.policy/1
name: clinical-notes-release
owner: privacy-office
evidence: {min_steps: 60, max_age: 7d}
controls:
  positive: {steps: 29, rate_lower: 0.90}
rules:
  - id: no-verbatim
    severity: critical
    event: exact_sentence
    max_count: 0
  - id: overlap
    level: warn
    scope: {defense: shipped, attack: [tag, span]}
    metric: rougeL
    statistic: p95
    max_value: 35e-2
report: {text: masked, top_samples: 50}
"""


def test_a_policy_is_read_from_yaml(tmp_path: Path) -> None:
    """The digest depends on the content, not on the layout."""
    path = tmp_path / "gate.yaml"
    path.write_text(POLICY)
    found = load_policy(path)
    assert found.rules[1].scope.attacks == ("tag", "span")
    assert found.rules[1].max_value == 0.35
    path.write_text("# a comment\n" + POLICY.replace("{min_steps: 60, max_age: 7d}", "{max_age: 7d, min_steps: 60}"))
    assert load_policy(path).digest == found.digest
    path.write_text(POLICY.replace("min_steps: 60", "min_steps: 61"))
    assert load_policy(path).digest != found.digest


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_count: 0", "max_rogue: 0", r"gate\.yaml:11: unknown key 'max_rogue'; did you mean 'max_rate'\?"),
        ("max_count: 0", "max_rate: 0", r"gate\.yaml:11: rules\[0\]\.max_rate: input should be greater than 0"),
        ("    max_count: 0\n", "", r"gate\.yaml:8: .*'no-verbatim' needs exactly one of max_rate, .*found none"),
        (
            "statistic: p95",
            "event: exact_sentence",
            r"'overlap': max_value goes with metric and statistic; found event",
        ),
        ("exact_sentence", "exact_sentense", r"gate\.yaml:10: rules\[0\]\.event: input should be 'exact_sentence'"),
        ("id: overlap", "id: no-verbatim", "two rules are called 'no-verbatim'"),
        ("max_age: 7d", "max_age: a week", r"gate\.yaml:4: .*write a number and d, h, m or s, such as 7d"),
        ("leakaudit.policy/1", "leakaudit.policy/2", r"gate\.yaml:1: schema: input should be 'leakaudit\.policy/1'"),
        (
            "    severity: critical\n",
            "    level: warn\n",
            "every rule is at level warn, so the policy could never fail",
        ),
        ("attack: [tag, span]", "attack: []", "an empty list of attacks would switch the rule off"),
    ],
)
def test_a_mistake_in_a_policy_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    """A typo must not switch a rule off."""
    path = tmp_path / "gate.yaml"
    path.write_text(POLICY.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        load_policy(path)


@pytest.mark.parametrize(
    ("old", "new", "problems"),
    [
        (
            "exact_sentence",
            "exact_sentense",
            ["10: rules[0].event: input should be 'exact_sentence', ...; did you mean 'exact_sentence'?"],
        ),
        (
            "id: overlap",
            "id: no-verbatim",
            ["12: rules[1].id: two rules are called 'no-verbatim'; each needs its own id"],
        ),
        (
            "    severity: critical\n",
            "    level: warn\n",
            [
                "7: rules: every rule is at level warn, so the policy could never fail; set at least one rule to level: error"
            ],
        ),
        ("[tag, span]", "[tag, spam]", ["14: rule 'overlap': the attack 'spam' is unknown; did you mean 'span'?"]),
        ("[tag, span]", "spam", ["14: rule 'overlap': the attack 'spam' is unknown; did you mean 'span'?"]),
        ("shipped", "shiped", ["14: rule 'overlap': the defence 'shiped' is unknown; did you mean 'shipped'?"]),
        (
            "shipped",
            "prun(share=0.9)",
            ["14: rule 'overlap': the defence 'prun(share=0.9)' is unknown; did you mean 'prune'?"],
        ),
        (
            "metric: rougeL",
            "metric: rouge",
            ["15: rule 'overlap': the metric 'rouge' is unknown; did you mean 'rougeL'?"],
        ),
    ],
)
def test_a_wrong_name_is_one_error_with_its_line(tmp_path: Path, old: str, new: str, problems: list[str]) -> None:
    """Nothing else is reported for it, and above all no verdict."""
    path = tmp_path / "gate.yaml"
    path.write_text(POLICY.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        load_policy(path, catalogue.names_for(audit(0, 1)))
    said = re.sub(r"('exact_sentence'), .*;", r"\1, ...;", str(caught.value))
    assert said.splitlines() == [f"{path}:{problem}" for problem in problems]


def test_a_name_may_be_one_of_ours_of_the_results_or_of_another_package(tmp_path: Path) -> None:
    """Known names are ours and those in the results, without options."""
    path = tmp_path / "gate.yaml"
    path.write_text(POLICY.replace("[tag, span]", "[dlg, theirs]").replace("shipped", "prune(share=0.99)"))
    theirs = results([step(0)], [attempt(0, "theirs")])
    assert load_policy(path, catalogue.names_for(theirs)).rules[1].scope.attacks == ("dlg", "theirs")
    with pytest.raises(ConfigError, match="the attack 'theirs' is unknown; known: "):
        load_policy(path, catalogue.own_names())


def test_every_registered_name_is_known_without_importing_it() -> None:
    """The names stand in the source; this imports the plugins and compares."""
    own = catalogue.own_names()
    for kind in ("attacks", "defenses", "metrics"):
        registered = {n for n, plugin in getattr(registry, kind) if plugin.__module__.startswith("leakaudit.")}
        assert getattr(own, kind) == registered


def test_a_step_in_reach_of_a_search_that_gave_up_is_judged() -> None:
    """Sixty of sixty: no text came back, and the update protects none of them."""
    rule = {"id": "reach", "event": "in_reach", "max_rate": 0.05}
    steps = [step(i) for i in range(60)]
    all_in_reach = judge(results(steps, [reached(i, passes=True) for i in range(60)]), rule)
    assert (all_in_reach.verdict, all_in_reach.rules[0].k) == (Status.FAIL, 60)
    assert judge(results(steps, [reached(i, passes=False) for i in range(60)]), rule).verdict is Status.PASS
    assert judge(results(steps, [reached(i, passes=None) for i in range(60)]), rule).rules[0].n == 0
    short = judge(results(steps, [reached(i, passes=True, long_enough=False) for i in range(60)]), rule)
    assert (short.verdict, short.rules[0].left_out) == (Status.INCONCLUSIVE, 60)
    came_back = judge(results(steps, [attempt(i, leaks=i < 9) for i in range(60)]), rule)
    assert came_back.rules[0].k == 9


def test_most_words_of_a_sentence_are_judged() -> None:
    """Eleven of twelve tokens came back in every step, by a guess or a bag.

    A recall without its precision decides nothing.
    """
    rule = {"id": "words", "event": "most_words", "max_rate": 0.05}
    steps = [step(i) for i in range(60)]
    for kind in ("text", "bag"):
        assert (
            judge(results(steps, [attempt(i, recall=11 / 12, kind=kind) for i in range(60)]), rule).verdict
            is Status.FAIL
        )
        assert (
            judge(results(steps, [attempt(i, recall=0.4, kind=kind) for i in range(60)]), rule).verdict is Status.PASS
        )
    unknown = [
        of_sequences(a, [with_scores(s, token_precision=None) for s in a.sequences])
        for a in (attempt(i, recall=11 / 12) for i in range(60))
    ]
    assert judge(results(steps, unknown), rule).rules[0].n == 0


def test_sentences_end_once() -> None:
    """No "?." where a question ends the sentence."""
    verdict = judge(audit(0, 60), RED_LINE | {"scope": {"attack": "spam"}})
    assert "did you mean 'span'? Not tested is not a pass." in verdict.sentence
    assert gate.unreadable("was it edited?", policy(), now=NOW).sentence.endswith("judged: was it edited?")


def test_a_verdict_repeats_the_digest_of_its_results() -> None:
    """That of the content, whatever the layout of the file."""
    found = audit(0, 60)
    assert found.digest is not None
    assert judge(found, RED_LINE).results_digest == found.digest


@pytest.mark.parametrize(
    ("value", "beside", "expected"),
    [(0.05, None, "5%"), (0.0501, 0.05, "5.01%"), (0.0, None, "0%"), (0.0001, None, "<0.1%"), (1.0, None, "100%")],
)
def test_percentages_tell_apart_what_differs(value: float, beside: float | None, expected: str) -> None:
    """A bound just above the limit is not printed as the limit."""
    assert percent(value, beside) == expected


def test_the_gate_runs_without_torch() -> None:
    """Importing it must load neither torch nor scipy.stats."""
    code = "import sys, leakaudit.gate.evaluate; print(sorted({'torch', 'scipy.stats', 'altair'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"


def test_every_key_of_a_policy_has_a_description() -> None:
    """`leakaudit schema policy` is the reference; a part has that of its class."""
    schema = Policy.model_json_schema()
    parts = {"": schema, **schema["$defs"]}
    keys = {f"{part}.{name}": key for part, model in parts.items() for name, key in model.get("properties", {}).items()}
    assert [name for name, key in keys.items() if not {"description", "$ref"} & set(key)] == []
