"""The evidence of a rule: which attempts and steps count, and as what."""

from __future__ import annotations

import re
from typing import Any

import pytest

from leakaudit.gate.verdict import Status, Verdict
from leakaudit.results import bounds as stats
from leakaudit.results.schema import (
    AttackEntry,
    Attempt,
    AttemptStatus,
    Catalogue,
    Missing,
    Results,
    Score,
    VerificationStatus,
)
from tests.support.factories import attempt, audit, changed, of_sequences, results, sequence, step, with_scores
from tests.support.judging import RATE, RED_LINE, judge


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
    assert "Not counted: 20 steps without a text that long." in rule.sentence


def test_a_step_that_fails_verification_does_not_count() -> None:
    """Neither for nor against: its update comes from another batch."""
    steps = [step(i, VerificationStatus.MISMATCH if i < 2 else VerificationStatus.VERIFIED) for i in range(70)]
    states = [AttemptStatus.SKIPPED if i < 2 else AttemptStatus.RAN for i in range(70)]
    verdict = judge(results(steps, [attempt(i, status=state) for i, state in enumerate(states)]), RED_LINE)
    assert (verdict.unverified_steps, verdict.rules[0].k, verdict.rules[0].n) == (2, 0, 68)
    assert "2 of 70 attempts (2.9%) crashed, were skipped or not needed, or had no usable update" in verdict.sentence


def test_a_step_on_which_no_attack_ran_to_its_end_is_not_judged() -> None:
    """A search that was cut short shows nothing, so a single one does not pass.

    Another attack may judge the step; then the policy says how many attempts may be out of time.
    """
    late, ran = AttemptStatus.BUDGET_EXHAUSTED, AttemptStatus.RAN

    def out_of_time(many: int, *beside: Attempt) -> Verdict:
        attempts = [attempt(i, status=late if i < many else ran) for i in range(60)]
        return judge(results([step(i) for i in range(60)], [*attempts, *beside]), RED_LINE)

    rule = out_of_time(1).rules[0]
    assert (rule.status, rule.k, rule.n, rule.unjudged, rule.censored) == (Status.INCONCLUSIVE, 0, 59, 1, 1)
    assert "1 of 60 audited steps could not be judged (out of time): to pass, it counts as a leak." in rule.sentence
    others = [attempt(i, "tag") for i in range(60)]
    assert out_of_time(20, *others).verdict is Status.PASS
    assert out_of_time(30, *others).verdict is Status.INCONCLUSIVE
    assert "30 of 120 attempts (25%) ran out of time; the policy allows 20%." in out_of_time(30, *others).sentence
    assert "every attack that could show it ran out of time" in out_of_time(60).sentence


def test_a_search_that_was_cut_short_and_found_something_is_proof() -> None:
    """What came back came back; a score of it is a lower bound."""
    late = AttemptStatus.BUDGET_EXHAUSTED
    steps = [step(i) for i in range(60)]
    assert judge(results(steps, [attempt(i, leaks=True, status=late) for i in range(60)]), RED_LINE).rules[0].k == 60
    scored = results(steps, [attempt(i, recall=0.9, status=late if i else AttemptStatus.RAN) for i in range(60)])
    for statistic in ("mean", "p95", "max"):
        rule = {"id": "m", "metric": "rougeL", "statistic": statistic, "max_value": 0.5}
        assert judge(scored, rule).verdict is Status.FAIL, statistic
    low = results(steps, [attempt(i, recall=0.1, status=late if i < 59 else AttemptStatus.RAN) for i in range(60)])
    for statistic in ("mean", "p95", "max"):
        rule = {"id": "m", "metric": "rougeL", "statistic": statistic, "max_value": 0.5}
        assert judge(low, rule, evidence={"max_censored": 1, "min_steps": 1}).verdict is Status.INCONCLUSIVE, statistic


def test_an_attack_that_ran_under_another_defence_is_missing_where_it_crashed() -> None:
    """What it did there excuses nothing here."""
    steps = [step(i) for i in range(60)]
    tried = [attempt(i, "tag") for i in range(60)] + [attempt(i, "tag", "prune") for i in range(60)]
    tried += [attempt(i, "span", status=AttemptStatus.ERROR) for i in range(60)]
    unscored = attempt(0, "span", "prune", kind="labels")
    tried += [unscored.model_copy(update={"step": steps[i].id}) for i in range(60)]
    rule = judge(results(steps, tried), RED_LINE).rules[0]
    assert (rule.status, rule.due, rule.lost) == (Status.INCONCLUSIVE, 120, 60)


def test_a_bag_of_words_that_crashed_is_not_missing_for_a_rule_on_whole_texts() -> None:
    """It could not have shown one; for a rule on words it is missing."""
    tried = [attempt(i, "span") for i in range(60)]
    tried += [attempt(i, "rows", status=AttemptStatus.ERROR) for i in range(60)]
    described = {
        "span": AttackEntry(label="", meaning="", source="", goal="text", threat_model=""),
        "rows": AttackEntry(label="", meaning="", source="", goal="words", threat_model=""),
    }
    found = results([step(i) for i in range(60)], tried, catalogue=Catalogue(attacks=described))
    assert judge(found, RED_LINE).verdict is Status.PASS
    assert judge(found, {"id": "w", "event": "all_words", "max_count": 0}).verdict is Status.INCONCLUSIVE


def test_attempts_out_of_time_are_counted_for_a_rule_on_a_score() -> None:
    """A score above zero is not yet one above the limit."""
    late = [attempt(i, "tag", status=AttemptStatus.BUDGET_EXHAUSTED) for i in range(60)]
    found = results([step(i) for i in range(60)], [*(attempt(i) for i in range(60)), *late])
    rule = {"id": "m", "metric": "rougeL", "statistic": "max", "max_value": 0.5}
    assert judge(found, rule).rules[0].censored == 60
    assert "60 of 120 attempts (50%) ran out of time" in judge(found, rule).sentence


def test_a_metric_that_falls_with_a_leak_is_not_judged_by_its_largest_value() -> None:
    """Neither a PASS nor a FAIL means anything there."""
    found = results([step(i) for i in range(60)], [attempt(i) for i in range(60)])
    falling = found.catalogue.metrics["rougeL"].model_copy(update={"higher_is_better": False, "label": "distance"})
    metrics = found.catalogue.metrics | {"rougeL": falling}
    other = changed(found, catalogue=found.catalogue.model_copy(update={"metrics": metrics}))
    for limit in (0.05, 0.5):
        rule = {"id": "m", "metric": "rougeL", "statistic": "max", "max_value": limit}
        assert judge(found, rule).verdict is (Status.PASS if limit == 0.5 else Status.FAIL)
        assert judge(other, rule).verdict is Status.INCONCLUSIVE
        assert "A lower distance means that more leaked" in judge(other, rule).sentence


def test_a_guess_of_one_text_says_nothing_about_the_others_of_the_step() -> None:
    """An attack judges a step only if it judged every text that can have the event."""
    one, other = sequence("sq-0", 0.1), sequence("sq-1", 0.1)
    unknown = other.model_copy(update={"scores": {}})
    steps = [step(i, n_sequences=2).model_copy(update={"n_tokens_bucket": "17-32"}) for i in range(60)]

    def tried(second: Any) -> Results:
        return results(steps, [of_sequences(attempt(i), [one, second]) for i in range(60)])

    whole = RED_LINE | {"event": "exact_sequence"}
    words = RED_LINE | {"event": "most_words"}
    for rule in (RED_LINE, whole, words):
        assert judge(tried(other), rule).verdict is Status.PASS
        assert judge(tried(unknown), rule).verdict is Status.INCONCLUSIVE


def _proved(number: int) -> Attempt:
    """Build an attempt that recovered every text."""
    found = attempt(number, "span", leaks=True)
    return of_sequences(found, [one.model_copy(update={"proved": True}) for one in found.sequences])


NOT_NEEDED = AttemptStatus.NOT_NEEDED


@pytest.mark.parametrize("proved", [0, 1, 30])
def test_an_attack_that_was_not_needed_neither_adds_nor_hides_anything(proved: int) -> None:
    """The rule counts what it would count without that attack in the battery."""
    steps, spans = [step(i) for i in range(60)], [_proved(i) if i < proved else attempt(i, "span") for i in range(60)]
    second = [attempt(i, "tag", status=NOT_NEEDED if i < proved else AttemptStatus.RAN) for i in range(60)]
    (alone,), (both,) = (judge(results(steps, tried), RED_LINE).rules for tried in (spans, spans + second))
    assert (both.status, both.k, both.n, both.lost) == (alone.status, alone.k, alone.n, 0)
    assert both.due == alone.due + 60 - proved


def test_a_rule_about_one_attack_takes_not_needed_for_missing() -> None:
    """It does not ask the attack that proved the texts, so its own says nothing."""
    only = RED_LINE | {"scope": {"attack": "tag"}}
    steps, spans = [step(i) for i in range(60)], [_proved(i) for i in range(60)]
    verdict = judge(results(steps, spans + [attempt(i, "tag", status=NOT_NEEDED) for i in range(60)]), only)
    assert (verdict.verdict, verdict.rules[0].n, verdict.rules[0].lost) == (Status.INCONCLUSIVE, 0, 60)
    assert "60 not needed" in verdict.sentence
    half = [attempt(i, "tag", status=NOT_NEEDED if i < 30 else AttemptStatus.RAN) for i in range(60)]
    verdict = judge(results(steps, spans + half), only)
    assert (verdict.verdict, verdict.rules[0].n, verdict.rules[0].lost) == (Status.INCONCLUSIVE, 30, 30)


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
    assert judge(found, RED_LINE | {"scope": {"defense": "prune"}}).rules[0].k == 0


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
    out = "What did not come back is out of reach of these attacks, but not of every attack."
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
    assert "1 of the 3 texts that did not come back are out of reach of these attacks" in verdict.sentence
    assert "What did not come back cannot be found" not in verdict.sentence


def test_an_attack_that_named_nothing_is_a_clean_step_for_most_words() -> None:
    """Without a guess there is no precision, and none is needed."""
    silent = with_scores(sequence(recall=0.0, bag=True), token_precision=None)
    attempts = [of_sequences(attempt(i, "bag", kind="bag", recall=0.0), [silent]) for i in range(60)]
    rule = {"id": "most", "event": "most_words", "max_rate": 0.05}
    verdict = judge(results([step(i) for i in range(60)], attempts), rule)
    assert (verdict.verdict, verdict.rules[0].n) == (Status.PASS, 60), verdict.sentence


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
    """They count as clean in the lower bound and as leaks in the upper one."""
    steps = [step(i, UNVERIFIABLE if i < 50 else VerificationStatus.VERIFIED) for i in range(108)]
    found = results(steps, [attempt(i, leaks=i < 5) for i in range(108)])
    rule = judge(found, RATE).rules[0]
    assert (rule.k, rule.n, rule.silent, rule.status) == (5, 63, 45, Status.INCONCLUSIVE)
    assert rule.lower == stats.lower_bound(5, 108) and rule.upper == stats.upper_bound(50, 108)
    assert "45 of 108 audited steps could not be judged (unverifiable): to pass, they count as leaks." in rule.sentence
    assert "The policy asks for 59 steps of evidence; there are 58." in rule.reasons


@pytest.mark.parametrize(
    ("statistic", "n", "k", "expected"),
    [
        ("max", 60, 1, Status.FAIL),
        ("max", 60, 0, Status.INCONCLUSIVE),
        ("mean", 60, 1, Status.PASS),
        ("p95", 60, 1, Status.INCONCLUSIVE),
        ("p95", 92, 1, Status.PASS),
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


def _partly_judged(unjudged: int, judged: int, status: AttemptStatus = AttemptStatus.NOT_APPLICABLE) -> Results:
    """Build clean steps; to the first ones the attack does not apply."""
    states = [status] * unjudged + [AttemptStatus.RAN] * judged
    return results([step(i) for i in range(len(states))], [attempt(i, status=s) for i, s in enumerate(states)])


def test_steps_that_nobody_could_judge_count_as_leaks_where_a_rule_is_to_pass() -> None:
    """They leave neither the bound nor the sentence: 0 of 43 is not 0 of 60."""
    rule = judge(_partly_judged(17, 43), RATE | {"max_rate": 0.1}, evidence={"min_steps": 1}).rules[0]
    assert (rule.status, rule.k, rule.n, rule.unjudged) == (Status.INCONCLUSIVE, 0, 43, 17)
    assert (rule.lower, rule.upper) == (0.0, stats.upper_bound(17, 60))
    assert (
        "17 of 60 audited steps could not be judged (no attack applies): to pass, they count as leaks" in rule.sentence
    )
    assert judge(_partly_judged(7, 1), RED_LINE, evidence={"min_steps": 1}).verdict is Status.INCONCLUSIVE
    assert judge(_partly_judged(1, 92), RATE).verdict is Status.PASS


def test_a_policy_may_accept_a_share_of_unjudged_steps() -> None:
    """It says so, and so does the sentence."""
    few = _partly_judged(2, 98)
    accepted = judge(few, RED_LINE, evidence={"max_unjudged": 0.02})
    assert (accepted.verdict, accepted.rules[0].upper) == (Status.PASS, stats.upper_bound(0, 98))
    assert "2 of 100 audited steps could not be judged (no attack applies); the policy accepts 2%." in accepted.sentence
    assert judge(few, RED_LINE, evidence={"max_unjudged": 0.01}).verdict is Status.INCONCLUSIVE
    assert judge(few, RED_LINE).verdict is Status.INCONCLUSIVE


def test_a_step_that_cannot_have_the_event_needs_no_judgement() -> None:
    """Without a long text there is nothing to judge, whether attacks ran or not."""
    steps = [step(i).model_copy(update={"n_sentences": int(i < 60)}) for i in range(70)]
    tried = [attempt(i, status=AttemptStatus.RAN if i < 60 else AttemptStatus.NOT_APPLICABLE) for i in range(70)]
    rule = judge(results(steps, tried), RED_LINE).rules[0]
    assert (rule.status, rule.n, rule.unjudged) == (Status.PASS, 60, 0)


def test_a_text_attack_out_of_time_is_not_missing_for_a_rule_on_labels() -> None:
    """It could not have shown labels, so nothing crashed and nothing is lost."""
    tried = [attempt(i, "labels", kind="labels") for i in range(60)]
    tried += [attempt(i, "words", kind="text", status=AttemptStatus.BUDGET_EXHAUSTED) for i in range(60)]
    described = {
        "labels": AttackEntry(label="", meaning="", source="", goal="labels", threat_model=""),
        "words": AttackEntry(label="", meaning="", source="", goal="text", threat_model=""),
    }
    found = results([step(i) for i in range(60)], tried, catalogue=Catalogue(attacks=described))
    rule = judge(found, {"id": "labels", "event": "label_counts", "max_rate": 0.05}).rules[0]
    assert (rule.status, rule.due, rule.lost) == (Status.PASS, 60, 0)


def test_a_label_attack_that_cannot_tell_from_chance_is_no_evidence() -> None:
    """The event needs `label_exact`; its accuracy alone showed 0 of 59."""
    chance = {"label_accuracy": Score(value=0.5), "label_exact": Missing(missing="could be chance")}
    tried = [attempt(i, "random-labels", kind="labels", scores=chance) for i in range(60)]
    verdict = judge(
        results([step(i) for i in range(60)], tried), {"id": "l", "event": "label_counts", "max_rate": 0.05}
    )
    assert (verdict.verdict, verdict.rules[0].n) == (Status.INCONCLUSIVE, 0)


def test_a_rescaled_step_proves_a_leak_and_bounds_nothing() -> None:
    """Only the client knows its factors, so that nothing came back says little.

    What came back is a leak all the same.
    """
    steps = [step(i, VerificationStatus.RESCALED) for i in range(70)]
    clean = results(steps, [attempt(i) for i in range(70)])
    assert judge(clean, RED_LINE).verdict is Status.INCONCLUSIVE
    leaking = results(steps, [attempt(0, leaks=True), *(attempt(i) for i in range(1, 70))])
    assert judge(leaking, RED_LINE).verdict is Status.FAIL
