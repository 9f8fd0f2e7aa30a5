"""What a policy may require of an audit, and rules that could never fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leakaudit.errors import ConfigError
from leakaudit.gate.policy import load_policy
from leakaudit.gate.verdict import Status
from leakaudit.plugins.names import own_names
from leakaudit.results.schema import Results, VerificationStatus
from tests.support.factories import attempt, audit, changed, results, step
from tests.support.judging import RED_LINE, judge


def _naive() -> Results:
    tried = [attempt(i, defense="prune", adaptive=False) for i in range(60)]
    return results([step(i) for i in range(60)], [*tried, *(attempt(i) for i in range(60))])


def _half_verified() -> Results:
    stamps = [VerificationStatus.VERIFIED] * 60 + [VerificationStatus.UNVERIFIABLE]
    return results([step(i, stamp) for i, stamp in enumerate(stamps)], [attempt(i) for i in range(61)])


@pytest.mark.parametrize(
    ("found", "required", "said"),
    [
        (audit(0, 60), {"attacks": ["tag", "span"]}, "requires the attacks tag, which did not run to their end"),
        (audit(0, 60), {"budget_s": 60}, "requires 60 s for each attempt; the audit gave 30 s"),
        (_naive(), {"adaptive": True}, "requires attacks that know the defence; span did not"),
        (audit(0, 60), {"granted": ["labels"]}, "requires that attacks are given labels; the audit did not give it"),
        (_half_verified(), {"verified": 0.99}, "requires 99% verified steps; 60 of 61 (98.4%) are."),
    ],
)
def test_an_audit_that_lacks_what_the_policy_requires_does_not_pass(
    found: Results, required: dict[str, Any], said: str
) -> None:
    """The sentence names what is lacking."""
    loose = {"min_steps": 59, "max_error_share": 0.5, "max_unjudged": 0.5}
    assert judge(found, RED_LINE, evidence=loose).verdict is Status.PASS
    verdict = judge(found, RED_LINE, evidence=loose, requires=required)
    assert verdict.verdict is Status.INCONCLUSIVE and said in verdict.sentence


def test_an_attack_with_options_is_the_attack_that_a_policy_names() -> None:
    """Options are compared only where the policy names them."""
    found = audit(0, 60, attack="tag(steps=3)")
    for name, expected in {
        "tag": Status.PASS,
        "tag(steps=3)": Status.PASS,
        "tag(steps=9)": Status.INCONCLUSIVE,
    }.items():
        assert judge(found, RED_LINE, requires={"attacks": [name]}).verdict is expected


def test_what_is_required_and_missing_does_not_hide_a_leak() -> None:
    """A recovered text is a fact, whatever else should have been tried."""
    assert judge(audit(1, 59), RED_LINE, requires={"attacks": ["tag"]}).verdict is Status.FAIL


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (
            "[{id: r, metric: rougeL, statistic: max, max_value: 1}]",
            "max_value: input should be less than or equal to 0.99",
        ),
        (
            "[{id: r, event: exact_sentence, max_rate: 0.9999999}]",
            "max_rate: input should be less than or equal to 0.99",
        ),
        ("[{id: r, event: exact_sentence, max_count: 59}]", "allows 59 leaks, and 59 steps are enough to pass it"),
        ("[]", "the policy has no rule, so it could never fail"),
        ("[{id: r, event: all_words, min_tokens: 3, max_count: 0}]", "min_tokens goes with the event exact_sequence"),
        ("[{id: r, event: exact_sequence, min_tokens: 4, max_count: 0}]", "write one of 1, 2, 3, 5, 9, 17"),
        ("[{id: r, event: exact_sequence, max_count: 0}]\nrequires: {attacks: [spam]}", "the attack 'spam' is unknown"),
    ],
)
def test_a_rule_that_could_never_fail_is_refused(tmp_path: Path, rules: str, said: str) -> None:
    """So is one whose numbers mean nothing."""
    path = tmp_path / "policy.yaml"
    path.write_text(f"schema: leakaudit.policy/1\nname: loose\nrules: {rules}\n")
    with pytest.raises(ConfigError) as caught:
        load_policy(path, own_names())
    assert said in str(caught.value)


def test_the_same_update_counts_once_whatever_its_steps_say() -> None:
    """A copy under another number of sentences is no further evidence."""
    found = audit(0, 5)
    copies = [
        step(i).model_copy(update={"snapshot": step(i % 5).snapshot, "n_sentences": 1 if i < 5 else None})
        for i in range(20)
    ]
    twice = changed(results(copies, [attempt(i) for i in range(20)]), run=found.run)
    assert judge(twice, RED_LINE).rules[0].n == 5
    scaled = [copies[0], step(1, VerificationStatus.SCALED).model_copy(update={"snapshot": copies[0].snapshot})]
    verdict = judge(results(scaled, [attempt(i) for i in range(2)]), RED_LINE)
    assert verdict.verdict is Status.ERROR
    assert (
        "steps st-000000 and st-000001 have the same update, but one is stamped verified and the other scaled"
        in verdict.sentence
    )


@pytest.mark.parametrize(("values", "expected"), [([1.0] * 10, Status.FAIL), ([0.6] * 10, Status.INCONCLUSIVE)])
def test_a_mean_that_is_surely_above_its_limit_fails_with_few_steps(values: list[float], expected: Status) -> None:
    """Ten steps of 1.0 have a mean above 0.61, by Hoeffding's inequality."""
    found = results([step(i) for i in range(10)], [attempt(i, recall=value) for i, value in enumerate(values)])
    rule = {"id": "mean", "metric": "token_recall", "statistic": "mean", "max_value": 0.5}
    assert judge(found, rule).verdict is expected
