"""`leakaudit gate` on hostile files, edited files and wrong policies.

Each gives a sentence and an exit code, never a traceback.
"""

from __future__ import annotations

import io
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from leakaudit.cli import main
from leakaudit.gate import evaluate as gate
from leakaudit.reports import print_verdict
from leakaudit.results.files import digest_of, to_json
from leakaudit.results.schema import Results
from tests.support.factories import NOW, audit, policy


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge the results of the factories two hours after they were made."""
    judged = gate.evaluate
    monkeypatch.setattr(gate, "evaluate", lambda found, rules, **given: judged(found, rules, **given | {"now": NOW}))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["gate", *map(str, arguments)], catch_exceptions=False)


def write(folder: Path, found: Results) -> Path:
    path = folder / "results.json"
    path.write_text(json.dumps(to_json(found), indent=1), encoding="utf-8")
    return path


def rules_on_sentences(folder: Path) -> Path:
    """Write a policy that asks only for what the results of these tests can tell."""
    path = folder / "sentences.yaml"
    path.write_text(
        "schema: leakaudit.policy/1\nname: sentences\nrules:\n"
        "  - id: sentence-rate\n    event: exact_sentence\n    max_rate: 0.05\n"
    )
    return path


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"[" * 100_000 + b"]" * 100_000, "nested more than 30 levels deep"),
        (b'{"schema": "leakaudit.results/1.8", "min_tokens": ' + b"9" * 5_000 + b"}", "a whole number of 5000 digits"),
        (rb'{"schema": "leakaudit.results/1.8", "run": "\ud800"}', "half a surrogate pair"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"", "not readable as JSON"),
        (b'{"schema": "leakaudit.results/1.8", "min_tokens": NaN}', "NaN is not a finite number"),
        (b'{"schema": "leakaudit.results/1.' + b"9" * 5_000 + b'"}', "this version reads leakaudit.results/1.x"),
        (b'{"schema": "leakaudit.results/1.8"}', "does not fit leakaudit.results/1.8: run: Field required"),
    ],
)
def test_a_hostile_file_is_an_error_in_one_sentence(tmp_path: Path, raw: bytes, message: str) -> None:
    """Exit code 5, for people and for machines."""
    (tmp_path / "results.json").write_bytes(raw)
    done = run(tmp_path, "-q")
    assert (done.exit_code, len(done.stdout.splitlines())) == (5, 1)
    assert message in done.stdout and "?." not in done.stdout
    machine = json.loads(run(tmp_path, "--json").stdout)
    assert (machine["verdict"], machine["exit_code"], len(machine["problems"])) == ("ERROR", 5, 1)


@pytest.mark.parametrize("value", ["true", '"0.5"', "-1", "1.5", "1e400", "[0.5]", "NaN"])
def test_a_score_is_a_number_from_0_to_1(tmp_path: Path, value: str) -> None:
    """Neither a word nor yes, and not below nothing."""
    data = to_json(audit(0, 60))
    data["attempts"][0]["scores"]["rougeL"]["value"] = "HERE"
    text = json.dumps(data).replace('"HERE"', value)
    (tmp_path / "results.json").write_text(text)
    assert run(tmp_path).exit_code == 5


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"n_sequences": 1', '"n_sequences": -1'),
        ('"n_sequences": 1', '"n_sequences": true'),
        ('"k": 1', '"k": -1'),
        ('"epoch": null', '"epoch": NaN'),
        ('"epoch": null', '"epoch": -3'),
        ('"step": 0', '"step": "0"'),
        ('"min_tokens": 8', '"min_tokens": 0'),
        ('"long_enough": true', '"long_enough": 1'),
        ('"exact": 0.0', '"exact": "0.0"'),
        ('"wall_s": 1.5', '"wall_s": "1.5"'),
        ('"relative_error": 1e-06', '"relative_error": -1e-06'),
    ],
)
def test_types_are_strict_and_counts_are_none_below_zero(tmp_path: Path, old: str, new: str) -> None:
    """Booleans are no numbers, numbers are no booleans, and text is neither."""
    text = json.dumps(to_json(audit(0, 60)))
    assert old in text
    (tmp_path / "results.json").write_text(text.replace(old, new, 1))
    done = run(tmp_path, "-q")
    assert done.exit_code == 5
    assert "does not fit" in done.stdout or "not a finite number" in done.stdout


def test_a_file_that_was_changed_after_it_was_written_is_an_error(tmp_path: Path) -> None:
    """A changed figure or digest is an error; a changed layout is not."""
    path = write(tmp_path, audit(0, 60))
    assert run(tmp_path, "--policy", rules_on_sentences(tmp_path)).exit_code == 0
    text = path.read_text()
    path.write_text(text.replace('"parameters": 22000000', '"parameters": 22000001'))
    done = run(tmp_path, "-q")
    assert done.exit_code == 5 and "was changed after it was written" in done.stdout
    data = json.loads(text)
    path.write_text(
        json.dumps(data, indent=3, sort_keys=True).replace('"wall_s": 1.5', '"wall_s": 15e-1').replace(": 0.0,", ": 0,")
    )
    assert run(tmp_path, "--policy", rules_on_sentences(tmp_path)).exit_code == 0
    path.write_text(json.dumps({key: value for key, value in data.items() if key != "digest"}))
    assert "has no digest, which leakaudit.results/1.8 requires" in run(tmp_path, "-q").stdout
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["verdict"] == "ERROR"  # not the PASS of before


def test_a_verdict_names_the_digest(tmp_path: Path) -> None:
    """As the results do."""
    path = write(tmp_path, audit(0, 60))
    assert run(path, "--json", "--policy", rules_on_sentences(tmp_path)).exit_code == 0
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["results_digest"] == json.loads(path.read_text())["digest"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"evnts": []}, "unknown key 'evnts' in attempts[0]; did you mean 'events'?"),
        ({"scores": {"rougeL": {"value": 0.1, "n": 1, "missing": "no"}}}, "unknown key"),
    ],
)
def test_an_unknown_key_is_an_error_in_a_file_of_this_version(
    tmp_path: Path, edit: dict[str, object], message: str
) -> None:
    """A misspelt key is a missing key; only later versions may have more keys."""
    data = to_json(audit(0, 60))
    data["attempts"][0] |= edit
    data["digest"] = digest_of(data)
    (tmp_path / "results.json").write_text(json.dumps(data))
    done = run(tmp_path, "-q")
    assert done.exit_code == 5 and message in done.stdout


@pytest.mark.parametrize("line", ["metric: rouge", "scope: {attack: spam}", "scope: {defense: prun}"])
def test_a_misspelt_name_in_a_policy_is_a_usage_error(tmp_path: Path, line: str) -> None:
    """Exit code 2 with the line, never INCONCLUSIVE."""
    write(tmp_path, audit(0, 60))
    rules = tmp_path / "gate.yaml"
    limit = (
        "statistic: max\n    max_value: 0.5" if line.startswith("metric") else "event: exact_sentence\n    max_count: 0"
    )
    rules.write_text(f"schema: leakaudit.policy/1\nname: test\nrules:\n  - id: a\n    {line}\n    {limit}\n")
    done = run(tmp_path, "--policy", rules)
    assert done.exit_code == 2
    assert f"{rules}:5: rules[0]." in done.stderr and "rule 'a': the " in done.stderr and "did you mean" in done.stderr


def test_a_pipe_in_the_place_of_the_results_is_refused(tmp_path: Path) -> None:
    """Nothing waits for a writer."""
    if not hasattr(os, "mkfifo"):
        pytest.skip("no pipes here")
    os.mkfifo(tmp_path / "results.json")
    done = run(tmp_path, "-q")
    assert done.exit_code == 5 and "is not a regular file" in done.stdout


def test_a_folder_that_cannot_be_written_still_gets_its_verdict(tmp_path: Path) -> None:
    """Evidence is often mounted read-only."""
    write(tmp_path, audit(0, 60))
    (tmp_path / ".verdict.json").mkdir()  # root may write anywhere, so the name itself is taken
    (tmp_path / "verdict.json").mkdir()
    done = run(tmp_path, "-q", "--policy", rules_on_sentences(tmp_path))
    assert done.exit_code == 0 and "verdict.json was not written" in done.stderr
    assert stat.S_ISDIR((tmp_path / "verdict.json").stat().st_mode)


def test_a_warning_rule_says_warn_and_stands_behind_the_rules_that_decide() -> None:
    """FAIL is what exits with 3."""
    rules = policy(
        {"id": "labels", "level": "warn", "event": "exact_sequence", "max_count": 0},
        {"id": "open", "event": "label_counts", "max_rate": 0.2},
        {"id": "rate", "event": "exact_sentence", "max_rate": 0.5},
    )
    out = io.StringIO()
    print_verdict(gate.evaluate(audit(3, 97), rules, now=NOW), console=Console(file=out, width=100))
    lines = [
        line for line in out.getvalue().splitlines() if line.split(" ")[0] in ("PASS", "WARN", "FAIL", "INCONCLUSIVE")
    ]
    assert [line.split()[:2] for line in lines] == [["INCONCLUSIVE", "open"], ["PASS", "rate"], ["WARN", "labels"]]


def test_an_earlier_verdict_does_not_outlive_its_results(tmp_path: Path) -> None:
    """Neither without results nor with a wrong policy does PASS stay on the disk."""
    path = write(tmp_path, audit(0, 60))
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("schema: leakaudit.policy/1\nname: wrong\nrules: []\n")
    kept = tmp_path / "verdict.json"
    assert run(tmp_path, "--policy", rules_on_sentences(tmp_path)).exit_code == 0 and '"PASS"' in kept.read_text()
    assert run(tmp_path, "--policy", wrong).exit_code == 2 and not kept.exists()
    assert run(tmp_path, "--policy", rules_on_sentences(tmp_path)).exit_code == 0
    path.unlink()
    assert run(tmp_path).exit_code == 5 and json.loads(kept.read_text())["verdict"] == "ERROR"


def test_a_link_to_results_of_a_run_that_was_not_audited_is_refused(tmp_path: Path) -> None:
    """The mark stands beside the file that the link leads to."""
    (tmp_path / "run").mkdir()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "results.json").symlink_to(write(tmp_path / "run", audit(0, 60)))
    rules = rules_on_sentences(tmp_path)
    assert run(tmp_path / "link", "--policy", rules).exit_code == 0
    mark = {"schema": "leakaudit.not_audited/1.0", "because": "no forward pass", "when": "2026-11-02T10:00:00Z"}
    (tmp_path / "run" / "not_audited.json").write_text(json.dumps(mark))
    done = run(tmp_path / "link", "--policy", rules, "-q")
    assert done.exit_code == 5 and "this run was not audited: no forward pass" in done.stdout


@pytest.mark.parametrize(
    "path",
    [
        ("controls", "negative", "k"),
        ("catalogue",),
        ("coverage", "total_steps"),
        ("steps", 0, "beyond_hidden"),
        ("run", "simulated"),
        ("min_tokens",),
    ],
)
def test_a_key_that_this_version_writes_may_not_be_missing(tmp_path: Path, path: tuple[str | int, ...]) -> None:
    """Its default may say that nothing is wrong."""
    data = to_json(audit(0, 60))
    inner: Any = data
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    (tmp_path / "results.json").write_text(json.dumps(data | {"digest": digest_of(data)}))
    done = run(tmp_path, "-q", "--policy", rules_on_sentences(tmp_path))
    assert done.exit_code == 5 and f"lacks the key '{path[-1]}'" in done.stdout


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"coverage": {"total_steps": 3}}, "the run had 3 steps, and 60 are recorded"),
        ({"controls": {"positive": {"k": 1, "n": 1, "note": "not run"}}}, "its note says that it was not run"),
        ({"run": {"battery": {"budget_s": 0.0}}}, "attacks ran although each had 0 s"),
        ({"schema": "leakaudit.results/1.05"}, "this version reads leakaudit.results/1.x"),
    ],
)
def test_a_contradiction_is_an_error_even_with_a_fitting_digest(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    """Facts that the file states twice must agree."""
    data = _merged(to_json(audit(0, 60)), changes)
    (tmp_path / "results.json").write_text(json.dumps(data | {"digest": digest_of(data)}))
    done = run(tmp_path, "-q", "--policy", rules_on_sentences(tmp_path))
    assert done.exit_code == 5 and said in done.stdout


def _merged(data: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    new = {k: _merged(data[k], v) if isinstance(v, dict) else v for k, v in changes.items()}
    return data | new


def test_options_that_exclude_each_other_leave_no_earlier_verdict(tmp_path: Path) -> None:
    """A pipeline that reads the file would else take an old PASS for this call's."""
    (tmp_path / "results.json").write_text("{}")
    (tmp_path / "verdict.json").write_text('{"verdict": "PASS"}')
    done = run(tmp_path, "--json", "--github")
    assert done.exit_code == 2 and not (tmp_path / "verdict.json").exists()
