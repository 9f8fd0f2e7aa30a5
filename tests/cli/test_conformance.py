"""`leakaudit conformance`, and what gate, report and card say of it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from leakaudit.cli import main
from leakaudit.files.private_files import write_atomic
from leakaudit.gate.claims import ClaimedEpsilon, judge_claim
from leakaudit.gate.evaluate import evaluate
from leakaudit.gate.policy import Rule, default_policy
from leakaudit.gate.pooling import pool
from leakaudit.gate.verdict import RuleVerdict, Status
from leakaudit.reports.next_actions import next_actions
from leakaudit.results.conformance import Conformance, ConformanceCheck, in_words
from leakaudit.results.files import load_results, with_digest
from leakaudit.results.privacy import shipped_in_words
from leakaudit.results.schema import Privacy, Results
from tests.support.factories import audit

WRONG = ConformanceCheck(
    about="noise", outcome="contradicted", sentence="No noise is on encoder.weight.", parameters=("encoder.weight",)
)
RIGHT = ConformanceCheck(
    about="noise", outcome="not contradicted", sentence="The noise is 1.0003 times as large as declared."
)
OPEN = ConformanceCheck(about="noise", outcome="not tested", sentence="The level of the noise is not tested.")


def results_with(*checks: ConformanceCheck) -> Results:
    """Return the results of a run with an epsilon of 3, and these checks."""
    found = (
        Conformance(mechanism="dp-sgd(noise_multiplier=1)", steps=("st-000001",), level=0.01, checks=checks)
        if checks
        else None
    )
    told = Privacy(epsilon=3.0, delta=1e-6, accountant="opacus rdp", steps=10, origin="accountant", sampling="poisson")
    return with_digest(audit(0, 60).model_copy(update={"privacy": (told,), "conformance": found}))


def save(folder: Path, *checks: ConformanceCheck) -> None:
    """Write such results."""
    write_atomic(folder / "results.json", results_with(*checks).model_dump_json(by_alias=True))


def called(folder: Path, *words: str) -> Result:
    """Run the command on a folder."""
    return CliRunner().invoke(main, ["conformance", str(folder), *words])


@pytest.mark.parametrize(
    ("checks", "code", "words"),
    [
        ((WRONG, RIGHT), 3, "CONTRADICTED"),
        ((RIGHT,), 0, "not contradicted"),
        ((OPEN,), 4, "Nothing was tested"),
        ((), 4, "no noise is declared"),
    ],
)
def test_the_exit_code_says_what_was_found(
    checks: tuple[ConformanceCheck, ...], code: int, words: str, tmp_path: Path
) -> None:
    """Wrong: 0 where nothing was tested."""
    save(tmp_path, *checks)
    done = called(tmp_path)
    assert done.exit_code == code, done.output
    assert words in done.stdout


def test_the_sentence_names_the_claim_and_the_layer() -> None:
    """Wrong: `epsilon is false`, or a finding without the number that it is about."""
    said = shipped_in_words(results_with(WRONG))
    assert said.startswith("The accountant (opacus rdp) says epsilon = 3")
    assert "This run does not implement what its accountant assumes: No noise is on encoder.weight." in said


def judged(*checks: ConformanceCheck) -> RuleVerdict:
    """Judge a rule that allows an epsilon of 8."""
    rule = Rule.model_validate({"id": "dp", "claimed_epsilon": {"max": 8.0}, "severity": "high"})
    assert isinstance(rule.claimed_epsilon, ClaimedEpsilon)
    return judge_claim(results_with(*checks), rule, rule.claimed_epsilon, "none", "none", ())


def test_the_gate_fails_a_claim_that_the_updates_contradict() -> None:
    """Wrong: PASS for epsilon 3 of 8 while a layer carries no noise."""
    assert judged(RIGHT).status is Status.PASS and judged().status is Status.PASS
    found = judged(WRONG, WRONG)
    assert found.status is Status.FAIL
    assert "No noise is on encoder.weight. 1 more contradiction in `leakaudit conformance`." in found.sentence


def test_a_run_that_is_contradicted_stays_so_among_others() -> None:
    """Wrong: the first run's table for all."""
    right, wrong = results_with(RIGHT), results_with(WRONG)
    wrong = wrong.model_copy(update={"run": wrong.run.model_copy(update={"id": "other"})})
    for runs in ((right, wrong), (wrong, right), (results_with(), wrong)):
        found = pool(runs).results.conformance
        assert found is not None and [one.sentence for one in found.contradicted] == [WRONG.sentence]


def test_words_never_confirm() -> None:
    """Wrong: `confirmed`, `proved` or `correct` of an epsilon."""
    found = results_with(RIGHT).conformance
    assert found is not None
    said = in_words(found)
    assert "does not confirm an epsilon" in said and "proved" not in said


def test_the_first_screen_says_what_to_do_about_a_contradiction() -> None:
    """Wrong: a finding in a closed section only."""
    results = results_with(WRONG)
    verdict = evaluate(results, default_policy(), now=datetime(2026, 11, 2, 12, tzinfo=UTC))
    first = next_actions(results, verdict)[0]
    assert (
        first.head == "Mend the privacy mechanism, then train again" and "No noise is on encoder.weight." in first.text
    )
    assert next_actions(results_with(RIGHT), verdict)[0].head != first.head


@pytest.mark.filterwarnings("ignore")
def test_an_audit_of_opacus_ends_with_its_conformance(tmp_path: Path) -> None:
    """Wrong: nothing in the results of a real training, or an open log."""
    pytest.importorskip("opacus")
    from leakaudit.audit.conformance.log import LOG_FILE
    from tests.support import private_training

    private_training.watched(tmp_path, private_training.no_noise_on("word_embeddings.weight"), steps=2, poisson=True)
    spool = tmp_path / "audit" / "spool"
    done = CliRunner().invoke(main, ["worker", str(spool)])
    assert done.exit_code == 0, done.output
    found = load_results(tmp_path / "audit").conformance
    assert found is not None and [one.about for one in found.contradicted] == ["noise"]
    assert found.contradicted[0].parameters == ("bert.embeddings.word_embeddings.weight",)
    log = tmp_path / "audit" / LOG_FILE
    assert log.stat().st_mode & 0o077 == 0
    assert called(tmp_path / "audit").exit_code == 3
    page = (tmp_path / "audit" / "report.html").read_text(encoding="utf-8")
    assert "Does the run do what its epsilon assumes?" in page and "No noise is on" in page


def test_a_mechanism_needs_snapshots(tmp_path: Path) -> None:
    """Wrong: a mechanism that is ignored."""
    save(tmp_path, RIGHT)
    assert called(tmp_path, "--mechanism", "dp-sgd").exit_code == 2
    done = called(tmp_path, "--again")
    assert done.exit_code == 2 and "keep_snapshots: true" in done.output
