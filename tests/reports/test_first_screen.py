"""The first screen: tiles, and the box on what to do next."""

from __future__ import annotations

import pytest

from leakaudit.gate import evaluate as gate
from leakaudit.gate.policy import default_policy
from leakaudit.gate.verdict import Status
from leakaudit.gate.wording import at_least
from leakaudit.reports.next_actions import next_actions, second_run
from leakaudit.reports.tiles import tiles
from tests.support.factories import NOW, attempt, audit, changed, results, step
from tests.support.judging import RATE, RED_LINE, judge


def test_a_tile_counts_as_its_rule_and_rounds_as_the_sentence() -> None:
    """Count, limit and bound of the sentences are those of the rule on sentences."""
    found = audit(6, 0)
    verdict = judge(found, RATE)
    tile, rule = tiles(found, verdict)[0], verdict.rules[0]
    assert (tile.title, tile.count, tile.state, tile.word) == ("Sentences", "6 of 6", "leak", "FAIL")
    assert rule.id in tile.limit and rule.lower is not None
    assert tile.bound == f"true rate at least {at_least(rule.lower)} (95%)"
    assert f"lower bound {at_least(rule.lower)}" in rule.sentence


def test_a_tile_without_evidence_is_not_green() -> None:
    """What nothing could show has no count.

    It has no picture, and the state of an open question.
    """
    found = audit(0, 6)
    labels = tiles(found, judge(found, RED_LINE))[2]
    assert (labels.count, labels.state, labels.picture) == ("no evidence", "open", None)


@pytest.mark.parametrize(("command", "wanted"), [("leakaudit run <path> --once", ""), ("", "")])
def test_a_run_that_makes_no_steps_has_no_command_to_repeat(command: str, wanted: str) -> None:
    """Steps of a training come from the training, so nothing is invented."""
    assert second_run(command, 5, 0) == wanted


def test_the_command_for_more_steps_has_another_seed_and_can_be_copied() -> None:
    """Several seeds become one that none of them is.

    Brackets are quoted and no sign redirects a file.
    """
    said = second_run("leakaudit simulate --model <path> --steps 6 --seeds 1..10 --defenses clip(norm=1)", 53, 1)
    assert said == "leakaudit simulate --model PATH --defenses 'clip(norm=1)' --steps 53 --seed 11 --out RUN-2"


def test_an_undecided_audit_names_steps_command_and_judgement() -> None:
    """The box says how many steps decide, and the commands that audit and judge them."""
    found = audit(0, 6)
    found = changed(found, run=found.run.model_copy(update={"command": "leakaudit simulate --steps 6"}))
    verdict = judge(found, RATE)
    more = verdict.rules[0].more_clean_steps
    action = next(one for one in next_actions(found, verdict) if one.head.startswith("Audit "))
    assert action.head == f"Audit {more} more steps"
    assert action.command.splitlines() == [
        f"leakaudit simulate --steps {more} --seed {found.run.seed + 1} --out RUN-2",
        "leakaudit gate RUN-1 RUN-2",
    ]


def test_the_box_says_in_short_what_became_of_the_tested_defences() -> None:
    """Ten undecided defences are a number and two names, not ten clauses."""
    names = [f"d{i}" for i in range(10)]
    tried = [attempt(i, defense=name, leaks=name == "none") for i in range(6) for name in ("none", *names)]
    found = results([step(i) for i in range(6)], tried)
    first = next_actions(found, judge(found, RATE))[0]
    assert first.head == "Find a defence that passes"
    assert "10 are undecided for lack of evidence (d0, d1, 8 more)" in first.text
    assert len(first.text) < 160


def test_a_rule_without_evidence_is_the_first_thing_to_do() -> None:
    """No defence is asked for where nothing failed."""
    found = audit(0, 60)
    verdict = gate.evaluate(found, default_policy(), now=NOW)
    assert verdict.verdict is Status.INCONCLUSIVE
    (only,) = next_actions(found, verdict)
    assert only.head == "Give rule in-reach-rate evidence" and "Not tested is not a pass" in only.text
