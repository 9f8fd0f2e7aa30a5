"""`leakaudit gate` with a baseline: where it is, what it holds, how it is shown."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from leakaudit.audit.publish import publish
from leakaudit.cli import main
from leakaudit.config.audit import AuditConfig
from leakaudit.gate import evaluate as gate
from leakaudit.results.schema import Results
from tests.gate.test_regression import marked
from tests.support.factories import NOW, audit, changed
from tests.support.nights_folder import write_audit

POLICY = """schema: leakaudit.policy/1
name: release
evidence: {min_steps: 20}
rules:
  - id: no-worse
    event: exact_sentence
    versus_baseline: {margin: 0.1}
  - id: rate
    event: exact_sentence
    max_rate: 0.9
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start beside a folder with the policy, two hours after the audits."""
    monkeypatch.chdir(tmp_path)
    judged = gate.evaluate
    monkeypatch.setattr(gate, "evaluate", lambda found, rules, **given: judged(found, rules, **given | {"now": NOW}))
    Path("rules").mkdir()
    Path("rules/policy.yaml").write_text(POLICY)
    write_audit(Path("old"), marked(audit(3, 57), "run-1"))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)


def set_baseline(name: str = "old", *options: object) -> Result:
    return run("baseline", "set", name, "--policy", "rules/policy.yaml", *options)


def judge(found: Results | None = None, *options: object) -> tuple[Result, dict[str, Any]]:
    """Judge an audit; return what the command did and its verdict."""
    folder = write_audit(Path("new"), found or marked(audit(3, 57), "run-2"))
    done = run("gate", folder, "--policy", "rules/policy.yaml", *options)
    return done, json.loads(Path("new/verdict.json").read_text())


def test_the_first_release_sets_the_baseline_and_the_next_one_is_compared() -> None:
    """The rule that needs a baseline does not keep the first one from being set."""
    done, _ = judge()
    assert done.exit_code == 4
    assert "leakaudit baseline set RUN" in done.stdout
    assert set_baseline().exit_code == 0, "nothing is there to compare with yet"
    done, verdict = judge()
    assert done.exit_code == 0, done.output
    assert verdict["baseline"]["run"] == "run-1"
    assert verdict["baseline"]["digest"] == json.loads(Path("rules/leakaudit.baseline.json").read_text())["digest"]
    worse, _ = judge(marked(audit(40, 20), "run-2"))
    assert worse.exit_code == 3
    write_audit(Path("worse"), marked(audit(40, 20), "run-3"))
    refused = set_baseline("worse")
    assert refused.exit_code == 3, "a worse run replaces the baseline only by --anyway"
    assert set_baseline("worse", "--anyway").exit_code == 0


def test_file_and_audit_give_the_same_comparison() -> None:
    """The file holds what the pairs need, with unjudged steps and without texts."""
    set_baseline()
    (by_file, first), (by_run, second) = judge(), judge(None, "--baseline", "old")
    assert by_file.exit_code == by_run.exit_code == 0
    for key in ("lower", "upper", "observed", "versus", "method", "sentence"):
        assert first["rules"][0][key] == second["rules"][0][key]
    assert first["rules"][0]["versus"]["paired"]
    assert (second["baseline"]["digest"], second["baseline"]["results_digest"]) == (
        "",
        first["baseline"]["results_digest"],
    )
    same, _ = judge(None, "--baseline", "old/results.json")
    assert same.exit_code == 0


def test_a_baseline_that_was_edited_is_an_error() -> None:
    """With more leaks in it a worse release would pass."""
    set_baseline()
    file = Path("rules/leakaudit.baseline.json")
    data = json.loads(file.read_text())
    data["outcomes"][0]["steps"] = "1" * 60
    file.write_text(json.dumps(data))
    done, verdict = judge()
    assert (done.exit_code, verdict["verdict"]) == (5, "ERROR")
    assert "was changed after it was written" in verdict["sentence"]
    assert set_baseline().exit_code == 0, "it can be set anew"


def test_a_baseline_without_digest_does_not_count() -> None:
    """Removing the digest is no way around it, and older files can be set anew."""
    set_baseline()
    file = Path("rules/leakaudit.baseline.json")
    data = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in data.items() if key != "digest"}))
    done, verdict = judge()
    assert done.exit_code == 4
    assert "has no digest" in verdict["sentence"]
    assert set_baseline().exit_code == 0


def test_the_file_holds_no_more_than_counts_keys_and_marks() -> None:
    """It is meant to be committed: no id of a step, no text, no score, no path."""
    set_baseline()
    data = json.loads(Path("rules/leakaudit.baseline.json").read_text())
    assert set(data) == {
        "schema", "run", "results_digest", "set_at", "verdict", "keys", "rates", "pairing", "batches", "outcomes", "digest",
    }  # fmt: skip
    assert set(data["outcomes"][0]) == {"event", "min_tokens", "defense", "attack", "steps"}
    assert all(set(mark) <= set("0123456789abcdef") for mark in data["batches"])


@pytest.mark.parametrize("name", ["none.json", "rules/none"])
def test_a_named_baseline_that_does_not_exist_is_an_error(name: str) -> None:
    """A slip in the name does not become "no baseline"."""
    done, verdict = judge(None, "--baseline", name)
    assert (done.exit_code, verdict["verdict"]) == (5, "ERROR")
    assert "no such file or folder" in verdict["sentence"]


def test_a_baseline_that_no_rule_asks_for_is_refused() -> None:
    """Whoever names one expects a comparison."""
    folder = write_audit(Path("new"), audit(0, 60))
    assert run("gate", folder, "--baseline", "old").exit_code == 2


def test_every_output_shows_both_rates_and_the_margin() -> None:
    """And none calls a difference a rate."""
    set_baseline()
    done, verdict = judge(
        marked(audit(30, 30), "run-2"), "--junit", "j.xml", "--summary", "s.md", "--sarif", "s.json", "--github"
    )
    assert done.exit_code == 3
    said = "30 of 60 judged client steps leaked a sentence"
    for text in (done.stdout, Path("j.xml").read_text(), Path("s.json").read_text(), Path("s.md").read_text()):
        assert said in text
        assert "3 of 60 in the baseline run-1" in text
    row = next(line for line in Path("s.md").read_text().splitlines() if line.startswith("| no-worse"))
    assert "30 of 60 steps, baseline 3 of 60" in row
    assert row.endswith(" points | \\+10 points |"), "Markdown shows the escaped sign"
    assert "baseline `" in Path("s.md").read_text()
    failure = ElementTree.parse("j.xml").getroot().find(".//testcase[@name='no-worse']/failure")
    assert failure is not None
    sarif = json.loads(Path("s.json").read_text())["runs"][0]
    described = {rule["id"]: rule["shortDescription"]["text"] for rule in sarif["tool"]["driver"]["rules"]}
    assert "allowed: +10 points" in described["no-worse"]
    made = run("report", "new", "--policy", "rules/policy.yaml")
    page = Path(made.stdout.strip()).read_text()
    for text in ("30 of 60, baseline 3 of 60", "+10 points", "run run-1, sha256:", "this audit"):
        assert text in page
    assert verdict["rules"][0]["kind"] == "versus_baseline"
    assert "30 of 60 steps, baseline 3 of 60" in done.stdout


def test_a_model_card_and_a_bill_take_a_difference_for_no_rate(tmp_path: Path) -> None:
    """The worst bound of a card is one on a rate."""
    set_baseline()
    write_audit(Path("new"), marked(audit(3, 57), "run-2"))
    card = run("export", "model-card", "new", "--policy", "rules/policy.yaml")
    assert "by rule rate" in card.stdout
    (tmp_path / "model.bin").write_bytes(b"weights")
    judge(None, "--artifact", "model.bin", "--cyclonedx", "bill.json")
    (metric, _) = json.loads(Path("bill.json").read_text())["components"][0]["modelCard"]["quantitativeAnalysis"][
        "performanceMetrics"
    ]
    assert (metric["type"], float(metric["value"])) == ("privacy leak, exact_sentence, change since the baseline", 0.0)


def test_an_audit_made_in_another_way_is_named_with_the_keys() -> None:
    """The file keeps the keys of its run."""
    set_baseline()
    other = marked(audit(3, 57), "run-2")
    done, verdict = judge(changed(other, regime=other.regime.model_copy(update={"batch_size": 8})))
    assert done.exit_code == 4
    assert "the shape of a batch (batch: 1 texts" in verdict["sentence"]


def test_the_end_of_an_audit_reads_the_same_baseline_and_survives_a_broken_one() -> None:
    """The other rules are judged, whatever became of the file."""
    set_baseline()
    config, file = AuditConfig(policy=Path("rules/policy.yaml")), Path("rules/leakaudit.baseline.json")
    for content, status in ((file.read_text(), "PASS"), ("{", "INCONCLUSIVE")):
        file.write_text(content)
        Path(status).mkdir()
        publish(Path(status), marked(audit(3, 57), "run-2"), config)
        rules = {rule["id"]: rule["status"] for rule in json.loads(Path(status, "verdict.json").read_text())["rules"]}
        assert rules == {"no-worse": status, "rate": "PASS"}


def committed() -> None:
    """Commit the files of the working folder."""
    for words in ("init -q", "add rules", "-c user.email=a@b.c -c user.name=a commit -q --allow-empty -m files"):
        subprocess.run(["git", *words.split()], check=True)


def from_commit(*runs: str) -> dict[str, Any]:
    """Judge by the policy and the baseline of the last commit."""
    done = run("gate", *runs, "--policy-ref", "HEAD", "--policy", "rules/policy.yaml", "--json")
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.exit_code == found["exit_code"]
    return found


def test_a_commit_and_a_folder_say_the_same_of_a_baseline() -> None:
    """Wrong: a traceback, or exit code 2 before the first baseline is set."""
    write_audit(Path("new"), marked(audit(3, 57), "run-2"))
    file = Path("rules/leakaudit.baseline.json")
    committed()
    assert "no baseline is set" in from_commit("new")["sentence"]
    assert set_baseline().exit_code == 0
    good = json.loads(file.read_text())
    for text, verdict, said in (
        (json.dumps(good), "PASS", "baseline run-1"),
        ("{", "ERROR", "cannot be read"),
        (json.dumps(good | {"rates": []}), "ERROR", "was changed after it was written"),
        (json.dumps(good | {"digest": ""}), "INCONCLUSIVE", "has no digest"),
    ):
        file.write_text(text)
        committed()
        here = json.loads(run("gate", "new", "--policy", "rules/policy.yaml", "--json").stdout)
        for found in (from_commit("new"), here):
            assert found["verdict"] == verdict and said in found["sentence"], (text[:40], found["sentence"])
        assert from_commit("new")["policy_commit"]


def test_an_unreadable_baseline_is_an_error_of_several_runs_too() -> None:
    """Wrong: exit code 5 without a document."""
    write_audit(Path("new"), marked(audit(3, 57), "run-2"))
    Path("rules/leakaudit.baseline.json").write_text("{")
    assert run("gate", "old", "new", "--policy", "rules/policy.yaml").exit_code == 5
    assert json.loads(Path("pooled_verdict.json").read_text())["verdict"] == "ERROR"


def test_no_run_of_several_is_compared_with_itself() -> None:
    """Wrong: PASS of leaking runs, because one of them was set as the baseline."""
    for name, first in (("old", 0), ("new", 100)):
        write_audit(Path(name), marked(audit(30, 30), name, first))
    assert set_baseline("old", "--anyway").exit_code == 0
    assert run("gate", "old", "new", "--policy", "rules/policy.yaml").exit_code == 4
    assert "is one of these runs" in json.loads(Path("pooled_verdict.json").read_text())["sentence"]


def test_a_bundle_does_not_compare_an_audit_with_itself() -> None:
    """Wrong: PASS in the bundle, whose results have another digest."""
    one = marked(audit(30, 30), "run-2")
    write_audit(Path("new"), changed(one, run=one.run.model_copy(update={"command": "leakaudit run /home/ann/x"})))
    assert set_baseline("new", "--anyway").exit_code == 0
    assert run("gate", "new", "--policy", "rules/policy.yaml").exit_code == 4
    assert run("bundle", "new", "--policy", "rules/policy.yaml", "-o", "b.zip").exit_code == 0
    checked = run("bundle", "verify", "b.zip")
    assert checked.exit_code == 0 and "ok: INCONCLUSIVE" in checked.stdout, checked.output


def test_a_bundle_with_a_baseline_without_digest_is_consistent() -> None:
    """Wrong: what `bundle` just wrote does not pass `bundle verify`."""
    assert set_baseline().exit_code == 0
    file = Path("rules/leakaudit.baseline.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"digest": ""}))
    judge()
    assert run("bundle", "new", "--policy", "rules/policy.yaml", "-o", "b.zip").exit_code == 0
    checked = run("bundle", "verify", "b.zip")
    assert checked.exit_code == 0, checked.output


def test_a_bundle_is_not_dated_by_a_verdict_with_another_baseline() -> None:
    """Wrong: the time of one verdict in a bundle with another one."""
    assert set_baseline().exit_code == 0
    judge()
    write_audit(Path("older"), marked(audit(0, 60), "run-0"))
    assert set_baseline("older", "--anyway").exit_code == 0
    done = run("bundle", "new", "--policy", "rules/policy.yaml")
    assert done.exit_code == 5 and "or baseline" in done.output


def of_data(name: str, run_id: str) -> Results:
    """Return an audit that names its data set."""
    found = marked(audit(3, 57), run_id)
    return changed(found, subject=found.subject.model_copy(update={"data": name}))


def test_an_audit_of_another_data_set_is_not_compared() -> None:
    """Wrong: no worse than a baseline on other data."""
    write_audit(Path("old"), of_data("notes", "run-1"))
    assert "has no name here" not in set_baseline().output, "the results name it"
    done, _ = judge(of_data("letters", "run-2"))
    assert done.exit_code == 4 and "they differ in the data set" in " ".join(done.stdout.split())
    assert judge(of_data("letters", "run-2"), "--baseline", "old")[0].exit_code == 4
    assert judge(of_data("notes", "run-2"))[0].exit_code == 0
    assert judge(marked(audit(3, 57), "run-2"))[0].exit_code == 0, "it may be the same"
