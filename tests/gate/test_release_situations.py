"""Hundreds of release situations: the gate says what a careful person says."""

from __future__ import annotations

import random
from datetime import timedelta
from functools import cache
from io import StringIO

import pytest
from rich.console import Console

from leakaudit.gate import evaluate as gate
from leakaudit.gate.events import EVENTS
from leakaudit.gate.verdict import Status, Verdict
from leakaudit.reports import redact
from leakaudit.reports.cells import cell_of
from leakaudit.reports.comparison import outcomes
from leakaudit.reports.terminal import print_audit
from leakaudit.results.schema import Results
from leakaudit.results.wording import counted
from tests.support.factories import NOW, policy
from tests.support.release_situations import Situation, opinion, results_of, situation

SEEDS = range(10)
EACH = 20
"""Situations of each seed: 200 in all."""


def judged(found: Situation, results: Results) -> Verdict:
    """Judge the results of a situation by its rule."""
    now = NOW + timedelta(days=found.days)
    return gate.evaluate(results, policy(found.rule, **found.policy), now=now)


@cache
def drawn(seed: int, many: int = EACH) -> list[tuple[Situation, Results, Verdict]]:
    """Return the situations of one seed, with their results and verdicts."""
    draw = random.Random(seed)
    situations = [situation(draw) for _ in range(many)]
    audits = [results_of(found) for found in situations]
    return [(found, audit, judged(found, audit)) for found, audit in zip(situations, audits, strict=True)]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_gate_says_what_a_careful_person_says(seed: int) -> None:
    """No false PASS, no false FAIL, and neither where it can be decided."""
    wrong = []
    for number, (found, _, said) in enumerate(drawn(seed)):
        thought = opinion(found)
        problems = {
            f"error: {said.problems}": said.verdict is Status.ERROR,
            "a false PASS": said.verdict is Status.PASS and not thought.passes,
            "a false FAIL": said.verdict is Status.FAIL and not thought.fails,
            "no FAIL": said.verdict is not Status.FAIL and thought.fails and found.rule.get("statistic") != "mean",
            "no PASS": said.verdict is not Status.PASS and thought.passes and found.rule.get("statistic") != "mean",
            "no reason": said.verdict is Status.INCONCLUSIVE and not any(r in said.sentence for r in thought.reasons),
        }
        wrong += [(number, problem, said.sentence) for problem, yes in problems.items() if yes]
    assert wrong == []


@pytest.mark.parametrize("seed", [0, 1])
def test_every_output_counts_the_steps_that_the_rule_counts(seed: int) -> None:
    """Headline, matrix, comparison of defences and terminal print one k of n."""
    for found, results, verdict in drawn(seed):
        if not verdict.rules or verdict.rules[0].k is None or not verdict.rules[0].n:
            continue
        [rule] = verdict.rules
        k, n, column = rule.k or 0, rule.n, found.column
        one = f"{k} of {n} " if k else f"none of {n} "
        assert n == 1 or one in verdict.sentence
        printed = StringIO()
        print_audit(redact(results, [], verdict), Console(file=printed, width=200))
        assert f"{k} of {counted(n, 'step')}" in printed.getvalue()
        again = outcomes(
            results, column, rule.subject, rule.scope, frozenset(rule.trusted), max_unjudged=rule.max_unjudged
        )
        assert (again.leaked, len(again.by_step), again.unjudged) == (k, n, rule.unjudged)
        assert (again.lower, again.upper) == (rule.lower, rule.upper)
        mine = [a for a in results.attempts if a.defense == column and a.attack in (rule.scope or found.attacks)]
        lines = cell_of(results, mine, column, whole=True).lines
        noun = EVENTS[rule.subject].noun
        counts = [part for line in lines for part in line.removeprefix("leaked: ").split(", ")]
        assert not k or rule.subject == "in_reach" or f"{noun} in {k} of {n}" in counts


def test_the_situations_are_of_every_kind() -> None:
    """If all of them were undecided, the comparison would show nothing."""
    said = [verdict.verdict for seed in SEEDS for _, _, verdict in drawn(seed)]
    assert min(said.count(status) for status in (Status.PASS, Status.FAIL, Status.INCONCLUSIVE)) > 10
