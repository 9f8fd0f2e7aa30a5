"""The cheapest way to PASS: which defence may be named, and which never."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from leakaudit.gate.evaluate import evaluate
from leakaudit.gate.verdict import Status, Verdict, WayOut
from leakaudit.history.reference import reference_of
from leakaudit.results.schema import Attempt, AttemptStatus, Price, Utility, VerificationStatus
from tests.support.factories import NOW, attempt, audit, policy, results, step

STEPS = 60


def utility(defense: str, difference: float | None, within: tuple[float, float] | None = None, **extra: Any) -> Utility:
    """Build how accurate a model is after three trainings; 0.9 without a defence."""
    ends: dict[str, Any] = {} if within is None else {"lower": within[0], "upper": within[1]}
    value = 0.9 + (difference or 0.0)
    made: dict[str, Any] = {
        "metric": "accuracy",
        "value": value,
        "baseline": 0.9,
        "difference": difference,
        "seeds": (1, 2, 3),
    }
    return Utility(defense=defense, **(made | ends | extra))


def judged(tested: dict[str, list[Attempt]], **extra: Any) -> Verdict:
    """Judge an audit whose undefended update leaks in every step."""
    attempts = [attempt(i, leaks=True) for i in range(STEPS)]
    attempts += [one for ours in tested.values() for one in ours]
    return evaluate(results([step(i) for i in range(STEPS)], attempts, **extra), policy(), now=NOW)


def out(tested: dict[str, list[Attempt]], **extra: Any) -> WayOut:
    found = judged(tested, **extra).way_out
    assert found is not None
    return found


def clean(defense: str, **extra: Any) -> dict[str, list[Attempt]]:
    """Return attempts that ran to their end and found nothing."""
    return {defense: [attempt(i, defense=defense, **extra) for i in range(STEPS)]}


def test_the_cheapest_defence_is_the_one_whose_loss_has_the_smallest_upper_end() -> None:
    """A smaller mean with a wide interval may hide a large loss, so it does not win."""
    costs = (utility("wide", -0.001, (-0.08, 0.078)), utility("sure", -0.003, (-0.009, 0.002)))
    found = out(clean("wide") | clean("sure"), utility=costs)
    assert found.defense == "sure"
    assert found.sentence == ("sure: no sentence in 60 steps (at most 4.9%), accuracy -0.3 points [-0.9, +0.2].")
    assert found.passing == ("wide", "sure")


def test_a_loss_without_an_interval_never_wins_against_one_with_an_interval() -> None:
    """Its upper end is unknown, which is not the same as small."""
    costs = (utility("one-seed", 0.0), utility("sure", -0.05, (-0.06, -0.04)))
    assert out(clean("one-seed") | clean("sure"), utility=costs).defense == "sure"


def test_where_lower_is_better_the_smallest_increase_wins() -> None:
    """A sign that is taken the wrong way would name the defence that harms most."""
    loss: dict[str, Any] = {"metric": "loss", "value": 0.5, "baseline": 0.4, "higher_is_better": False}
    costs = (
        Utility(defense="bad", difference=0.1, lower=0.09, upper=0.11, **loss),
        Utility(defense="good", difference=0.012, lower=0.008, upper=0.017, **loss),
    )
    found = out(clean("bad") | clean("good"), utility=costs)
    assert (found.defense, found.cost) == ("good", "loss +0.012 [+0.008, +0.017]")


def test_of_equal_losses_the_shorter_step_wins_and_an_unmeasured_time_is_not_the_shortest() -> None:
    """Missing is never zero, for a time as well."""
    costs = tuple(utility(name, -0.01, (-0.02, 0.0)) for name in ("untimed", "slow", "fast"))
    prices = (
        Price(defense="untimed", traffic=0.1),
        Price(defense="slow", seconds=2.0),
        Price(defense="fast", seconds=1.1),
    )
    tested = clean("untimed") | clean("slow") | clean("fast")
    assert out(tested, utility=costs, prices=prices).defense == "fast"


def test_nothing_is_chosen_among_defences_whose_cost_nobody_measured() -> None:
    """The first of a list is not the cheapest; a single one is named without a cost."""
    both = out(clean("a") | clean("b"))
    assert both.defense == "" and both.passing == ("a", "b")
    assert both.sentence == "These pass: a, b. What this costs the model was not measured."
    assert out(clean("a")).sentence == (
        "a: no sentence in 60 steps (at most 4.9%). What this costs the model was not measured."
    )


def test_a_measured_defence_wins_against_an_unmeasured_one() -> None:
    """A cost that is missing is not zero."""
    found = out(clean("unmeasured") | clean("known"), utility=(utility("known", -0.2, (-0.3, -0.1)),))
    assert found.defense == "known"


def test_a_defence_with_a_training_that_diverged_has_no_cost() -> None:
    """The mean of the trainings that did not diverge would look harmless."""
    costs = (utility("breaks", 0.0, (-0.001, 0.001), diverged=1), utility("known", -0.2, (-0.3, -0.1)))
    assert out(clean("breaks") | clean("known"), utility=costs).defense == "known"


def test_costs_in_different_metrics_are_not_compared() -> None:
    """They have no order; the metric with most defences counts."""
    costs = (
        utility("odd", 0.0, (0.0, 0.0), metric="f1"),
        utility("b", -0.02, (-0.03, -0.01)),
        utility("c", -0.01, (-0.02, 0.0)),
    )
    assert out(clean("odd") | clean("b") | clean("c"), utility=costs).defense == "c"


def out_of_time() -> dict[str, list[Attempt]]:
    return clean("d", status=AttemptStatus.BUDGET_EXHAUSTED)


def not_applicable() -> dict[str, list[Attempt]]:
    return clean("d", status=AttemptStatus.NOT_APPLICABLE)


@pytest.mark.parametrize("made", [out_of_time, not_applicable])
def test_a_search_that_gave_up_or_nothing_that_applied_makes_no_defence_effective(made: Any) -> None:
    """Even if it is the only one with a measured cost, and that is zero."""
    verdict = judged(made(), utility=(utility("d", 0.0, (0.0, 0.0)),))
    assert verdict.alternatives[0].status is Status.INCONCLUSIVE
    assert verdict.way_out is not None
    assert (verdict.way_out.defense, verdict.way_out.passing) == ("", ())
    assert verdict.way_out.sentence.startswith(
        "No tested defence passes. Undecided for lack of evidence: d with no evidence."
    )


@pytest.mark.parametrize(
    ("stamp", "status"),
    [(VerificationStatus.MISMATCH, AttemptStatus.SKIPPED), (VerificationStatus.UNVERIFIABLE, AttemptStatus.RAN)],
)
def test_steps_that_failed_verification_make_no_defence_effective(
    stamp: VerificationStatus, status: AttemptStatus
) -> None:
    """What cannot be recovered from another batch's update says nothing of a defence."""
    attempts = [attempt(i, defense=name, status=status) for i in range(STEPS) for name in ("none", "d")]
    found = results([step(i, stamp) for i in range(STEPS)], attempts, utility=(utility("d", 0.0, (0.0, 0.0)),))
    verdict = evaluate(found, policy(), now=NOW)
    assert verdict.alternatives[0].status is Status.INCONCLUSIVE
    assert verdict.way_out is not None and verdict.way_out.passing == ()


def test_a_defence_measured_only_against_attacks_that_did_not_know_it_is_not_effective() -> None:
    """Its rule passes; that is no answer to an attacker who knows it."""
    verdict = judged(clean("naive", adaptive=False), utility=(utility("naive", 0.0, (0.0, 0.0)),))
    assert (verdict.alternatives[0].status, verdict.alternatives[0].naive) == (Status.PASS, True)
    assert verdict.way_out is not None and (verdict.way_out.defense, verdict.way_out.passing) == ("", ())
    assert "Only attacks that did not know the defence were stopped by naive" in verdict.way_out.sentence


def test_an_attack_that_did_not_run_or_reads_labels_does_not_make_a_test_adaptive() -> None:
    """Attempts that are no evidence for the rule say they knew the defence."""
    tested = clean("naive", adaptive=False)
    tested["idle"] = [attempt(i, "idle", "naive", status=AttemptStatus.NOT_APPLICABLE) for i in range(STEPS)]
    tested["llg"] = [attempt(i, "llg", "naive", kind="labels") for i in range(STEPS)]
    assert judged(tested).alternatives[0].naive


def test_a_defence_that_leaks_is_never_the_way_out() -> None:
    """However cheap it is."""
    leaks = {"cheap": [attempt(i, defense="cheap", leaks=i < 30) for i in range(STEPS)]}
    found = out(leaks, utility=(utility("cheap", 0.1, (0.05, 0.15)),))
    assert (found.defense, found.sentence) == ("", "No tested defence passes.")


def test_undecided_defences_are_named_with_what_was_found_and_what_is_allowed() -> None:
    """Ten clean steps do not show a rate of at most 5 %."""
    few = {"d": [attempt(i, defense="d") for i in range(10)]}
    attempts = [attempt(i, leaks=True) for i in range(10)] + few["d"]
    found = evaluate(results([step(i) for i in range(10)], attempts), policy(), now=NOW).way_out
    assert found is not None
    assert found.sentence == (
        "No tested defence passes. Undecided for lack of evidence: d with no sentence in 10 steps (at most 25.9%). "
        "The rule sentence-rate allows 5%."
    )


def test_without_another_defence_that_is_what_is_missing() -> None:
    """Nothing was tested, so nothing can be said to fail."""
    assert out({}).sentence == "No other defence than the one that the run ships was tested."


def test_the_bounds_of_a_difference_are_no_leak_rate() -> None:
    """Wrong: `at most -22%`, the upper bound of the change since the baseline."""
    rules = ({"id": "no-worse", "event": "exact_sentence", "versus_baseline": {"margin": 0.1}},)
    tested = clean("sure")["sure"]
    found = results([step(i) for i in range(STEPS)], [*(attempt(i, leaks=True) for i in range(STEPS)), *tested])
    asked = policy(*rules)
    before = reference_of(audit(30, 30), found, asked)
    before = replace(before, run="old", differs="")
    way = evaluate(found, asked, now=NOW, reference=before).way_out
    assert way is not None and (way.defense, way.seen) == ("sure", "")


def test_a_defence_that_lacks_an_accountant_is_not_called_short_of_steps() -> None:
    """Wrong: only the rate that passes is said of it."""
    claim = {"id": "epsilon", "claimed_epsilon": {"max": 8}}
    rate = {"id": "rate", "event": "exact_sentence", "max_rate": 0.05}
    found = results(
        [step(i) for i in range(STEPS)], [*(attempt(i, leaks=True) for i in range(STEPS)), *clean("sure")["sure"]]
    )
    way = evaluate(found, policy(rate, claim), now=NOW).way_out
    assert way is not None and "sure with no sentence in 60 steps (at most 4.9%) (open: epsilon)" in way.sentence
