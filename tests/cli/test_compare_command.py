"""`leakaudit compare` and `baseline`: the answer, its reason and its exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from leakaudit.cli import main
from leakaudit.gate import evaluate as gate
from leakaudit.history.baseline import load
from leakaudit.results.schema import Results
from tests.support.factories import NOW, audit, changed
from tests.support.nights import night_id
from tests.support.nights_folder import SENTENCES, nights_folder, write_audit


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start in an empty folder, two hours after the audits of the factories."""
    monkeypatch.chdir(tmp_path)
    judged = gate.evaluate
    monkeypatch.setattr(gate, "evaluate", lambda found, rules, **given: judged(found, rules, **given | {"now": NOW}))
    Path("rules.yaml").write_text(SENTENCES)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)


def compare(base: Results, new: Results, *options: object) -> Result:
    """Compare two audits that lie in folders of their own."""
    folders = write_audit(Path("base"), base), write_audit(Path("new"), new)
    return run("compare", *folders, "--policy", "rules.yaml", *options)


def other(found: Results, **fields: Any) -> Results:
    return changed(found, run=found.run.model_copy(update=fields))


@pytest.mark.parametrize(
    ("base", "new", "code", "answer"),
    [
        ((0, 20), (0, 20), 0, "no worse"),
        ((20, 0), (0, 20), 0, "no worse"),
        ((0, 20), (20, 0), 3, "worse"),
        ((0, 20), (1, 19), 0, "no worse"),
    ],
)
def test_the_exit_code_is_the_answer(base: tuple[int, int], new: tuple[int, int], code: int, answer: str) -> None:
    """For people and for machines."""
    done = compare(audit(*base), audit(*new))
    assert (done.exit_code, answer in done.stdout.splitlines()[0]) == (code, True), done.output
    found = json.loads(compare(audit(*base), audit(*new), "--json").stdout)
    assert (found["answer"], found["exit"], found["refused"]) == (answer, code, "")
    assert found["differences"][0]["base"] == [base[0], sum(base)]


def test_what_differs_is_refused_with_its_key() -> None:
    """`--despite` compares, and says it."""
    new = other(audit(0, 20), environment={"device": "cuda (H100)"})
    refused = compare(audit(0, 20), new)
    assert refused.exit_code == 4
    assert "they differ in the device (hardware: cpu and cuda (H100))" in refused.stdout
    assert "--despite hardware" in refused.stdout
    asked = compare(audit(0, 20), new, "--despite", "hardware")
    assert asked.exit_code == 0 and "Compared although they differ in the device." in asked.stdout
    wrong = compare(audit(0, 20), new, "--despite", "hardwear")
    assert wrong.exit_code == 2 and "did you mean 'hardware'?" in wrong.stderr


def test_an_event_that_only_one_audit_judged_is_no_pass() -> None:
    """Missing is not zero; a report of the event names which audit lacks it."""
    despite = [word for key in ("attacks", "defenses", "shipped") for word in ("--despite", key)]
    done = compare(audit(0, 20), audit(0, 0), *despite)
    assert done.exit_code == 4 and "No step could be judged in the second audit." in done.stdout
    assert "cannot be compared:" in done.stdout


def test_a_policy_without_an_event_compares_nothing() -> None:
    """That is no answer."""
    Path("rules.yaml").write_text(
        "schema: leakaudit.policy/1\nname: metrics\nrules:\n  - id: overlap\n    metric: rougeL\n    statistic: p95\n    max_value: 0.5\n"
    )
    done = compare(audit(0, 20), audit(0, 20))
    assert done.exit_code == 4 and "nothing to compare" in done.stdout


def test_audits_that_cannot_be_found_or_read_are_errors() -> None:
    """With what to name instead."""
    write_audit(Path("a"), audit(0, 20))
    Path("broken").mkdir()
    (Path("broken") / "results.json").write_text("{")
    for base, code, said in (
        ("none", 5, "name an audit's folder"),
        ("broken", 5, "results.json"),
        ("last", 2, "--config"),
        (night_id(0), 2, "--folder"),
    ):
        done = run("compare", base, "a")
        assert (done.exit_code, said in done.stderr) == (code, True), done.stderr
    assert json.loads(run("compare", "none", "a", "--json").stdout)["exit"] == 5


def test_nights_are_named_by_id_and_last() -> None:
    """The keys are those that the nights recorded."""
    nights_folder(Path(), {0: audit(0, 20), 1: audit(20, 0)})
    done = run("compare", night_id(0), "last")
    assert done.exit_code == 3 and "20 of 20 steps now, 0 of 20 before" in done.stdout
    assert done.stdout.startswith(f"{night_id(0)} -> {night_id(1)}: worse"), "the names that the user knows"
    assert run("compare", "last", night_id(0), "--folder", "all-nights", "--policy", "rules.yaml").exit_code == 0
    by_path = run("compare", f"all-nights/nights/{night_id(0)}", f"all-nights/nights/{night_id(1)}/results.json")
    assert by_path.stdout == done.stdout, "an audit of a night is known by its digest"
    missing = run("compare", night_id(7), "last")
    assert missing.exit_code == 5 and f"from {night_id(0)} to {night_id(1)}" in missing.stderr


def test_a_night_is_not_compared_with_an_audit_of_unknown_data() -> None:
    """Unknown is not the same."""
    nights_folder(Path(), {0: audit(0, 20)})
    write_audit(Path("loose"), other(audit(0, 20), id="run-loose"))
    done = run("compare", "last", "loose")
    assert done.exit_code == 4 and "data: notes and unknown" in done.stdout
    assert run("compare", "last", "loose", "--despite", "data").exit_code == 0


def test_a_night_whose_results_were_removed_is_compared_by_its_record() -> None:
    """The record stays when retention removes the results."""
    nights_folder(Path(), {0: audit(0, 20), 1: audit(20, 0)})
    (Path("all-nights/nights") / night_id(0) / "results.json").unlink()
    done = run("compare", night_id(0), "last")
    assert done.exit_code == 3 and "20 of 20 steps now, 0 of 20 before" in done.stdout
    refused = run("baseline", "set", night_id(0))
    assert refused.exit_code == 5 and "were removed" in refused.stderr


def test_results_that_were_changed_after_the_night_are_refused() -> None:
    """Else a night could say tomorrow what it did not say today."""
    nights_folder(Path(), {0: audit(20, 0), 1: audit(0, 20)})
    write_audit(Path("all-nights/nights") / night_id(0), audit(0, 20))
    done = run("compare", night_id(0), "last")
    assert done.exit_code == 5 and "changed after the night" in done.stderr


def test_a_baseline_is_set_shown_and_compared_with() -> None:
    """By the nights' own policy, into their own file."""
    nights_folder(Path(), {0: audit(0, 60), 1: audit(0, 60), 2: audit(40, 20)})
    assert run("baseline", "show").exit_code == 5
    assert "no baseline is set" in run("baseline", "diff").stderr
    done = run("baseline", "set", night_id(0))
    assert done.exit_code == 0 and "verdict PASS" in done.stdout, done.output
    saved = load(Path("base.json"))
    assert saved is not None and saved.keys["data"] == "notes" and saved.rates[0].n == 60
    shown = run("baseline", "show")
    assert "data: notes" in shown.stdout and "exact_sentence (shipped, any attack): 0 of 60 steps" in shown.stdout
    assert json.loads(run("baseline", "show", "--json").stdout)["schema"] == "leakaudit.baseline/1"
    assert run("baseline", "diff", night_id(1)).exit_code == 0
    worse = run("baseline", "diff")
    assert worse.exit_code == 3 and "40 of 60 steps now, 0 of 60 before" in worse.stdout
    assert json.loads(run("baseline", "diff", "--json").stdout)["answer"] == "worse"


@pytest.mark.parametrize(("found", "code"), [(audit(30, 30), 3), (audit(0, 10), 4)])
def test_a_run_that_did_not_pass_is_refused_as_a_baseline(found: Results, code: int) -> None:
    """Unless the user says so; the reason is the verdict's."""
    write_audit(Path("a"), found)
    refused = run("baseline", "set", "a", "--policy", "rules.yaml")
    assert refused.exit_code == code and "add --anyway" in refused.stderr and "not PASS:" in refused.stderr
    assert not Path("leakaudit.baseline.json").exists()
    machine = json.loads(run("baseline", "set", "a", "--policy", "rules.yaml", "--json").stdout)
    assert machine["exit"] == code
    taken = run("baseline", "set", "a", "--policy", "rules.yaml", "--anyway", "--data-name", "notes")
    assert taken.exit_code == 0 and Path("leakaudit.baseline.json").exists()
    saved = load(Path("leakaudit.baseline.json"))
    assert saved is not None and saved.verdict != "PASS" and saved.keys["data"] == "notes"


def test_a_run_of_other_data_is_not_compared_with_the_baseline() -> None:
    """Unknown data are other data."""
    write_audit(Path("a"), audit(0, 60))
    noted = run("baseline", "set", "a", "--policy", "rules.yaml", "--file", "b.json")
    assert noted.exit_code == 0 and "--data-name" in noted.stderr
    assert run("baseline", "diff", "a", "--policy", "rules.yaml", "--file", "b.json").exit_code == 0
    run("baseline", "set", "a", "--policy", "rules.yaml", "--file", "b.json", "--data-name", "notes")
    done = run("baseline", "diff", "a", "--policy", "rules.yaml", "--file", "b.json")
    assert done.exit_code == 4 and "data: notes and unknown" in done.stdout


def test_a_broken_baseline_says_how_to_set_it_again() -> None:
    """Nothing is compared with half a file."""
    Path("leakaudit.baseline.json").write_text("{")
    for arguments in (["show"], ["diff", "a"]):
        done = run("baseline", *arguments)
        assert done.exit_code == 5 and "set it again" in done.stderr
