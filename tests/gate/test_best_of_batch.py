"""One recovered text of a large batch shows; a bag of all words is no leak."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from leakaudit.gate.evaluate import evaluate
from leakaudit.gate.policy import default_policy
from leakaudit.gate.verdict import Status
from leakaudit.reports.cells import cell_for
from leakaudit.reports.redaction import redact
from leakaudit.reports.terminal import print_audit
from leakaudit.results.consistency import contradictions
from leakaudit.results.recovery import Severity, recovered, severity
from leakaudit.results.schema import Attempt, Results, Score, TextMode
from tests.support.factories import NOW, attempt, of_sequences, policy, results, sequence, step, with_scores
from tests.support.judging import judge

TEXTS = 128


def _step_of(number: int, best: float) -> Attempt:
    """Build an attempt on 128 texts: one has a ROUGE-L of `best`, the others 0."""
    overlaps = [best] + [0.0] * (TEXTS - 1)
    sequences = [
        with_scores(sequence(f"sq-{i}", overlap), sentences_found=float(overlap > 0.25), token_precision=0.2)
        for i, overlap in enumerate(overlaps)
    ]
    done = of_sequences(attempt(number), sequences)
    found = float(best > 0.25)
    more = {
        "best_rl": Score(value=best),
        "sentences_found": Score(value=found / TEXTS, n=TEXTS),
        "sentence_precision": Score(value=found / TEXTS),
    }
    return done.model_copy(update={"scores": dict(done.scores) | more})


def _audit(best: list[float]) -> Results:
    steps = [step(i, n_sequences=TEXTS).model_copy(update={"n_tokens_bucket": "1025-2048"}) for i in range(len(best))]
    return results(steps, [_step_of(i, one) for i, one in enumerate(best)])


LEAKED = _audit([0.8] + [0.1] * 58)
"""59 steps; in one of them one text of 128 came back almost whole, and no mean shows it."""


def test_a_rule_on_the_best_text_fails_where_the_mean_passes() -> None:
    """The mean ROUGE-L of the worst step is 0.8 / 128."""
    assert contradictions(LEAKED) == ()
    best = {"id": "best", "metric": "best_rl", "statistic": "max", "max_value": 0.5}
    mean = {"id": "mean", "metric": "rougeL", "statistic": "max", "max_value": 0.5}
    assert judge(LEAKED, mean).verdict is Status.PASS
    verdict = judge(LEAKED, best, mean)
    assert verdict.verdict is Status.FAIL and verdict.deciding_rule == "best"
    assert verdict.rules[0].worst is not None and verdict.rules[0].worst.step == "st-000000"


@pytest.mark.parametrize(
    ("statistic", "best", "expected"),
    [
        ("mean", [0.1] * 59, Status.PASS),
        ("mean", [0.9] * 59, Status.FAIL),
        ("p95", [0.1] * 59, Status.PASS),
        ("p95", [0.9] * 10 + [0.1] * 49, Status.FAIL),
        ("max", [0.1] * 59, Status.PASS),
        ("max", [0.1] * 58 + [0.6], Status.FAIL),
    ],
)
def test_every_statistic_of_a_policy_reads_the_best_text(statistic: str, best: list[float], expected: Status) -> None:
    """Mean and 95th percentile are over steps; the maximum is the best of all."""
    rule = {"id": "best", "metric": "best_rl", "statistic": statistic, "max_value": 0.5}
    assert judge(_audit(best), rule).verdict is expected


def test_the_share_of_texts_found_can_be_limited() -> None:
    """One text of 128 is 0.8 %."""
    rule = {"id": "found", "metric": "sentences_found", "statistic": "max"}
    assert judge(LEAKED, rule | {"max_value": 0.0}).verdict is Status.FAIL
    assert judge(LEAKED, rule | {"max_value": 0.01}).verdict is Status.PASS


def test_report_and_terminal_say_how_many_texts_were_found() -> None:
    """As a number, because one text of thousands is a share of nearly nothing."""
    assert "1 of 7552 texts resembled (ROUGE-L above 0.25)" in cell_for(LEAKED, "span", "none").lines
    written = StringIO()
    verdict = evaluate(LEAKED, policy(), now=NOW)
    print_audit(redact(LEAKED, [], verdict, TextMode.MASKED), Console(file=written, width=200))
    assert "1 of 7552 texts resembled" in written.getvalue()
    assert "best_rl 0.11" in written.getvalue()


def _bag_of_everything(number: int) -> Attempt:
    """Build an attempt that names the whole vocabulary: nearly all of it wrong."""
    done = attempt(number, "rows", kind="bag", recall=1.0)
    sequences = [with_scores(s, token_precision=0.002).model_copy(update={"strip": None}) for s in done.sequences]
    return of_sequences(done, sequences)


def test_naming_the_whole_vocabulary_is_no_leak_anywhere() -> None:
    """No event, no leak in a cell, nothing recovered.

    The default gate does not fail, and it does not pass on such evidence either.
    """
    found = results([step(i) for i in range(60)], [_bag_of_everything(i) for i in range(60)])
    assert contradictions(found) == ()
    assert {a.events for a in found.attempts} == {()}
    assert severity(found.attempts) is Severity.NOTHING
    counted = recovered(found)
    assert (counted.texts, counted.exact, counted.all_words, counted.most_words) == (60, 0, 0, 0)
    verdict = evaluate(found, default_policy(), now=NOW)
    assert verdict.verdict is Status.INCONCLUSIVE
    assert Status.FAIL not in {rule.status for rule in verdict.rules}
    cell = cell_for(found, "rows", "none")
    assert cell.state == "no leak event"
    assert "mean token recall 100%, token precision 0.2%" in cell.lines


@pytest.mark.parametrize("precision", [0.002, 0.49])
def test_a_summary_carries_precision_beside_recall(precision: float) -> None:
    """A reader who sees a recall of 1 sees what it is worth."""
    done = attempt(0, "rows", kind="bag", recall=1.0)
    sequences = [with_scores(s, token_precision=precision) for s in done.sequences]
    (summary,) = results([step(0)], [of_sequences(done, sequences)]).summaries
    written = summary.model_dump(mode="json")
    assert (written["token_recall"], written["precision"]) == (1.0, precision)
