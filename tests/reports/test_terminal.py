"""The terminal's summary: every attack under every defence at any width."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from leakaudit.gate import evaluate as gate
from leakaudit.reports import print_audit, print_verdict, redact
from leakaudit.results.schema import AttemptStatus, Results, Score, VerificationStatus
from tests.support.factories import NOW, attempt, audit, policy, results, step

DEFENSES = ("none", "gaussian-noise(scale=0.1)", "gaussian-noise(scale=1.0)", "prune(share=0.9)", "freeze-embeddings")
LEAKING = "freeze-embeddings"


def five_defenses(shipped: str = "none") -> Results:
    """Return an audit of two attacks under five defences, of which the last one leaks."""
    attempts = [
        attempt(i, attack, defense, leaks=defense == LEAKING, kind=kind)
        for i in range(3)
        for defense in DEFENSES
        for attack, kind in (("embedding-rows", "bag"), ("llg", "labels"))
    ]
    return results([step(i, shipped=shipped) for i in range(3)], attempts)


def printed(found: Results, width: int) -> str:
    """Return what a terminal of that width shows."""
    out = io.StringIO()
    verdict = gate.evaluate(found, policy(), now=NOW)
    print_audit(redact(found, [], verdict), Console(file=out, width=width, no_color=True))
    return out.getvalue()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 400])
def test_no_defence_and_no_attack_is_ever_dropped_or_cut(width: int) -> None:
    """The one that a narrow terminal dropped was the one that leaked."""
    text = printed(five_defenses(), width)
    unbroken = re.sub(r"\s", "", text)
    for defense in DEFENSES:
        assert defense.replace(" ", "") in unbroken
    assert "…" not in text and "..." not in text
    assert text.count("embedding-rows") in (1, 5) or width == 20
    assert max(map(len, text.split("\n"))) <= width
    assert unbroken.count("leaked,3of3steps") >= 1


@pytest.mark.parametrize("width", [40, 80])
def test_what_leaked_stands_under_its_defence(width: int) -> None:
    """In a list, each defence is a heading."""
    text = " ".join(printed(five_defenses(), width).split())
    last = text.partition("freeze-embeddings")[2]
    assert "embedding-rows: words leaked, 3 of 3 steps; token recall 1.00" in last
    assert "llg: labels leaked, 3 of 3 steps; label accuracy 1.00" in last


def test_the_update_as_sent_is_named_after_what_is_shipped() -> None:
    """`none` would say that nothing is applied."""
    assert "as shipped: gaussian-noise(scale=0.1)" in printed(five_defenses("gaussian-noise(scale=0.1)"), 80)
    assert "as shipped" not in printed(five_defenses(), 80)


def test_a_cell_says_what_came_back_also_when_time_ran_out() -> None:
    """Recall, precision where it was measured, and ROUGE-L."""
    late = AttemptStatus.BUDGET_EXHAUSTED
    scores = {"rougeL": Score(value=0.3), "token_recall": Score(value=0.44), "token_precision": Score(value=0.9)}
    found = results([step(i) for i in range(6)], [attempt(i, status=late, scores=scores) for i in range(6)])
    text = " ".join(printed(found, 80).split())
    assert "out of time, 6 of 6 steps" in text
    assert "ROUGE-L 0.30, token recall 0.44, token precision 0.90" in text
    assert "nothing" not in text


def test_unverifiable_steps_are_no_clean_steps() -> None:
    """They count where they leaked; in `0 of 7 steps` they would bound a rate."""
    unknown = VerificationStatus.UNVERIFIABLE
    found = results(
        [step(i, unknown) if i < 4 else step(i) for i in range(7)],
        [attempt(i, name, leaks=i == 0 and name == "span") for i in range(7) for name in ("span", "tag")],
    )
    text = " ".join(printed(found, 120).split())
    assert "span text leaked, 0 of 3 steps and 1 unverifiable step" in text
    assert "tag no leak event, 0 of 3 steps, 4 unverifiable steps without a leak: no evidence" in text
    alone = results([step(i, unknown) for i in range(2)], [attempt(i) for i in range(2)])
    assert "span unverifiable, 2 unverifiable steps without a leak: no evidence" in " ".join(
        printed(alone, 120).split()
    )


def test_a_cell_without_numbers_says_why() -> None:
    """Not applicable, crashed and not run are different things."""
    reason = "the pooler is frozen, so its update is not shared"
    found = results([step(0)], [attempt(0, status=AttemptStatus.NOT_APPLICABLE, reason=reason)])
    text = " ".join(printed(found, 60).split())
    assert f"not applicable, {reason}" in text


def test_a_rule_that_warns_says_so_and_never_fails() -> None:
    """Red in the first line of a run that passed was taken for its outcome."""
    rules = policy(
        {"id": "warned", "level": "warn", "event": "exact_sentence", "max_rate": 0.01},
        {"id": "judged", "event": "exact_sentence", "max_rate": 0.9},
    )
    out = io.StringIO()
    print_verdict(gate.evaluate(audit(6, 54), rules, now=NOW), console=Console(file=out, width=80, no_color=True))
    lines = {
        line.split()[1]: line.split()[0]
        for line in out.getvalue().split("\n")
        if line.split()[1:2] in (["warned"], ["judged"])
    }
    assert lines == {"warned": "WARN", "judged": "PASS"}
    assert "warning only" not in out.getvalue() and "FAIL" not in out.getvalue()


@pytest.mark.parametrize(("seeds", "said"), [((1, 1, 2, 2), "ROUGE-L 0.50 ± 0.28,"), ((None,) * 4, "ROUGE-L 0.50,")])
def test_a_mean_over_seeds_has_its_standard_deviation(seeds: tuple[int | None, ...], said: str) -> None:
    """The seeds' means are 0.3 and 0.7, which deviate by 0.28."""
    steps = [step(i).model_copy(update={"seed": seed}) for i, seed in enumerate(seeds)]
    values = (0.2, 0.4, 0.6, 0.8)
    scores = [{"rougeL": Score(value=value), "token_recall": Score(value=value)} for value in values]
    found = results(steps, [attempt(i, scores=score) for i, score in enumerate(scores)])
    assert said in " ".join(printed(found, 200).split())
