"""What is shipped is always said, and short texts have a rule of their own."""

from __future__ import annotations

import pytest

from leakaudit.gate import evaluate as gate
from leakaudit.gate.policy import default_policy
from leakaudit.gate.verdict import Status
from leakaudit.reports.wording import LEAKS, MEANINGS, meaning
from leakaudit.results.schema import Attempt, Results
from tests.support.factories import NOW, attempt, changed, of_sequences, results, sequence, step
from tests.support.judging import RED_LINE, judge

ELSEWHERE = RED_LINE | {"scope": {"defense": "gaussian-noise(scale=10)"}}


def _both_columns(*, leaks: bool = True) -> Results:
    """Build 60 steps that leak as shipped and are clean under noise."""
    columns = {"none": leaks, "gaussian-noise(scale=10)": False}
    attempts = [attempt(i, defense=name, leaks=leak) for i in range(60) for name, leak in columns.items()]
    return results([step(i) for i in range(60)], attempts)


@pytest.mark.parametrize("level", [None, "warn"])
def test_a_policy_without_a_rule_on_what_is_shipped_passes_no_training_run(level: str | None) -> None:
    """A warning is no such rule; the sentence says what came back."""
    warning = [] if level is None else [RED_LINE | {"id": "warning", "level": level}]
    verdict = judge(_both_columns(), ELSEWHERE, *warning)
    assert verdict.verdict is Status.INCONCLUSIVE
    assert "But 60 of 60 texts word for word came back from the update that the run ships." in verdict.sentence
    assert "No rule at level error looks at the update that the run ships" in verdict.sentence
    assert meaning(verdict) == LEAKS


def test_a_simulation_may_judge_a_defence_that_nobody_ships_and_says_so() -> None:
    """It compares defences before there is a run."""
    found = _both_columns()
    simulated = changed(found, run=found.run.model_copy(update={"simulated": True}))
    verdict = judge(simulated, ELSEWHERE)
    assert verdict.verdict is Status.PASS
    assert "60 of 60 texts word for word came back from the update that the run ships." in verdict.sentence
    assert "This judges a defence that the run does not ship." in verdict.sentence
    assert "does not ship" not in judge(simulated, RED_LINE | {"max_count": 58}).sentence


def _short(number: int, tokens: str, *, leaks: bool) -> Attempt:
    one = sequence(recall=1.0 if leaks else 0.0, long_enough=False).model_copy(update={"min_tokens_bucket": tokens})
    return of_sequences(attempt(number), [one])


@pytest.mark.parametrize(
    ("tokens", "expected"), [("3-4", Status.FAIL), ("5-8", Status.FAIL), ("2", Status.INCONCLUSIVE)]
)
def test_the_built_in_policy_has_a_rule_on_short_texts(tokens: str, expected: Status) -> None:
    """A name of three tokens that comes back word for word fails.

    Two words may be luck.
    """
    found = results([step(i) for i in range(60)], [_short(i, tokens, leaks=i == 0) for i in range(60)])
    verdict = gate.evaluate(found, default_policy(), now=NOW)
    rule = next(rule for rule in verdict.rules if rule.id == "no-text-verbatim")
    assert rule.status is expected
    if expected is Status.FAIL:
        assert "at least one whole text of 3+ tokens was recovered exactly" in rule.sentence
    else:
        assert (rule.n, rule.k) == (0, 0) and "no audited step holds a text of 3+ tokens" in rule.sentence
        assert meaning(verdict) == LEAKS


def test_a_rule_on_short_texts_leaves_out_the_steps_of_shorter_ones() -> None:
    """They cannot have the event, so they do not make the rate smaller."""
    mixed = [_short(i, "3-4" if i < 40 else "2", leaks=False) for i in range(60)]
    short = {"id": "short", "event": "exact_sequence", "min_tokens": 3, "max_rate": 0.2}
    rule = judge(results([step(i) for i in range(60)], mixed), short, evidence={"min_steps": 40}).rules[0]
    assert (rule.n, rule.left_out, rule.status) == (40, 20, Status.PASS)


def test_an_audit_that_counts_longer_texts_than_the_policy_does_not_pass() -> None:
    """What it calls a sentence is not what the policy protects."""
    found = results([step(i) for i in range(60)], [attempt(i) for i in range(60)])
    assert judge(found, RED_LINE).verdict is Status.PASS
    verdict = judge(found, RED_LINE, evidence={"min_tokens": 5})
    assert verdict.verdict is Status.INCONCLUSIVE
    assert "The policy counts texts of 5+ tokens; the audit counted those of 8+ (`min_tokens`)." in verdict.sentence


def test_undecided_without_a_text_is_only_undecided() -> None:
    """The headline speaks of leaks only where texts came back."""
    assert meaning(judge(results([step(0)], [attempt(0)]), RED_LINE)) == MEANINGS[Status.INCONCLUSIVE]
