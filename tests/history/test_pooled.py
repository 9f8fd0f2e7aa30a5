"""Several runs judged together: what counts, what does not, and what is refused."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from pydantic import ValidationError

from leakaudit.gate.evaluate import evaluate
from leakaudit.gate.verdict import Status, Verdict, to_json
from leakaudit.gate.waivers import Waivers
from leakaudit.history.pooled import Given, judge_together
from leakaudit.results.bounds import upper_bound
from leakaudit.results.files import with_digest
from leakaudit.results.schema import Controls, Privacy, Results
from tests.benchmarks.pooled_runs import EQUAL, EVERY, MIXED, share
from tests.support.factories import NOW, policy
from tests.support.judging import RATE, RED_LINE, judge
from tests.support.pooled import small_run, small_runs, together

P95 = {"id": "overlap", "metric": "rougeL", "statistic": "p95", "max_value": 0.5}


def rule(verdict: Verdict, name: str = "rate") -> Any:
    return next(found for found in verdict.rules if found.id == name)


def with_steps(found: Results, **fields: Any) -> Results:
    """Return a run whose steps have other fields."""
    steps = tuple(step.model_copy(update=fields) for step in found.steps)
    return with_digest(found.model_copy(update={"steps": steps}))


def marked(found: Results, first: int, snapshot: str) -> Results:
    """Return a run with marks of one key, and with hashes of a key of its own."""
    steps = tuple(
        step.model_copy(update={"unit": f"{first + number:016x}", "snapshot": f"{snapshot}{number}"})
        for number, step in enumerate(found.steps)
    )
    run = found.run.model_copy(update={"pairing": "ab" * 8})
    return with_digest(found.model_copy(update={"steps": steps, "run": run}))


def test_ten_clean_steps_are_too_few_and_sixty_of_six_runs_are_enough() -> None:
    """Neither does a single run of ten pass, nor do six of them stay undecided."""
    alone = judge(small_run("run-0"), RATE)
    verdict = together(small_runs(6), RATE, P95)
    assert (alone.verdict, verdict.verdict, verdict.steps) == (Status.INCONCLUSIVE, Status.PASS, 60)
    assert (rule(verdict).k, rule(verdict).n, rule(verdict).upper) == (0, 60, upper_bound(0, 60))
    assert [(run.run, run.steps, run.verdict) for run in verdict.runs] == [
        (f"run-{number}", 10, Status.INCONCLUSIVE) for number in range(6)
    ]
    assert "6 runs judged together: 60 steps." in verdict.sentence


def test_one_run_has_todays_verdict() -> None:
    """Joining changes no figure of a run: clean, leaking or with a repeated update."""
    repeating = small_run("b", 0, 70)
    repeating = with_digest(
        repeating.model_copy(
            update={"steps": (*repeating.steps[:-1], repeating.steps[-1].model_copy(update={"snapshot": "sha256:0"}))}
        )
    )
    for found in (small_run("a", 0, 70), small_run("b", 5, 60, leaks=3), repeating):
        own, joined = (
            to_json(one) for one in (judge(found, RATE, RED_LINE, P95), together([found], RATE, RED_LINE, P95))
        )
        for verdict in (own, joined):
            for rule in verdict["rules"]:
                rule["worst"] = rule["worst"] and rule["worst"]["step"].rpartition("/")[2]
        same = ("verdict", "exit_code", "rules", "controls", "steps", "texts_back", "valid_until", "evidence_age_s")
        assert {key: own[key] for key in same} == {key: joined[key] for key in same}
        assert joined["sentence"].startswith(own["sentence"])


def test_a_leak_in_one_of_seven_runs_fails_a_red_line_and_is_named() -> None:
    """Sixty clean steps of other runs do not hide one leak."""
    verdict = together([*small_runs(6), small_run("run-9", 500, 9, leaks=1)], RATE, RED_LINE)
    assert (verdict.verdict, verdict.deciding_rule) == (Status.FAIL, "red-line")
    assert "The worst was step st-000509 of run run-9, by span." in verdict.sentence
    assert [run.run for run in verdict.runs if run.verdict is Status.FAIL] == ["run-9"]


def test_a_run_that_is_given_twice_counts_once() -> None:
    """Thirty steps given twice are no sixty, and neither are their controls."""
    runs = small_runs(3)
    once, twice = together(runs, RATE), together([*runs, *runs], RATE)
    assert (twice.verdict, rule(twice).n, twice.steps) == (Status.INCONCLUSIVE, 30, 30)
    assert twice.controls == once.controls
    assert "3 runs given twice were left out." in twice.sentence
    assert [run.counted for run in twice.runs] == [True] * 3 + [False] * 3
    assert twice.results_digest == once.results_digest


def test_two_different_results_of_one_run_are_an_error() -> None:
    """Nobody can tell which of the two counts."""
    verdict = together([small_run("run-0"), small_run("run-0", 100)], RATE)
    assert verdict.verdict is Status.ERROR and "give the one that counts" in verdict.sentence


def test_steps_with_the_same_update_or_mark_count_once() -> None:
    """A shard adds nothing to the whole audit, nor the same unit in two runs."""
    whole, shard = small_run("whole", 0, 40), small_run("shard", 0, 20)
    verdict = together([shard, whole], RATE)
    assert (rule(verdict).n, verdict.steps) == (40, 40)
    assert {run.run: run.repeated for run in verdict.runs} == {"shard": 20, "whole": 0}
    assert verdict.controls == judge(whole, RATE).controls
    assert "20 steps repeat others and do not count again." in verdict.sentence
    a, b = marked(small_run("a"), 0, "sha256:a"), marked(small_run("b", 100), 5, "sha256:b")
    assert together([a, b], RATE).steps == 15


def test_a_leak_in_the_repetition_of_a_step_counts() -> None:
    """A step leaked if an attack recovered it in any of the runs that hold it."""
    verdict = together([small_run("clean", 0, 30), small_run("leaking", 0, 9, leaks=1)], RED_LINE)
    assert (verdict.verdict, verdict.steps, verdict.texts_back) == (Status.FAIL, 30, 1)


def test_without_a_common_key_equal_figures_mean_the_same_step() -> None:
    """Two jobs with one seed, each with a key of its own, do not count twice."""
    first = small_run("a")
    again = with_digest(
        first.model_copy(
            update={
                "run": first.run.model_copy(update={"id": "b"}),
                "steps": tuple(step.model_copy(update={"snapshot": "hmac:b" + step.snapshot}) for step in first.steps),
            }
        )
    )
    assert together([first, again], RATE).steps == 10
    assert together([first, with_steps(again, loss=0.7)], RATE).steps == 20, "other figures, another step"


def test_leaks_with_equal_figures_all_count() -> None:
    """Else three leaks of a hundred steps could be counted as one, and pass."""
    runs = [
        with_digest(
            run.model_copy(
                update={"steps": tuple(one.model_copy(update={"snapshot": run.run.id + one.id}) for one in run.steps)}
            )
        )
        for run in (small_run(name, 0, 0, leaks=1) for name in "abc")
    ]
    assert rule(together([*small_runs(10), *runs], RATE)).k == 3


def test_marks_of_one_key_tell_steps_with_equal_figures_apart() -> None:
    """Two clean steps may agree in every figure; marks show that they are two."""
    a, b = marked(small_run("a"), 0, "sha256:a"), marked(small_run("b"), 500, "sha256:b")
    verdict = together([a, b], RATE)
    assert verdict.steps == 20 and "no marks of one key" not in verdict.sentence


def test_other_keys_are_refused_with_both_values() -> None:
    """A run with noise says nothing about runs without: exit code 4 and both values."""
    runs = small_runs(6)
    noisy = runs[2].model_copy(
        update={
            "regime": runs[2].regime.model_copy(
                update={"declared": ("gaussian-noise(scale=0.1)",), "declared_defenses": ("gaussian-noise",)}
            )
        }
    )
    runs[2] = with_digest(noisy)
    verdict = together(runs, RATE)
    assert (verdict.verdict, verdict.exit_code, verdict.rules) == (Status.INCONCLUSIVE, 4, ())
    assert "run run-2 has 'gaussian-noise(scale=0.1)', the others 'none'" in verdict.sentence
    assert "--despite shipped" in verdict.sentence and not verdict.problems
    despite = together(runs, RATE, despite=("shipped",))
    assert despite.verdict is Status.PASS
    assert "They were pooled although they differ in the defences that the run declares." in despite.sentence


def test_a_leak_in_runs_that_cannot_be_pooled_is_not_hidden() -> None:
    """`--allow inconclusive` would otherwise let them pass."""
    other = small_run("run-1", 100, 9, leaks=1)
    other = with_digest(other.model_copy(update={"subject": other.subject.model_copy(update={"model": "Other"})}))
    verdict = together([small_run("run-0"), other], RED_LINE).allowing_inconclusive()
    assert (verdict.exit_code, verdict.texts_back, verdict.runs[1].verdict) == (4, 1, Status.FAIL)


@pytest.mark.parametrize("change", [{"min_tokens": 16}, {"simulated": True}])
def test_what_one_audit_has_once_must_agree(change: dict[str, Any]) -> None:
    """No option joins runs that count other texts, or real steps with simulated ones."""
    other = small_run("run-1", 100)
    if "simulated" in change:
        other = other.model_copy(update={"run": other.run.model_copy(update=change)})
    else:
        other = other.model_copy(
            update=change | {"attempts": (), "coverage": other.coverage.model_copy(update={"audited_steps": 10})}
        )
        other = other.model_copy(update={"summaries": ()})
    verdict = together([small_run("run-0"), with_digest(other)], RATE, despite=("attacks",))
    assert verdict.verdict is Status.INCONCLUSIVE and "These runs cannot be pooled." in verdict.sentence
    assert "--despite" not in verdict.sentence


def test_one_old_run_keeps_the_rest_from_passing() -> None:
    """The age of the newest run is not that of the evidence."""
    runs = [
        *small_runs(6),
        small_run("old", 500, run={"started": "2026-10-01T00:00:00Z", "finished": "2026-10-01T01:00:00Z"}),
    ]
    verdict = together(runs, RATE)
    assert verdict.verdict is Status.INCONCLUSIVE
    assert "The age of run old is more than the policy allows, or unknown." in rule(verdict).reasons
    assert verdict.valid_until == "2026-10-08T01:00:00Z"
    unknown = together([*small_runs(6), small_run("undated", 500, run={"finished": ""})], RATE)
    assert unknown.verdict is Status.INCONCLUSIVE and unknown.valid_until is None


def test_positive_controls_add_up_and_a_blind_run_is_named() -> None:
    """Two runs that see do not make the clean steps of a blind third one evidence."""
    runs = [*small_runs(2, 30), small_run("blind", 500, 10, positive=(0, 1))]
    verdict = together(runs, RATE)
    assert verdict.verdict is Status.INCONCLUSIVE
    assert (verdict.controls[0].k, verdict.controls[0].n) == (2, 3)
    many = together([*small_runs(60, 2), small_run("blind", 500, 10, positive=(0, 1))], RATE)
    assert many.verdict is Status.INCONCLUSIVE, "60 of 61 controls reach 90 %, and the run is blind all the same"
    assert any(reason.startswith("Run blind:") for reason in rule(many).reasons)


def test_a_run_without_controls_is_not_covered_by_those_of_others() -> None:
    """The controls of another machine do not show that this one sees."""
    runs = [*small_runs(6), small_run("bare", 500, controls=Controls())]
    verdict = together(runs, RATE)
    assert verdict.verdict is Status.INCONCLUSIVE and any("Run bare:" in reason for reason in rule(verdict).reasons)


def test_one_failed_negative_control_makes_every_rule_inconclusive() -> None:
    """One of 31 is below the limit of 10 %, and its run's scores are still wrong."""
    runs = [*small_runs(30, 2), small_run("broken", 500, 9, leaks=1, negative=(1, 1))]
    verdict = together(runs, RATE, RED_LINE)
    assert {found.status for found in verdict.rules} == {Status.INCONCLUSIVE}
    assert "Run broken: The negative control leaked in 1 of 1" in rule(verdict).reasons[0]


def test_a_run_that_contradicts_itself_makes_the_verdict_an_error() -> None:
    """An edited run is not outvoted by five good ones."""
    bad = with_steps(small_run("edited", 500), step=3)
    verdict = together([*small_runs(6), bad], RATE)
    assert (verdict.verdict, verdict.exit_code) == (Status.ERROR, 5)
    assert verdict.problems[0].startswith("run edited: step st-000500 has the number 3")
    unreadable = judge_together(
        [Given(small_run("run-0")), Given(None, problem="x/results.json: no such file")], policy(RATE), now=NOW
    )
    assert (unreadable.verdict, unreadable.runs[1].verdict) == (Status.ERROR, Status.ERROR)


def test_an_earlier_schema_adds_leaks_and_no_trust() -> None:
    """Schema 1.4 does not say which attack read its canary, so no pool with it passes."""
    old = small_run("old", 500)
    old = old.model_copy(update={"controls": old.controls.model_copy(update={"kinds": {}})})
    old = with_digest(old.model_copy(update={"schema_": "leakaudit.results/1.4"}))
    verdict = together([*small_runs(6), old], RATE)
    assert verdict.verdict is Status.INCONCLUSIVE and verdict.steps == 70
    newer = with_digest(small_run("newer", 500).model_copy(update={"schema_": "leakaudit.results/1.5"}))
    assert together([*small_runs(6), newer], RATE).verdict is Status.PASS


def test_gaps_of_one_run_are_not_explained_by_another() -> None:
    """Snapshots that one run refused do not excuse attempts that another run lacks."""
    refusing = small_run("refusing", 600)
    refusing = with_digest(
        refusing.model_copy(update={"coverage": refusing.coverage.model_copy(update={"skipped_snapshots": 9})})
    )
    lacking = small_run("lacking", 500, 11)
    lacking = lacking.model_copy(update={"attempts": lacking.attempts[:-1]})
    lacking = with_digest(lacking.model_copy(update={"summaries": small_run("x", 500, 10).summaries}))
    verdict = together([*small_runs(6), refusing, lacking], RATE)
    assert verdict.verdict is Status.INCONCLUSIVE
    assert "1 step lacks attempts that were due" in " ".join(rule(verdict).reasons)


def test_two_commits_of_the_code_are_named() -> None:
    """A fix changes what the mean is about; an unknown commit is not another one."""
    runs = [
        with_digest(run.model_copy(update={"subject": run.subject.model_copy(update={"code_commit": commit})}))
        for run, commit in zip(small_runs(3), ("a" * 40, "b" * 40, None), strict=True)
    ]
    assert "They are of 2 commits of the code." in together(runs, RATE).sentence
    assert "commits" not in together(runs[1:], RATE).sentence


def test_the_policy_fixes_the_number_of_runs() -> None:
    """With `runs: 7` neither six runs pass nor eight."""
    asked: dict[str, Any] = {"evidence": {"runs": 7}}
    found = {count: together(small_runs(count), RATE, **asked) for count in (6, 7, 8)}
    assert [one.verdict for one in found.values()] == [Status.INCONCLUSIVE, Status.PASS, Status.INCONCLUSIVE]
    assert "The policy judges 7 runs together (`runs`); these are 6." in rule(found[6]).reasons
    assert "before the first result" not in found[7].sentence
    one = evaluate(small_run("a", 0, 100), policy(RATE, **asked), now=NOW)
    assert one.verdict is Status.INCONCLUSIVE and "this is one" in one.sentence


def test_the_error_rate_is_that_of_the_policy_if_the_number_of_runs_is_fixed() -> None:
    """A rate just above the limit passes in at most 5 % of the cases.

    This holds for equal and for different runs.

    Looking after each run passes in more than 5 %, which is why the policy can fix the number.
    """
    rng, tries = random.Random(7), 4_000
    slack = 3 * (0.05 * 0.95 / tries) ** 0.5
    fixed = [share(rates, (count,), rng, tries) for rates in (EQUAL, MIXED) for count in (6, 20, 30)]
    assert max(fixed) <= 0.05 + slack, fixed
    assert share(EQUAL, EVERY, rng, tries) > 0.05 + 3 * slack


def test_the_time_grows_with_the_steps_and_not_with_their_square() -> None:
    """Fifty runs of a thousand steps stay usable."""

    def seconds(runs: list[Results]) -> float:
        start = time.process_time()
        assert together(runs, RATE).verdict is Status.PASS
        return time.process_time() - start

    few, many = small_runs(2, 200), small_runs(10, 200)
    seconds(few)
    assert min(seconds(many) for _ in range(2)) < 12 * min(seconds(few) for _ in range(2))


def test_the_verdict_is_one_json_document() -> None:
    """The runs are in it, with digests, steps and their own verdicts; no path is."""
    document = json.loads(json.dumps(to_json(together(small_runs(6), RATE))))
    assert set(document["runs"][0]) == {
        "run",
        "results_sha256",
        "results_digest",
        "steps",
        "repeated",
        "counted",
        "verdict",
        "sentence",
    }
    assert document["results_sha256"] is None and document["run"] == "6 runs"


def test_runs_on_data_of_two_names_are_not_pooled() -> None:
    """Wrong: clean steps on one data set let the leaks on another one pass."""
    first, second, unnamed = small_runs(3, 30)
    named = [
        with_digest(run.model_copy(update={"subject": run.subject.model_copy(update={"data": name})}))
        for run, name in ((first, "notes"), (second, "letters"))
    ]
    refused = together([*named, unnamed])
    assert refused.verdict is Status.INCONCLUSIVE and "They differ in the data set" in refused.sentence
    assert together(named, despite=("data",)).verdict is Status.PASS
    assert together([named[0], unnamed]).verdict is Status.PASS, "it may be the same"


@pytest.mark.parametrize(
    ("epsilons", "status"),
    [
        ((3.0, 3.0), Status.PASS),
        ((3.0, 50.0), Status.FAIL),
        ((50.0, 3.0), Status.FAIL),
        ((3.0, None), Status.INCONCLUSIVE),
        ((None, 3.0), Status.INCONCLUSIVE),
    ],
)
def test_the_accountant_of_every_run_counts(epsilons: tuple[float | None, ...], status: Status) -> None:
    """Wrong: PASS by the epsilon of the first run, whatever the others say."""
    runs = []
    for run, epsilon in zip(small_runs(2, 30), epsilons, strict=True):
        told = Privacy(epsilon=epsilon, delta=1e-5, accountant="opacus rdp", origin="accountant", steps=4)
        privacy = () if epsilon is None else (told,)
        runs.append(with_digest(run.model_copy(update={"privacy": privacy})))
    verdict = together(runs, RATE, {"id": "epsilon", "claimed_epsilon": {"max": 8}})
    assert verdict.verdict is status
    assert status is not Status.INCONCLUSIVE or "There is no accountant" in verdict.sentence


def test_an_adversary_that_differs_is_not_pooled_away() -> None:
    """Wrong: `--despite granted` lets the first run speak for the others."""
    runs = small_runs(2, 30)
    other = runs[1].threat_model.model_copy(update={"sees": "something else"})
    runs[1] = with_digest(runs[1].model_copy(update={"threat_model": other}))
    asked = {"threat_model": {"sees": "one client's transmitted update"}}
    verdict = together(runs, RATE, requires=asked, despite=("granted",))
    assert verdict.verdict is Status.INCONCLUSIVE and "Run run-1: The policy is about an adversary" in verdict.sentence


def test_a_waiver_of_one_run_does_not_hold_for_several() -> None:
    """One that holds for any run does; the other says why it does not."""
    today = NOW.date()
    runs = [small_run(f"run-{number}", number * 10, 0, leaks=10) for number in range(6)]
    given = [Given(run, sha256="ab" * 32) for run in runs]

    def judged(run: str) -> Verdict:
        found = {"id": "W-1", "rule": "sentence-rate", "reason": "public", "owner": "ann", "scope": {"run": run}}
        days = {"created": str(today), "expires": str(today)}
        return judge_together(given, policy(), now=NOW, waivers=Waivers.model_validate({"waivers": [found | days]}))

    assert judged("any").verdict is Status.PASS
    alone = judged("run-2")
    assert alone.verdict is Status.FAIL
    assert "it holds for the run run-2 alone, and this verdict is about 6 runs" in alone.waivers[0].sentence
    with pytest.raises(ValidationError, match="is no id of a run"):
        judged("6 runs")
