"""Whether one policy is looser than another."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import BaseModel

from leakaudit.gate.policy import Policy, default_policy
from leakaudit.gate.policy_diff import DIRECTIONS, Direction, compare_policies

PLAIN = default_policy().model_dump(mode="json", by_alias=True)


def policy(**changes: Any) -> Policy:
    """Return the built-in policy with other values: room__key=value."""
    plain = {key: dict(value) if isinstance(value, dict) else value for key, value in PLAIN.items()}
    for path, value in changes.items():
        here, keys = plain, path.split("__")
        for key in keys[:-1]:
            here[key] = dict(here[key])
            here = here[key]
        here[keys[-1]] = value
    return Policy.model_validate(plain)


def rules(name: str, **changes: Any) -> list[dict[str, Any]]:
    """Return the built-in rules with another value in one of them."""
    return [rule | (changes if rule["id"] == name else {}) for rule in PLAIN["rules"]]


def numbers(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Yield the key of every number in a model; list indices are left out."""
    for name, info in model.model_fields.items():
        kinds = list(members(info.annotation))
        if any(kind in (int, float) for kind in kinds):
            yield f"{above}{info.alias or name}"
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from numbers(kind, f"{above}{info.alias or name}.")


def members(kind: Any) -> Iterator[Any]:
    """Yield the types within unions, tuples and annotations."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        yield from members(inner[0])
    elif origin in (typing.Union, types.UnionType, tuple):
        for one in inner:
            yield from members(one)
    else:
        yield kind


def test_every_number_of_a_policy_says_which_way_is_looser() -> None:
    """A new key without a direction would loosen a policy in silence."""
    found = set(numbers(Policy))
    assert {"evidence.min_steps", "rules.max_rate", "nights.prior", "controls.negative.rate_upper"} <= found
    assert found <= DIRECTIONS.keys(), f"add to DIRECTIONS of policy_diff: {sorted(found - DIRECTIONS.keys())}"


LOOSER, TIGHTER, NEITHER = Direction.LOOSER, Direction.TIGHTER, Direction.NEITHER


@pytest.mark.parametrize(
    ("changes", "direction"),
    [
        ({"evidence__min_steps": 29}, LOOSER),
        ({"evidence__max_error_share": 0.1}, LOOSER),
        ({"evidence__max_unjudged": 0.02}, LOOSER),
        ({"evidence__min_tokens": 16}, LOOSER),
        ({"evidence__max_age": "200h"}, LOOSER),
        ({"evidence__max_age": "100h"}, TIGHTER),
        ({"evidence__max_age": "168h"}, NEITHER),
        ({"statistics__confidence": 0.9}, LOOSER),
        ({"controls__positive": {"steps": 0}}, LOOSER),
        ({"controls__positive": {"rate_lower": 0.95}}, TIGHTER),
        ({"controls__negative": {"rate_upper": 0.2}}, LOOSER),
        ({"requires__attacks": ["span"]}, TIGHTER),
        ({"requires__budget_s": 60.0}, TIGHTER),
        ({"requires__adaptive": True}, TIGHTER),
        ({"report__text": "full"}, LOOSER),
        ({"report__text": "hash"}, TIGHTER),
        ({"report__allow_full": True}, LOOSER),
        ({"report__top_samples": 50}, NEITHER),
        ({"nights__level": "warn"}, LOOSER),
        ({"nights__margin": 0.1}, LOOSER),
        ({"name": "other"}, NEITHER),
        ({"rules": rules("sentence-rate", max_rate=0.1)}, LOOSER),
        ({"rules": rules("sentence-rate", max_rate=0.01)}, TIGHTER),
        ({"rules": rules("sentence-rate", level="warn")}, LOOSER),
        ({"rules": rules("label-counts", level="error")}, TIGHTER),
        ({"rules": rules("label-counts", max_rate=0.9)}, NEITHER),
        ({"rules": rules("no-text-verbatim", min_tokens=9)}, LOOSER),
        ({"rules": rules("no-text-verbatim", min_tokens=None)}, TIGHTER),
        ({"rules": rules("no-text-verbatim", max_count=1)}, LOOSER),
        ({"rules": rules("no-text-verbatim", severity="high")}, LOOSER),
        ({"rules": rules("overlap", max_value=0.4)}, TIGHTER),
        ({"rules": rules("overlap", severity="high")}, NEITHER),
        ({"rules": rules("overlap", scope={"defense": "shipped", "attack": "span"})}, NEITHER),
        ({"rules": rules("overlap", statistic="max")}, NEITHER),
        ({"rules": rules("overlap", id="overlap-of-texts")}, NEITHER),
        ({"rules": PLAIN["rules"][1:]}, LOOSER),
        ({"rules": PLAIN["rules"][:-1]}, NEITHER),
        ({"rules": [*PLAIN["rules"], {"id": "more", "event": "all_words", "max_count": 0}]}, TIGHTER),
    ],
)
def test_one_change_has_one_direction(changes: dict[str, Any], direction: Direction) -> None:
    """And the way back has the opposite one."""
    opposite = {LOOSER: TIGHTER, TIGHTER: LOOSER, NEITHER: NEITHER}
    old, new = policy(), policy(**changes)
    assert [change.direction for change in compare_policies(old, new)] == [direction]
    assert [change.direction for change in compare_policies(new, old)] == [opposite[direction]]


def test_another_kind_of_limit_is_no_change_of_strictness() -> None:
    """A count of 0 and a rate of 5 % are different questions."""
    new = policy(rules=rules("no-sentence-verbatim", max_count=None, max_rate=0.05))
    assert {(one.key, one.direction) for one in compare_policies(policy(), new)} == {
        ("rules.max_count", NEITHER),
        ("rules.max_rate", NEITHER),
    }


def test_the_order_of_rules_and_equal_policies_are_no_change() -> None:
    """Rules are compared by their ids."""
    assert not compare_policies(policy(), default_policy())
    assert not compare_policies(policy(), policy(rules=PLAIN["rules"][::-1]))


def test_a_requirement_that_is_replaced_is_neither() -> None:
    """One attack for another asks for something else, not for less."""
    one, other = policy(requires__attacks=["span"]), policy(requires__attacks=["tag"])
    assert [change.direction for change in compare_policies(one, other)] == [NEITHER]
    assert [change.direction for change in compare_policies(one, policy())] == [LOOSER]


def test_a_change_is_one_sentence() -> None:
    """It names the key, the rule, both values and the direction."""
    new = policy(rules=rules("sentence-rate", max_rate=0.1), evidence__max_unjudged=0.02)
    assert [change.sentence for change in compare_policies(policy(), new)] == [
        "evidence.max_unjudged not set -> 0.02: looser",
        "max_rate of sentence-rate 0.05 -> 0.1: looser",
    ]
    removed = compare_policies(policy(), policy(rules=PLAIN["rules"][1:]))
    assert [change.sentence for change in removed] == ["rule no-sentence-verbatim removed: looser"]


IMPORTED = {"id": "model", "import": "memaudit", "measure": "regurgitation_rate", "max_value": 0.1}
UNDECIDED = {"since": "2026-11-01", "until": "2026-11-20", "owner": "o", "reason": "r"}
WORSE = {"id": "worse", "event": "exact_sentence", "versus_baseline": {"margin": 0.1}}
EPSILON = {"id": "epsilon", "claimed_epsilon": {"max": 8.0}}


def more(**rule: Any) -> list[dict[str, Any]]:
    return [*PLAIN["rules"], rule]


@pytest.mark.parametrize(
    ("old", "new", "direction"),
    [
        ({"imported": [IMPORTED]}, {"imported": [IMPORTED | {"max_value": 0.5}]}, LOOSER),
        ({"imported": [IMPORTED]}, {"imported": [IMPORTED | {"level": "warn"}]}, LOOSER),
        ({"imported": [IMPORTED]}, {"imported": []}, LOOSER),
        ({"imported": [IMPORTED]}, {"imported": [IMPORTED | {"severity": "critical"}]}, TIGHTER),
        ({}, {"on_inconclusive": UNDECIDED}, LOOSER),
        ({"on_inconclusive": UNDECIDED}, {"on_inconclusive": UNDECIDED | {"until": "2026-11-30"}}, LOOSER),
        ({"on_inconclusive": UNDECIDED}, {"on_inconclusive": UNDECIDED | {"since": "2026-11-02"}}, TIGHTER),
        ({"on_inconclusive": UNDECIDED}, {"on_inconclusive": UNDECIDED | {"owner": "p"}}, NEITHER),
        ({"waivers": "w.yaml"}, {"waivers": {"file": "w.yaml", "max_days": 30}}, TIGHTER),
        ({"waivers": "w.yaml"}, {"waivers": "v.yaml"}, NEITHER),
        ({}, {"waivers": {"file": "w.yaml", "max_days": 30}}, LOOSER),
        ({"subject": {"data": "notes"}}, {}, LOOSER),
        ({"subject": {"data": "notes"}}, {"subject": {"data": "letters"}}, NEITHER),
        ({"subject__base_model": "sha256:" + "0" * 64}, {}, LOOSER),
        ({}, {"requires__threat_model": {"adversary": "active server"}}, TIGHTER),
        ({}, {"requires__threat_model": {"granted_at_most": []}}, TIGHTER),
        (
            {"requires__threat_model": {"granted_at_most": ["labels"]}},
            {"requires__threat_model": {"granted_at_most": ["labels", "words"]}},
            LOOSER,
        ),
        ({"rules": more(**WORSE)}, {"rules": more(**WORSE, on_not_comparable="warn")}, LOOSER),
        ({"rules": more(**EPSILON)}, {"rules": more(**EPSILON | {"claimed_epsilon": {"max": 9.0}})}, LOOSER),
    ],
)
def test_a_change_of_a_part_that_may_be_missing_has_a_direction(
    old: dict[str, Any], new: dict[str, Any], direction: Direction
) -> None:
    """Wrong: exit code 0 where a policy got looser."""
    opposite = {LOOSER: TIGHTER, TIGHTER: LOOSER, NEITHER: NEITHER}
    assert [change.direction for change in compare_policies(policy(**old), policy(**new))] == [direction]
    assert [change.direction for change in compare_policies(policy(**new), policy(**old))] == [opposite[direction]]


def test_an_attack_that_is_replaced_by_a_claim_is_a_rule_that_is_gone() -> None:
    """Wrong: a rule of the same id, and nothing is looser."""
    claim = [EPSILON | {"id": rule["id"]} if rule["id"] == "sentence-rate" else rule for rule in PLAIN["rules"]]
    found = compare_policies(policy(), policy(rules=claim))
    assert [change.direction for change in found] == [TIGHTER, LOOSER]
