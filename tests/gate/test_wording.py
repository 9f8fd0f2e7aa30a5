"""The sentences of a verdict, word by word, and its numbers."""

from __future__ import annotations

import pytest

from leakaudit.gate import evaluate as gate
from leakaudit.gate.verdict import Status
from leakaudit.gate.wording import percent
from tests.support.factories import NOW, attempt, audit, policy, results, step
from tests.support.judging import RATE, RED_LINE, judge


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
    assert "1 client step audited: no sentence of 8+ tokens was recovered exactly" in verdict.sentence
    assert "The rate may be anything up to 95%." in verdict.sentence


def test_sentences_end_once() -> None:
    """No "?." where a question ends the sentence."""
    verdict = judge(audit(0, 60), RED_LINE | {"scope": {"attack": "spam"}})
    assert "did you mean 'span'? Not tested is not a pass." in verdict.sentence
    assert gate.unreadable("was it edited?", policy(), now=NOW).sentence.endswith("judged: was it edited?")


@pytest.mark.parametrize(
    ("value", "beside", "expected"),
    [(0.05, None, "5%"), (0.0501, 0.05, "5.01%"), (0.0, None, "0%"), (0.0001, None, "<0.1%"), (1.0, None, "100%")],
)
def test_percentages_tell_apart_what_differs(value: float, beside: float | None, expected: str) -> None:
    """A bound just above the limit is not printed as the limit."""
    assert percent(value, beside) == expected
