"""A plan keeps as many steps as the policy needs.

They are spread over the run at a bounded cost, and one line describes them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from leakaudit.capture import plan
from leakaudit.capture.plan import GROWTH, LEAST_DISTANCE, LEAST_STEPS, Plan, steps_to_pass
from leakaudit.config.audit import AuditConfig, PluginSpec
from leakaudit.gate import evaluate as gate
from leakaudit.gate.policy import EvidencePolicy, Policy, Rule, default_policy
from tests.support.factories import NOW, audit


def of(total: int | None, policy: Policy | None = None, **keys: Any) -> Plan:
    return Plan.of(AuditConfig(**keys), policy or default_policy(), total)


def kept(made: Plan, total: int) -> list[int]:
    """Return the steps that a run of `total` keeps, counted by hand."""
    return [step for step in range(total) if made.due(step)][: made.most]


def rules(*found: Rule, steps: int = 1) -> Policy:
    return Policy(schema="leakaudit.policy/1", name="test", evidence=EvidencePolicy(min_steps=steps), rules=found)


def test_the_steps_that_a_policy_needs_come_from_its_rules_and_its_floor() -> None:
    """A rate of 5 % needs 59 clean steps, and a rate of 1 % needs 299.

    Rules that only warn need no steps.
    """
    red = Rule(id="red", event="exact_sentence", max_count=0)
    rate = Rule(id="rate", event="exact_sentence", max_rate=0.01)
    mean = Rule(id="mean", metric="rougeL", statistic="mean", max_value=0.5)
    assert steps_to_pass(default_policy()) == 59
    assert steps_to_pass(rules(red)) == 1
    assert steps_to_pass(rules(red, steps=7)) == 7
    assert steps_to_pass(rules(red, rate)) == 299
    assert steps_to_pass(rules(red, rate.model_copy(update={"level": "warn"}))) == 1
    assert steps_to_pass(rules(red, mean)) == 30
    assert steps_to_pass(rules(red, mean.model_copy(update={"statistic": "p95"}))) == 59


@pytest.mark.parametrize("limit", [0.05, 0.1, 0.3])
def test_the_smallest_audit_that_passes_has_that_many_steps(limit: float) -> None:
    """The gate itself says so: with one step less it does not pass."""
    policy = rules(Rule(id="rate", event="exact_sentence", max_rate=limit))
    needed = steps_to_pass(policy)
    verdicts = [gate.evaluate(audit(0, n), policy, now=NOW).verdict for n in (needed - 1, needed)]
    assert verdicts == ["INCONCLUSIVE", "PASS"]


@pytest.mark.parametrize("total", [1, 2, 3, 5, 9, 10])
def test_a_run_of_a_few_steps_keeps_all(total: int) -> None:
    """A client of federated learning trains so few."""
    made = of(total)
    assert kept(made, total) == list(range(total)) and made.kept == total


@pytest.mark.parametrize("total", [*range(11, 130), 580, 581, 600, 1_200, 99_999])
def test_auto_keeps_what_the_policy_needs_and_bounds_the_cost(total: int) -> None:
    """From 581 steps on there are enough for the policy.

    A shorter run keeps ten steps or a tenth of them, whichever is more.
    """
    made = of(total)
    found = kept(made, total)
    assert made.kept == len(found)
    assert len(found) >= min(59, max(LEAST_STEPS, total // LEAST_DISTANCE))
    assert len(found) <= max(2 * LEAST_STEPS, total / LEAST_DISTANCE + 1)
    assert len(found) <= 65
    assert found[-1] >= 0.8 * (total - 1), "spread to the end of the run"


def test_a_given_number_of_steps_is_spread_over_the_run() -> None:
    """As is what a policy with other rules needs."""
    assert kept(of(300, max_snapshots=5), 300) == [0, 60, 120, 180, 240]
    assert kept(of(320, max_snapshots=5, first_step=20), 320) == [20, 80, 140, 200, 260]
    assert len(kept(of(6_000, rules(Rule(id="rate", event="all_words", max_rate=0.01))), 6_000)) == 300


def test_numbers_are_taken_as_they_are() -> None:
    """A rhythm that somebody gave is kept, whatever it costs."""
    assert kept(of(12, every_n_steps=3, first_step=1, max_snapshots=2), 12) == [1, 4]
    assert kept(of(None, every_n_steps=100, max_snapshots=3), 1_000) == [0, 100, 200]


@pytest.mark.parametrize("first", [0, 7])
def test_a_run_of_unknown_length_is_covered_at_growing_distances(first: int) -> None:
    """Distances double at first, so that a short run keeps some steps.

    Later a step is due after a tenth of the steps so far.
    """
    made = of(None, first_step=first)
    found = kept(made, 20_000)
    assert [step - first for step in found[:9]] == [0, 1, 2, 4, 8, 16, 26, 36, 46]
    later = list(pairwise(found[5:]))
    assert all(after - step == max(LEAST_DISTANCE, (step - first) // GROWTH) for step, after in later)
    assert made.kept is None and len(found) == made.most == 65
    assert found[58] - first == 6_686, "as config and documentation say"


@pytest.mark.parametrize(
    ("total", "keys", "said"),
    [
        (3, {}, "keeps all 3 steps|more than this run has, so it can fail the policy and not pass it"),
        (1_200, {}, "keeps 60 of 1,200 steps (every 20th)|"),
        (1_200, {"max_snapshots": 5}, "keeps 5 of 1,200 steps (every 240th)|cannot reach: set `max_snapshots: 59`"),
        (300, {}, "keeps 30 of 300 steps (every 10th)|cannot reach: set `every_n_steps: 5`"),
        (10_000, {"every_n_steps": 1}, "keeps 65 of 10,000 steps (every step, up to step 64)|"),
        (None, {"every_n_steps": 100}, "keeps every 100th step (up to 65)|"),
        (None, {}, "keeps steps 0, 1, 2, 4, 8, 16 and so on at growing distances (up to 65|by step 6,686"),
        (5, {"first_step": 9}, "will keep no step: the run has 5, and `first_step` is 9|more than this run has"),
    ],
)
def test_the_plan_says_what_it_keeps_and_what_the_policy_needs(total: int, keys: Any, said: str) -> None:
    """In one clause each, with what to set where the policy is out of reach."""
    made, config = of(total, **keys), AuditConfig(**keys)
    steps, policy = said.split("|")
    assert steps in made.steps_in_words()
    words = made.policy_in_words(config, room=100)
    assert policy in words if policy else not words


@pytest.mark.parametrize(
    ("total", "keys"), [(1_200, {"max_snapshots": 5}), (300, {}), (80, {}), (581, {"every_n_steps": 90})]
)
def test_what_the_plan_says_to_set_is_enough(total: int, keys: Any) -> None:
    """The numbers are tried."""
    said = of(total, **keys).policy_in_words(AuditConfig(**keys), room=100)
    advice = {
        key: int(value)
        for key, value in (part.split(": ") for part in said.split("`") if part.count(": ") == 1 and part[0] in "em")
    }
    assert advice
    assert (of(total, **{**keys, **advice}).kept or 0) >= 59


def test_steps_that_find_no_room_are_said() -> None:
    """If attacks wait for the end, all kept steps are on the disk at once.

    The policy needs them all.
    """
    config = AuditConfig(schedule="deferred")
    made = of(1_200, schedule="deferred")
    assert plan.room_in_words(made, config, room=22) == "the disk space allowed holds 22 of them (`max_spool_gb: 20`)"
    assert made.policy_in_words(config, room=22).endswith("set `max_spool_gb: 54`")
    assert plan.room_in_words(made, AuditConfig(), room=22).endswith("22 of them at a time (`max_spool_gb: 20`)")
    assert plan.room_in_words(made, config, room=60) == ""


def test_the_longest_time_that_attacks_take_is_said() -> None:
    """By their budgets, defences included."""
    assert plan.time_in_words(
        AuditConfig(defenses=(PluginSpec(name="round"), PluginSpec(name="prune")), budget_s=10)
    ) == ("7 attacks x 3 defences, up to 10 s each: up to 4 min a step")
