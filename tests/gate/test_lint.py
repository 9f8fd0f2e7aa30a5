"""The linter of policies: rules that look strict and are not."""

from __future__ import annotations

from typing import Any

import pytest

from leakaudit import registry
from leakaudit.config.audit import DEFAULT_ATTACKS
from leakaudit.config.strict_yaml import parse_document, parse_yaml
from leakaudit.gate.lint import Battery, lint
from leakaudit.gate.policy import Policy, default_policy, round_policy
from leakaudit.gate.policy_text import preset_names, preset_text
from leakaudit.plugins.described import own_goals, own_levels

SHORT = {"id": "short", "event": "exact_sequence", "min_tokens": 3, "max_count": 0}
"""A rule on short texts, with which a policy about texts has no gap."""


def policy(*rules: dict[str, Any], **rest: Any) -> Policy:
    """Return a policy with a rule on short texts before the given ones."""
    return Policy.model_validate({"schema": "leakaudit.policy/1", "name": "p", "rules": [SHORT, *rules], **rest})


def battery(*attacks: str, defenses: tuple[str, ...] = ("none",), **rest: Any) -> Battery:
    """Return what an audit with these attacks of ours runs."""
    goals = {name: own_goals().get(name.partition("(")[0]) for name in attacks}
    given = {"min_tokens": 8, "controls": 3, "budget_s": 60.0, **rest}
    return Battery(attacks=goals, defenses=frozenset(defenses), **given)


def found(one: Policy, runs: Battery | None = None) -> list[tuple[str, tuple[str | int, ...]]]:
    """Return check and place of each finding."""
    return [(finding.id, finding.path) for finding in lint(one, runs)]


def test_goals_and_levels_in_the_source_are_those_of_the_plugins() -> None:
    """A plugin whose goal the linter cannot read would never be warned about."""
    ours = {name: plugin.goal for name, plugin in registry.attacks if plugin.__module__.startswith("leakaudit.")}
    assert dict(own_goals()) == ours
    levels = {name: plugin.level for name, plugin in registry.metrics if plugin.__module__.startswith("leakaudit.")}
    assert dict(own_levels()) == levels


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_has_no_warning(name: str) -> None:
    """What we ship as a start must not be weak itself."""
    assert not lint(parse_yaml(preset_text(name), Policy, name))


def test_the_built_in_policy_has_no_warning() -> None:
    """Neither alone nor with the attacks that run without a configuration."""
    assert not lint(default_policy())
    assert not lint(default_policy(), battery(*(spec.label for spec in DEFAULT_ATTACKS)))


def test_the_policy_of_one_round_is_called_little_evidence() -> None:
    """One round bounds nothing, which its docstring says too."""
    assert ("little-evidence", ("evidence", "min_steps")) in found(round_policy())


@pytest.mark.parametrize(
    ("rule", "rest", "expected"),
    [
        (
            {"id": "r", "event": "exact_sentence", "max_rate": 0.01},
            {},
            ("floor-too-low", ("rules", 1, "max_rate")),
        ),
        (
            {"id": "r", "metric": "rougeL", "statistic": "mean", "max_value": 0.2},
            {},
            ("mean-only", ("rules", 1, "statistic")),
        ),
        (
            {"id": "r", "event": "all_words", "max_rate": 0.5},
            {},
            ("wide-limit", ("rules", 1, "max_rate")),
        ),
        (
            {"id": "r", "event": "all_words", "max_count": 40},
            {},
            ("wide-limit", ("rules", 1, "max_count")),
        ),
        (
            {"id": "r", "event": "all_words", "max_count": 0, "level": "warn", "severity": "critical"},
            {},
            ("critical-warns", ("rules", 1, "level")),
        ),
        (
            {"id": "r", "event": "exact_sequence", "min_tokens": 3, "max_count": 2},
            {},
            ("repeated", ("rules", 1, "max_count")),
        ),
        (
            {"id": "r", "event": "exact_sentence", "max_count": 0, "scope": {"attack": ["llg", "embedding-rows"]}},
            {},
            ("cannot-trigger", ("rules", 1, "scope", "attack")),
        ),
        (
            {"id": "r", "metric": "label_accuracy", "statistic": "max", "max_value": 0.5, "scope": {"attack": "embedding-rows"}},
            {},
            ("cannot-trigger", ("rules", 1, "scope", "attack")),
        ),
        (None, {"controls": {"positive": {"steps": 0}}}, ("no-control", ("controls", "positive", "steps"))),
        (None, {"controls": {"negative": {"steps": 0}}}, ("no-control", ("controls", "negative", "steps"))),
        (None, {"controls": {"positive": {"rate_lower": 0.4}}}, ("weak-control", ("controls", "positive", "rate_lower"))),
        (None, {"controls": {"negative": {"rate_upper": 0.6}}}, ("weak-control", ("controls", "negative", "rate_upper"))),
        (None, {"evidence": {"max_error_share": 0.9}}, ("weak-evidence", ("evidence", "max_error_share"))),
        (None, {"evidence": {"max_censored": 1.0}}, ("weak-evidence", ("evidence", "max_censored"))),
        (None, {"evidence": {"max_unjudged": 0.8}}, ("weak-evidence", ("evidence", "max_unjudged"))),
        (None, {"evidence": {"max_age": "91d"}}, ("old-evidence", ("evidence", "max_age"))),
        (None, {"evidence": {"min_steps": 5}}, ("little-evidence", ("evidence", "min_steps"))),
        (None, {"statistics": {"confidence": 0.8}}, ("low-confidence", ("statistics", "confidence"))),
        (None, {"nights": {"confidence": 0.8}}, ("low-confidence", ("nights", "confidence"))),
    ],
)  # fmt: skip
def test_a_weakness_is_named_once_and_at_its_place(
    rule: dict[str, Any] | None, rest: dict[str, Any], expected: tuple[str, tuple[str | int, ...]]
) -> None:
    """Without the weakness there is no finding, with it exactly one."""
    assert not found(policy())
    assert found(policy(*([] if rule is None else [rule]), **rest)) == [expected]


@pytest.mark.parametrize(
    "rule",
    [
        {"id": "r", "event": "exact_sequence", "min_tokens": 3, "max_rate": 0.05},
        {"id": "r", "event": "exact_sequence", "min_tokens": 3, "max_count": 1, "level": "warn"},
        {"id": "r", "event": "exact_sequence", "min_tokens": 3, "max_count": 1, "scope": {"attack": "span"}},
        {"id": "r", "event": "exact_sequence", "min_tokens": 3, "max_count": 1, "scope": {"defense": "prune"}},
        {"id": "r", "event": "label_counts", "max_rate": 0.2, "scope": {"attack": ["span", "llg"]}},
        {"id": "r", "metric": "of_another_package", "statistic": "p95", "max_value": 0.2, "scope": {"attack": "llg"}},
        {"id": "r", "event": "all_words", "max_rate": 0.05, "scope": {"attack": "of-another-package"}},
    ],
)
def test_what_is_not_weak_is_not_named(rule: dict[str, Any]) -> None:
    """Another limit, level, defence or attack asks another question.

    Of plugins that are not ours nothing is said.
    """
    assert not found(policy(rule))


def test_a_mean_of_nothing_can_never_be_shown() -> None:
    """Its upper bound is above 0 whatever the number of steps."""
    rule = {"id": "r", "metric": "rougeL", "statistic": "mean", "max_value": 0.0}
    assert ("never-shown", ("rules", 1, "max_value")) in found(policy(rule))
    assert not found(policy(rule | {"statistic": "p95"}))


def test_a_policy_that_asks_nothing_of_what_is_sent_is_named() -> None:
    """A rule on another defence alone says nothing about the release."""
    plain = policy().model_dump(mode="json", by_alias=True)
    for defense, expected in (("prune", ["not-shipped"]), ("none", []), ("as-sent", []), ("shipped", [])):
        rules = [SHORT | {"scope": {"defense": defense}}]
        assert [name for name, _ in found(Policy.model_validate(plain | {"rules": rules}))] == expected


def test_a_policy_about_texts_needs_a_rule_on_short_ones() -> None:
    """A policy about labels alone needs none."""
    long_only = Policy.model_validate(
        {
            "schema": "leakaudit.policy/1",
            "name": "p",
            "rules": [{"id": "r", "event": "exact_sentence", "max_count": 0}],
        }
    )
    assert found(long_only) == [("no-short-texts", ("rules",))]
    nine = SHORT | {"min_tokens": 9}
    assert found(long_only.model_copy(update={"rules": (*long_only.rules, *policy(nine | {"id": "n"}).rules[1:])})) == [
        ("no-short-texts", ("rules",))
    ]
    labels = long_only.model_dump(mode="json", by_alias=True) | {
        "rules": [{"id": "r", "event": "label_counts", "max_rate": 0.05}]
    }
    assert not found(Policy.model_validate(labels))


def test_a_battery_that_cannot_break_a_rule_is_named() -> None:
    """Attacks on labels alone let every rule on texts pass or stay undecided."""
    places = found(policy(), battery("llg", "idlg"))
    assert places == [("cannot-trigger", ("rules", 0))]
    assert not found(policy(), battery("llg", "span"))
    unknown = Battery({"of-another-package": None}, frozenset({"none"}), 8, 3, 60.0)
    assert not found(policy(), unknown)


def test_a_scope_that_the_configuration_does_not_run_is_named() -> None:
    """Names count with their options, as for the gate."""
    tagged = {
        "id": "r",
        "event": "all_words",
        "max_count": 0,
        "scope": {"attack": ["tag"], "defense": "prune(share=0.9)"},
    }
    expected = [("not-configured", ("rules", 1, "scope", key)) for key in ("attack", "defense")]
    assert found(policy(tagged), battery("span", "tag(steps=9)", defenses=("none", "prune"))) == expected
    assert not found(policy(tagged), battery("span", "tag", defenses=("none", "prune(share=0.9)")))
    needs = policy(requires={"attacks": ["tag"]})
    assert not found(needs, battery("span", "tag(steps=9)"))
    assert found(needs, battery("span")) == [("not-configured", ("requires", "attacks"))]


@pytest.mark.parametrize(
    ("rest", "runs", "path"),
    [
        ({"controls": {"positive": {"steps": 29}}}, {}, ("controls", "positive", "steps")),
        ({"requires": {"budget_s": 61.0}}, {}, ("requires", "budget_s")),
        ({}, {"min_tokens": 9}, ("evidence", "min_tokens")),
    ],
)
def test_a_configuration_that_gives_less_than_the_policy_asks_is_named(
    rest: dict[str, Any], runs: dict[str, Any], path: tuple[str, ...]
) -> None:
    """Otherwise the audit runs for hours before the gate says so."""
    assert not found(policy(), battery("span"))
    assert found(policy(**rest), battery("span", **runs)) == [("configured-less", path)]


def test_findings_stand_in_the_order_of_the_file() -> None:
    """Each has the line of its value."""
    text = (
        "schema: leakaudit.policy/1\nname: p\nrules:\n  - {id: a, event: exact_sequence, max_count: 0}\n"
        "  - id: b\n    event: all_words\n    max_rate: 0.6\nevidence:\n  min_steps: 60\n  max_age: 100d\n"
    )
    read, document = parse_document(text, Policy, "p.yaml")
    assert [(one.line, one.id) for one in lint(read, line_of=document.line_of)] == [
        (7, "wide-limit"),
        (10, "old-evidence"),
    ]


def test_every_kind_of_limit_can_be_checked_twice() -> None:
    """Wrong: a linter that ends with a traceback on a kind of limit."""
    twice: list[dict[str, Any]] = []
    for number in (1, 2):
        twice.append({"id": f"worse-{number}", "event": "exact_sentence", "versus_baseline": {"margin": number / 10}})
        twice.append({"id": f"epsilon-{number}", "claimed_epsilon": {"max": number}})
    assert [one for one, _ in found(policy(*twice))].count("repeated") == 2


def test_a_claimed_epsilon_does_not_look_at_what_is_sent() -> None:
    """Wrong: no warning where all attacks judge a defence that is not sent."""
    rules = [
        {"id": "epsilon", "claimed_epsilon": {"max": 8}},
        {"id": "rate", "event": "exact_sentence", "max_rate": 0.05, "scope": {"defense": "prune"}},
    ]
    only = Policy.model_validate({"schema": "leakaudit.policy/1", "name": "p", "rules": rules})
    assert ("not-shipped", ("rules",)) in found(only)
