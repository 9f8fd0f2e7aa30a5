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

from leakaudit import catalogue, gate, registry, stats
from leakaudit.errors import ConfigError
from leakaudit.gate import Status, Verdict
from leakaudit.scores import Attempt, AttemptStatus, Results, VerificationStatus
from tests.factories import NOW, attempt, audit, changed, of_sequences, policy, results, step

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
    """The upper bound must be at or below the limit to pass, the lower above it to fail."""
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
    assert "1 client step audited, no leak seen" in verdict.sentence
    assert "the leak rate may be anything up to 95%" in verdict.sentence


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
    """Missing is not zero: sixty attempts that crashed, did not apply or were skipped are no evidence."""
    found = results([step(i) for i in range(60)], [attempt(i, status=status) for i in range(60)])
    verdict = judge(found, RED_LINE)
    assert (verdict.verdict, verdict.rules[0].n) == (Status.INCONCLUSIVE, 0)
    assert f"60 {status.value.replace('_', ' ')}" in verdict.sentence
    assert "Not tested is not a pass." in verdict.sentence


@pytest.mark.parametrize("kind", ["bag", "labels"])
def test_an_attack_of_another_kind_is_no_evidence(kind: str) -> None:
    """A bag of words or a count of labels cannot show that a sentence came back, so it cannot clear one."""
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
    """The strong attack crashed everywhere, the weak one found nothing: that is not clean."""
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
    """Leaks under a defence that is only simulated do not fail what is shipped, and the other way round."""
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
    """Results older than the policy allows or without a date leave every rule open; from the future they cannot be."""
    found, rules = audit(0, 60), policy(RED_LINE)
    assert gate.evaluate(found, rules, now=NOW + timedelta(days=6)).verdict is Status.PASS
    late = gate.evaluate(found, rules, now=NOW + timedelta(days=8))
    assert "The evidence is 8.1 days old; the policy allows 7d." in late.sentence
    early = gate.evaluate(found, rules, now=NOW - timedelta(days=1))
    assert (early.verdict, early.problems) == (Status.ERROR, ("the results are dated in the future",))
    assert judge(audit(0, 60, finished=""), RED_LINE).verdict is Status.INCONCLUSIVE
    backwards = changed(found, run=found.run.model_copy(update={"started": "2026-11-02T11:30:00Z"}))
    assert "finished before it started, by its own clock" in gate.evaluate(backwards, rules, now=NOW).sentence
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
    """Recall runs from 0.1 to 0.2 over the steps; two attacks, of which the worse one counts."""
    attempts = [attempt(i, recall=0.1 + 0.1 * i / max(1, n - 1)) for i in range(n)]
    attempts += [attempt(i, "tag", recall=0.01) for i in range(n)]
    rule = {"id": "m", "metric": "token_recall", "statistic": statistic, "max_value": limit}
    assert judge(results([step(i) for i in range(n)], attempts), rule).verdict is expected


def reached(number: int, attack: str = "span", *, passes: bool | None, leaks: bool = False, **extra: Any) -> Attempt:
    """Build an attempt on one text whose attack could tell whether it was in reach."""
    done = attempt(number, attack, leaks=leaks, **extra)
    return of_sequences(done, [s.model_copy(update={"passes": passes}) for s in done.sequences])


def test_a_verdict_says_where_a_search_gave_up_on_what_was_in_reach() -> None:
    """No sentence came back, and yet the update protects none of those that an attack would have accepted."""
    attempts = [reached(i, passes=i < 2) for i in range(60)]
    attempts += [reached(i, "tag", passes=None) for i in range(60)]
    verdict = judge(results([step(i) for i in range(60)], attempts), RATE)
    assert verdict.verdict is Status.PASS
    assert verdict.sentence.endswith(
        "2 of the 60 texts that did not come back were in reach of an attack whose search gave up: that is no protection."
    )
    one = judge(results([step(0)], [reached(0, passes=True)]), RATE)
    assert "The text that did not come back was in reach" in one.sentence


def test_a_verdict_says_that_everything_was_out_of_reach_only_where_it_was() -> None:
    """By an attack that can tell; a text that another attack recovered did come back; without a teller nothing is said."""
    steps = [step(i) for i in range(2)]
    out = "What did not come back was out of reach of the attacks that can tell."
    assert out in judge(results(steps, [reached(i, passes=False) for i in range(2)]), RATE).sentence
    assert "reach" not in judge(results(steps, [attempt(i) for i in range(2)]), RATE).sentence
    both = [reached(0, passes=True), reached(1, passes=False), attempt(0, "tag", leaks=True), attempt(1, "tag")]
    assert "gave up" not in judge(results(steps, both), RATE).sentence
    short = [reached(i, passes=i > 0, long_enough=i == 0) for i in range(2)]
    assert out in judge(results(steps, short), RATE).sentence  # the short text is no sentence


def test_results_that_contradict_themselves_are_an_error() -> None:
    """Evidence that cannot be true is not judged."""
    ghost = attempt(0, status=AttemptStatus.ERROR, events=("exact_sentence",))
    found = results([step(0), step(0)], [ghost, attempt(9)], positive=(2, 1))
    verdict = judge(found, RED_LINE)
    assert (verdict.verdict, verdict.exit_code) == (Status.ERROR, 5)
    assert verdict.problems == (
        "step st-000000 is recorded twice",
        "attempts on step st-000009, which is not recorded",
        "attack span on step st-000000 did not run and yet leaked",
        "the positive control counts 2 of 1",
    )
    assert gate.unreadable("no such file", policy(), now=NOW).exit_code == 5


@settings(deadline=None)
@given(st.integers(0, 80), st.integers(0, 80), st.floats(0.01, 0.9))
def test_no_pass_above_the_limit_and_no_fail_below_it(leaks: int, clean: int, limit: float) -> None:
    """Whatever the counts: PASS means the bound is below the limit, FAIL that it is above."""
    verdict = judge(audit(leaks, clean), RATE | {"max_rate": limit}, evidence={"min_steps": 1})
    upper, lower = stats.upper_bound(leaks, leaks + clean), stats.lower_bound(leaks, leaks + clean)
    assert (verdict.verdict is Status.PASS) == (leaks + clean > 0 and upper <= limit)
    assert (verdict.verdict is Status.FAIL) == (lower > limit)
    assert verdict.exit_code == gate.exit_code(verdict) == {"PASS": 0, "FAIL": 3, "INCONCLUSIVE": 4}[verdict.verdict]


def test_a_verdict_survives_its_own_json() -> None:
    """`verdict.json` read back is the same verdict."""
    verdict = judge(audit(7, 53), RED_LINE, RATE)
    assert Verdict.model_validate(gate.to_json(verdict)) == verdict
    assert gate.to_json(verdict)["schema"] == "leakaudit.verdict/1"


def test_the_default_policy_fails_on_one_sentence_and_says_what_a_pass_takes() -> None:
    """Used where no policy is given."""
    default = gate.default_policy()
    assert gate.evaluate(audit(1, 2), default, now=NOW).verdict is Status.FAIL
    assert gate.evaluate(audit(0, 3), default, now=NOW).verdict is Status.INCONCLUSIVE
    assert gate.evaluate(audit(0, 59), default, now=NOW).verdict is Status.PASS


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
    found = gate.load_policy(path)
    assert found.rules[1].scope.attacks == ("tag", "span")
    assert found.rules[1].max_value == 0.35
    path.write_text("# a comment\n" + POLICY.replace("{min_steps: 60, max_age: 7d}", "{max_age: 7d, min_steps: 60}"))
    assert gate.load_policy(path).digest == found.digest
    path.write_text(POLICY.replace("min_steps: 60", "min_steps: 61"))
    assert gate.load_policy(path).digest != found.digest


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
        ("max_age: 7d", "max_age: a week", r"gate\.yaml:4: .*write a whole number and m, h or d, such as 7d"),
        ("leakaudit.policy/1", "leakaudit.policy/2", r"gate\.yaml:1: schema: input should be 'leakaudit\.policy/1'"),
        ("    severity: critical\n", "    level: warn\n", "every rule is at level warn, so nothing could ever fail"),
        ("attack: [tag, span]", "attack: []", "an empty list of attacks would switch the rule off"),
    ],
)
def test_a_mistake_in_a_policy_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    """A typo must not switch a rule off."""
    path = tmp_path / "gate.yaml"
    path.write_text(POLICY.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        gate.load_policy(path)


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
            ["7: rules: every rule is at level warn, so nothing could ever fail; set one to level: error"],
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
        gate.load_policy(path, catalogue.names_for(audit(0, 1)))
    said = re.sub(r"('exact_sentence'), .*;", r"\1, ...;", str(caught.value))
    assert said.splitlines() == [f"{path}:{problem}" for problem in problems]


def test_a_name_may_be_one_of_ours_of_the_results_or_of_another_package(tmp_path: Path) -> None:
    """Known is what this package has and what stands in the results; options in brackets do not count."""
    path = tmp_path / "gate.yaml"
    path.write_text(POLICY.replace("[tag, span]", "[dlg, theirs]").replace("shipped", "prune(share=0.99)"))
    theirs = results([step(0)], [attempt(0, "theirs")])
    assert gate.load_policy(path, catalogue.names_for(theirs)).rules[1].scope.attacks == ("dlg", "theirs")
    with pytest.raises(ConfigError, match="the attack 'theirs' is unknown; known: "):
        gate.load_policy(path, catalogue.own_names())


def test_every_registered_name_is_known_without_importing_it() -> None:
    """The names stand in the source; this imports the plugins and compares."""
    own = catalogue.own_names()
    for kind in ("attacks", "defenses", "metrics"):
        registered = {n for n, plugin in getattr(registry, kind) if plugin.__module__.startswith("leakaudit.")}
        assert getattr(own, kind) - {"semantic_similarity"} == registered


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
    """Eleven of twelve tokens in every step, by a guess or a bag; a recall without its precision decides nothing."""
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
        of_sequences(a, [s.model_copy(update={"token_precision": None}) for s in a.sequences])
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
    assert gate.percent(value, beside) == expected


def test_the_gate_runs_without_torch() -> None:
    """Importing it must load neither torch nor scipy.stats."""
    code = "import sys, leakaudit.gate; print(sorted({'torch', 'scipy.stats', 'altair'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"
