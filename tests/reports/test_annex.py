"""The annex and the tags: evidence for clauses, and no claim about them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from leakaudit.cli import main
from leakaudit.errors import ResultsError
from leakaudit.gate.evaluate import evaluate, unreadable
from leakaudit.gate.imported import Imported
from leakaudit.gate.verdict import Status, Verdict
from leakaudit.history.reference import reference_of
from leakaudit.reports import outputs
from leakaudit.results.files import to_json
from leakaudit.results.schema import Coverage, NotTested, Privacy, Results
from tests.gate.test_imported import found as imported_of
from tests.gate.test_imported import with_rule
from tests.gate.test_regression import marked
from tests.reports.test_outputs import HOSTILE, SITUATIONS, hostile, verdict_of
from tests.reports.test_redaction import CANARIES, NAMES, audited
from tests.support.factories import NOW, audit, changed, policy
from tests.support.spellings import spellings

CLAUSES = ("55 (i) ", "55 (ii) ", "55 (iii) ", "55 (iv) ", "55 (v) ", "15(5)", "800-226", "100-2", "C11")


def rows(results: Results, verdict: Verdict) -> dict[str, list[str]]:
    """Return the table: part of a clause -> tested, result, not tested."""
    lines = [line for line in outputs.annex(results, verdict).splitlines() if line.startswith("| ")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {clause: next(row[1:] for row in cells if clause in row[0]) for clause in CLAUSES}


def with_memaudit(k: int, n: int, measure: str, results: Imported | None = None) -> Verdict:
    """Return a verdict with a rule on results of memaudit."""
    rules = with_rule(measure)
    return evaluate(SITUATIONS["clean"], rules, now=NOW, imported=results or imported_of(k, n))


@pytest.mark.parametrize("name", SITUATIONS)
def test_every_clause_has_a_row_with_four_cells(name: str) -> None:
    """And no row says that a clause is fulfilled."""
    found = rows(SITUATIONS[name], verdict_of(SITUATIONS[name]))
    assert all(len(cells) == 3 and all(cells) for cells in found.values())
    text = outputs.annex(SITUATIONS[name], verdict_of(SITUATIONS[name]))
    assert not re.search(r"complian|complies|conform|satisf|is private|anonym|certif", text, re.IGNORECASE)
    assert (
        "The Opinion speaks of the trained model" in text
        and "GDPR Art. 32" in text
        and "evidence for its clause" in text
    )


def test_figures_are_those_of_the_verdict() -> None:
    """60 clean steps bound the rate by 4.87 %, and 60 leaks by 95.1 % from below."""
    for clause in ("55 (iv) ", "55 (v) ", "15(5)", "100-2", "C11"):
        tested, clean, _ = rows(SITUATIONS["clean"], verdict_of(SITUATIONS["clean"]))[clause]
        assert "span on 60 steps" in tested
        assert "PASS, 0 of 60 steps, at least 0% and at most 4.9% (95% bounds)" in clean
        assert (
            "FAIL, 60 of 60 steps, at least 95.1%"
            in rows(SITUATIONS["leaks"], verdict_of(SITUATIONS["leaks"]))[clause][1]
        )


def test_what_updates_cannot_show_was_not_tested() -> None:
    """Without results on the model, three of the five tests of the Opinion."""
    found = rows(SITUATIONS["clean"], verdict_of(SITUATIONS["clean"]))
    for clause in ("55 (i) ", "55 (ii) ", "55 (iii) "):
        assert found[clause][:2] == ["not tested by this audit"] * 2
    assert "membership inference" in found["100-2"][2]


def test_imported_results_fill_their_own_row_only() -> None:
    """A rule without the file leaves it as not tested."""
    found = rows(SITUATIONS["clean"], with_memaudit(0, 59, "membership_tpr"))
    assert "59 canaries" in found["55 (i) "][0] and "at most 5%" in found["55 (i) "][1]
    assert found["55 (iii) "][0] == "not tested by this audit" and "membership inference" not in found["100-2"][2]
    again = rows(SITUATIONS["clean"], with_memaudit(59, 59, "regurgitation_rate"))
    assert "FAIL" in again["55 (iii) "][1] and again["55 (i) "][0] == "not tested by this audit"
    absent = evaluate(SITUATIONS["clean"], with_rule("membership_tpr"), now=NOW)
    assert rows(SITUATIONS["clean"], absent)["55 (i) "][:2] == ["not tested by this audit"] * 2


def test_the_worst_rule_speaks_and_silent_ones_are_named() -> None:
    """A cell with one good figure of several would mislead."""
    rules = policy(
        {"id": "good", "event": "all_words", "max_rate": 0.99},
        {"id": "bad", "event": "exact_sentence", "max_rate": 0.05},
        {"id": "labels", "event": "label_counts", "max_rate": 0.05},
    )
    found = audit(60, 0)
    cells = rows(found, evaluate(found, rules, now=NOW))
    assert "is bad: FAIL" in cells["55 (v) "][1]
    assert "labels" not in cells["55 (v) "][1] and "no evidence for labels" in cells["55 (iv) "][1]


def test_a_failed_rule_is_worse_than_a_wide_bound() -> None:
    """A rule that passes with a bound of 60 % does not hide one that fails at 26 %."""
    verdict = verdict_of(SITUATIONS["leaks"])
    failed = verdict.rules[0].model_copy(update={"id": "failed", "upper": 0.26})
    wide = failed.model_copy(update={"id": "wide", "upper": 0.6, "status": Status.PASS})
    cells = rows(SITUATIONS["leaks"], verdict.model_copy(update={"rules": (wide, failed)}))
    assert "the worst of 2 rules is failed: FAIL" in cells["55 (v) "][1]


def test_a_claim_and_a_difference_are_what_they_are() -> None:
    """Wrong: an epsilon above its limit is no evidence, a difference a share."""
    told = Privacy(epsilon=3.1, delta=1e-5, accountant="opacus rdp", origin="accountant", steps=4)
    found, base = marked(audit(0, 60, privacy=(told,)), "new"), marked(audit(0, 60), "old")
    rules = policy(
        {"id": "epsilon", "claimed_epsilon": {"max": 1}},
        {"id": "worse", "event": "exact_sentence", "versus_baseline": {"margin": 0.1}},
    )
    cells = rows(found, evaluate(found, rules, now=NOW, reference=reference_of(base, found, rules)))
    said = "epsilon: FAIL, claimed epsilon 3.10, which no attack confirms"
    assert said in cells["800-226"][1] and "no evidence" not in cells["800-226"][1]
    assert "epsilon" not in cells["55 (v) "][1]
    assert cells["55 (v) "][1].startswith("worse: PASS, 0 of 60 steps, baseline 0 of 60, a change of ")


def test_evidence_that_cannot_be_judged_has_no_annex() -> None:
    """Its figures would mislead."""
    with pytest.raises(ResultsError, match="no annex: the evidence cannot be judged: odd"):
        outputs.annex(SITUATIONS["clean"], unreadable("odd", policy(), now=NOW))


def test_hostile_text_stays_text_and_private_text_stays_out() -> None:
    """No cell more, no markup, no canary."""
    odd = changed(
        SITUATIONS["leaks"], coverage=Coverage(not_tested=(NotTested(what=HOSTILE, why=""),), audited_steps=60)
    )
    text = outputs.annex(odd, hostile(verdict_of(odd)))
    assert not {"\x1b", "\u202e"} & set(text) and "<img" not in text.replace(r"\<img", "")
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {5}
    private, _ = audited()
    text = outputs.annex(private, verdict_of(private))
    assert not [one for canary in CANARIES + NAMES for one in spellings(canary) if one in text]


# ---------------------------------------------------------------------------------------------------------------- tags
def test_tags_say_the_verdict_its_digests_and_dates() -> None:
    """A value is one short line, and an empty one is left out."""
    verdict = verdict_of(SITUATIONS["leaks"])
    found = outputs.tags(verdict)
    assert found["leakaudit.verdict"] == "FAIL" and found["leakaudit.policy_digest"] == verdict.policy_digest
    assert found["leakaudit.results_digest"] == verdict.results_digest
    assert found["leakaudit.valid_until"] == "2026-11-09T10:00:00Z" and "leakaudit.waived_rules" not in found
    odd = outputs.tags(verdict.model_copy(update={"policy": HOSTILE * 100}))
    assert all(len(value) <= 500 and "\n" not in value for value in odd.values())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a folder with the results of a leaking run."""
    (tmp_path / "results.json").write_text(json.dumps(to_json(SITUATIONS["leaks"])))
    return tmp_path


def test_the_commands_print_what_the_functions_return(run: Path) -> None:
    """They end with 0: the gate's exit code is the gate's."""

    def called(*words: Any) -> Any:
        return CliRunner().invoke(main, ["export", *map(str, words)])

    assert called("annex", run).output.startswith("## Annex")
    found = json.loads(called("tags", run).output)
    lines = called("tags", run, "--format", "mlflow").output.splitlines()
    keys = ("leakaudit.verdict", "leakaudit.policy_digest", "leakaudit.results_digest")
    assert {f"{key}={found[key]}" for key in keys} <= {*lines}
    assert called("annex", run, "-o", run / "annex.md").exit_code == 0 and (run / "annex.md").exists()
    (run / "results.json").write_text("{")
    assert called("annex", run).exit_code == called("tags", run).exit_code == 5
