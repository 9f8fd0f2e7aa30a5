"""Bounds by recovered secrets in report, terminal and a model's card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from leakaudit.audit.secret_bounds import CONDITIONS
from leakaudit.cli import main
from leakaudit.gate.verdict import RuleVerdict, Status
from leakaudit.reports import outputs
from leakaudit.results.canaries import canary_epsilon
from leakaudit.results.files import to_json, with_digest
from leakaudit.results.schema import Canary, Privacy, Results
from tests.reports.test_outputs import verdict_of
from tests.support.factories import audit
from tests.support.judging import RATE, judge

CLAIM = {"id": "epsilon", "claimed_epsilon": {"max": 8}}
TOLD = Privacy(epsilon=3.0, delta=1e-5, accountant="opacus rdp", origin="accountant", steps=9, sampling="poisson")


def found(k: int, claimed: float | None, defense: str = "none") -> Results:
    """Return an audit of twenty steps with secrets."""
    one = Canary(
        defense=defense,
        attack="span",
        k=k,
        n=20,
        values=10**6,
        guesses=1,
        delta=1e-5,
        confidence=0.95,
        epsilon_lower=0.0,
        claimed=claimed,
        claimed_by="one step with noise multiplier 8" if claimed else "",
        notes=CONDITIONS,
    )
    one = one.model_copy(update={"epsilon_lower": canary_epsilon(one)})
    return with_digest(audit(0, 20, privacy=(TOLD,), canaries=(one,)))


def judged(results: Results) -> RuleVerdict:
    """Return the verdict of the rule on a claimed epsilon."""
    return next(one for one in judge(results, RATE, CLAIM).rules if one.id == "epsilon")


def shown(results: Results, place: Path, *more: str) -> str:
    """Return what `leakaudit show` prints."""
    (place / "results.json").write_text(json.dumps(to_json(results)))
    done = CliRunner().invoke(main, ["show", str(place), *more], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return " ".join(done.stdout.split())


def test_the_gate_fails_a_contradicted_claim_and_says_by_what() -> None:
    """An epsilon within the limit does not help it."""
    rule = judged(found(20, 0.5))
    assert rule.status is Status.FAIL and rule.confidence == 0.95
    assert "span recovered the secret in 20 of 20 steps, of 1,000,000 values with 1 guess a step" in rule.sentence
    assert "contradicts the claim of epsilon = 0.5 for one step" in rule.sentence


@pytest.mark.parametrize(
    "results",
    [
        pytest.param(found(0, 0.5), id="nothing came back"),
        pytest.param(found(20, None), id="no claim of one step"),
        pytest.param(found(20, 100.0), id="a claim above the bound"),
        pytest.param(found(20, 0.5, "prune"), id="another defence"),
    ],
)
def test_a_bound_that_contradicts_nothing_changes_no_rule(results: Results) -> None:
    """It confirms nothing, either: the sentence is the accountant's."""
    plainly = judged(results.model_copy(update={"canaries": ()}))
    rule = judged(results)
    assert (rule.status, rule.sentence) == (plainly.status, plainly.sentence)


def test_the_terminal_shows_the_bound_with_its_conditions(tmp_path: Path) -> None:
    """And the JSON has its verdict."""
    text = shown(found(5, 0.5), tmp_path)
    assert "secrets under none: span recovered the secret in 5 of 20 steps" in text
    assert "epsilon of one step is at least 11.6" in text
    assert CONDITIONS[0] in text
    assert json.loads(shown(found(5, 0.5), tmp_path, "--json"))["canaries"][0]["verdict"] == "contradicted"


def test_the_card_shows_the_bound_with_its_conditions() -> None:
    """In the line on differential privacy, beside what the accountant says."""
    text = outputs.model_card(found(5, 100.0), verdict_of(found(5, 100.0)))
    line = next(line for line in text.splitlines() if "Differential privacy" in line)
    assert "says epsilon = 3" in line and "at least 11.6" in line and "does not confirm it" in line
    assert all(condition.split(",")[0] in line.replace("\\", "") for condition in CONDITIONS)
    assert "secret" not in outputs.model_card(audit(0, 20), verdict_of(audit(0, 20)))


def test_the_report_has_a_section_where_a_step_held_a_secret(tmp_path: Path) -> None:
    """And none otherwise."""
    (tmp_path / "results.json").write_text(json.dumps(to_json(found(5, 0.5))))
    CliRunner().invoke(main, ["report", str(tmp_path)], catch_exceptions=False)
    page = (tmp_path / "report.html").read_text()
    assert 'id="secrets"' in page and "contradicted" in page and CONDITIONS[1] in page
    (tmp_path / "results.json").write_text(json.dumps(to_json(with_digest(audit(0, 20)))))
    CliRunner().invoke(main, ["report", str(tmp_path)], catch_exceptions=False)
    assert 'id="secrets"' not in (tmp_path / "report.html").read_text()
