"""A text of which words were not kept is not protected by that."""

from __future__ import annotations

import pytest

from leakaudit.gate.verdict import Status
from leakaudit.results.schema import Attempt, Results
from tests.support.factories import attempt, results, step
from tests.support.judging import RATE, RED_LINE, judge

STEPS = 60
HALF = {"id": "half", "event": "most_words", "max_rate": 0.05}
WORDS = {"id": "words", "event": "all_words", "max_rate": 0.05}
RECALL = {"id": "recall", "metric": "token_recall", "statistic": "max", "max_value": 0.95}


def audit(*attempts: Attempt, in_part: int = STEPS) -> Results:
    """Build verified steps, of the first of which some words were not kept."""
    steps = [step(i).model_copy(update={"words_not_kept": i < in_part}) for i in range(STEPS)]
    return results(steps, attempts)


@pytest.mark.parametrize("rule", [RED_LINE, RATE, WORDS, RECALL])
def test_a_rule_on_every_word_does_not_pass(rule: dict[str, object]) -> None:
    """All but the last word of each text came back, or nothing did."""
    for recall in (0.1, 0.9):
        tried = [attempt(i, recall=recall) for i in range(STEPS)]
        verdict = judge(audit(*tried), rule)
        assert verdict.verdict is Status.INCONCLUSIVE and verdict.rules[0].n == 0
        assert "the words that a language model only predicts were not kept" in verdict.sentence
        assert judge(audit(*tried, in_part=0), rule).verdict is Status.PASS


def test_a_rule_on_half_of_the_words_is_decided() -> None:
    """The words that were kept are enough for it."""
    assert judge(audit(*(attempt(i) for i in range(STEPS))), HALF).verdict is Status.PASS
    leaked = judge(audit(*(attempt(i, recall=0.9, events=("most_words",)) for i in range(STEPS))), HALF)
    assert leaked.verdict is Status.FAIL


def test_what_came_back_is_proof_all_the_same() -> None:
    """Success proves, whatever was kept."""
    verdict = judge(audit(*(attempt(i, leaks=i == 7) for i in range(STEPS))), RED_LINE)
    assert (verdict.verdict, verdict.rules[0].k, verdict.rules[0].n) == (Status.FAIL, 1, 1)


def test_the_sentence_counts_such_steps_apart() -> None:
    """They are verified, so they are not called unverifiable."""
    found = audit(*(attempt(i) for i in range(STEPS)), in_part=1)
    verdict = judge(found, RATE)
    assert (verdict.verdict, verdict.rules[0].n) == (Status.INCONCLUSIVE, STEPS - 1)
    assert "1 of 60 audited steps could not be judged (words were not kept, `keep: auto`)" in verdict.sentence
    assert judge(found, RATE, evidence={"max_unjudged": 0.02}).verdict is Status.PASS
    assert "unverifiable" not in verdict.sentence
