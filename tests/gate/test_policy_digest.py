"""The digest of a policy: what it holds, and what a new version may change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from leakaudit.gate.policy import DEFAULTS, Policy, Rule
from tests.support.factories import policy

KNOWN: dict[str, Any] = {
    "owner": "",
    "evidence.min_steps": 59,
    "evidence.min_steps_per_phase.early": 0,
    "evidence.min_steps_per_phase.middle": 0,
    "evidence.min_steps_per_phase.late": 0,
    "evidence.min_texts": 0,
    "evidence.max_error_share": 0.02,
    "evidence.max_censored": 0.2,
    "evidence.max_unjudged": None,
    "evidence.min_tokens": 8,
    "evidence.max_age": "7d",
    "evidence.runs": None,
    "controls.positive.steps": 1,
    "controls.positive.rate_lower": 0.9,
    "controls.negative.steps": 1,
    "controls.negative.rate_upper": 0.1,
    "statistics.confidence": 0.95,
    "requires.defenses": [],
    "requires.kinds": [],
    "requires.attacks_share": None,
    "requires.threat_model.adversary": None,
    "requires.threat_model.sees": None,
    "requires.threat_model.granted_at_most": None,
    "requires.attacks": [],
    "requires.budget_s": None,
    "requires.adaptive": False,
    "requires.granted": [],
    "requires.verified": 0.0,
    "on_inconclusive": None,
    "waivers": None,
    "subject.require_artifact_digest": False,
    "subject.require_clean_tree": False,
    "subject.require_policy_of_run": False,
    "subject.data": "",
    "subject.base_model": "",
    "rules.severity": "high",
    "rules.level": "error",
    "rules.scope.defense": "shipped",
    "rules.scope.attack": "any",
    "rules.min_tokens": None,
    "rules.max_rate": None,
    "rules.metric": None,
    "rules.statistic": None,
    "rules.max_value": None,
    "rules.versus_baseline": None,
    "rules.on_not_comparable": "inconclusive",
    "imported": [],
    "report.text": "masked",
    "report.allow_full": False,
    "report.top_samples": 20,
    "nights.confidence": 0.95,
    "nights.prior": [0.25, 10.0],
    "nights.margin": 0.0,
    "nights.level": "error",
    "baseline.file": "leakaudit.baseline.json",
}
"""Key -> default, of version 1 of the defaults. New keys need no entry."""


def _flat(data: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield from _flat(value[0], f"{above}{key}.")
        else:
            yield above + key, value


def test_a_changed_default_raises_the_version_that_digests_hold() -> None:
    """Else a policy would be judged otherwise under the same digest."""
    rule = Rule(id="a", event="all_words", max_count=0)
    plain = Policy(schema="leakaudit.policy/1", name="n", rules=(rule,))
    found = dict(_flat(plain.model_dump(mode="json", by_alias=True)))
    changed = {key for key, value in KNOWN.items() if found.get(key) != value}
    assert not changed or DEFAULTS > 1, f"raise DEFAULTS of gate/policy.py, and mend KNOWN: {sorted(changed)}"


def test_a_default_that_is_written_out_is_no_change() -> None:
    """A policy is what it demands, however it is written."""
    rate = {"id": "rate", "event": "exact_sentence", "max_rate": 0.05}
    assert policy(rate).digest == policy(rate | {"level": "error"}, evidence={"min_steps": 59}).digest
    assert policy(rate).digest != policy(rate, evidence={"min_steps": 58}).digest
    assert policy(rate).digest != policy(rate | {"max_rate": 0.1}).digest
