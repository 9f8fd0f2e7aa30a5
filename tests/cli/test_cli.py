"""The command line: output, files, exit codes, answers to bad input."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from click.testing import CliRunner, Result

from leakaudit.cli import main
from leakaudit.cli.battery import specs_of, with_options
from leakaudit.client.step import ClientStep
from tests.support import tiny
from tests.support.snapshots import write_step

ROOT = Path(__file__).parents[2]

ROWS = [
    ("the old dog chased a small red horse near the river", 0),
    ("one bird never ate two big fish today", 1),
    ("a cat found three houses and liked the road", 0),
    ("four trees near the river saw a blue bird", 1),
]
WORDS = ("chased", "horse", "river", "bird", "never", "trees")
"""Words of the data that stand in no sentence of ours."""

SUMMARY_KEYS = {
    "attack",
    "defense",
    "steps",
    "sequences",
    "exact_rate",
    "scores",
    "r1",
    "r2",
    "rl",
    "token_recall",
    "token_precision",
    "reachable_tokens",
    "reachable_sequences",
    "texts_found",
    "guess_perplexity",
    "precision",
    "spread",
    "nerr",
    "best_rl",
    "sentences_found",
    "label_accuracy",
    "seconds_per_step",
    "status_counts",
}
"""Of issue 2, item 10, and issue 3, item 6."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with a tiny classifier and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tiny.bert(seed=1).save_pretrained(folder)  # type: ignore[operator]
    tiny.bert_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a data file of four rows and two classes."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": t, "label": n}) + "\n" for t, n in ROWS), encoding="utf-8")
    return path


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


def _simulate(model: Path, data: Path, out: Path, *more: object) -> Result:
    battery = ("--attacks", "embedding-rows,span", "--budget", 30, "--steps", 2, "--controls", 1)
    return _run("simulate", "--model", model, "--data", data, "--out", out, *battery, *more)


@pytest.fixture(scope="module")
def audited(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Give the folder and the outcome of one simulated audit under two defences."""
    out = tmp_path_factory.mktemp("audit") / "out"
    return out, _simulate(model, data, out, "--json", "--defenses", "none,freeze-embeddings,gaussian-noise(scale=10)")


@pytest.fixture
def run_dir(audited: tuple[Path, Result], tmp_path: Path) -> Path:
    """Give a copy of the audited folder that a test may write to."""
    return Path(shutil.copytree(audited[0], tmp_path / "run"))


# ---------------------------------------------------------------------- simulate


def test_simulate_prints_the_summaries_and_nothing_else_on_stdout(audited: tuple[Path, Result]) -> None:
    """stdout has one JSON document; progress goes to stderr."""
    out, result = audited
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert {"summaries", "controls", "verdict", "granted", "results", "report"} <= set(document)
    assert all(set(summary) == SUMMARY_KEYS for summary in document["summaries"])
    pairs = {(summary["attack"], summary["defense"]) for summary in document["summaries"]}
    defenses = {defense for _, defense in pairs}
    assert len(defenses) == 3 and "none" in defenses
    assert pairs == {(attack, defense) for attack in ("embedding-rows", "span") for defense in defenses}
    assert document["granted"] == []
    assert Path(document["results"]).samefile(out / "results.json")
    assert Path(document["report"]).samefile(out / "report.html")
    assert "plan: 2 steps x 2 attacks x 3 defences = 12 attempts, at most 6 min at 30 s each" in result.stderr


def test_simulate_measures_what_is_true(audited: tuple[Path, Result]) -> None:
    """Undefended, every sentence is recovered.

    Frozen tables name no words, and noise ten times the signal hides them.
    """
    _, result = audited
    by_pair = {(s["attack"], s["defense"].split("(")[0]): s for s in json.loads(result.stdout)["summaries"]}
    open_ = by_pair["span", "none"]
    assert (open_["steps"], open_["sequences"]) == (2, 2)
    assert (open_["exact_rate"], open_["r1"], open_["r2"], open_["rl"]) == (1.0, 1.0, 1.0, 1.0)
    assert open_["status_counts"] == {"ran": 2}
    assert open_["seconds_per_step"] > 0
    assert by_pair["embedding-rows", "none"]["token_recall"] == 1.0
    assert by_pair["embedding-rows", "none"]["exact_rate"] is None
    frozen = by_pair["embedding-rows", "freeze-embeddings"]
    assert frozen["status_counts"] == {"not_applicable": 2}
    assert (frozen["steps"], frozen["token_recall"], frozen["seconds_per_step"]) == (0, None, None)
    assert by_pair["span", "gaussian-noise"]["exact_rate"] == 0.0
    controls = json.loads(result.stdout)["controls"]
    assert (controls["positive"]["k"], controls["negative"]["k"]) == (1, 0)


def test_no_private_text_leaves_a_masked_audit(audited: tuple[Path, Result]) -> None:
    """No terminal output and no file has a word, though every text was recovered."""
    out, result = audited
    texts = {path.name: path.read_text(encoding="utf-8") for path in out.iterdir()}
    texts |= {"stdout": result.stdout, "stderr": result.stderr}
    assert {"results.json", "report.html", "verdict.json", "journal.jsonl"} <= set(texts)
    for name, content in texts.items():
        assert not [word for word in WORDS if word in content], name


def test_full_text_appears_where_it_was_asked_for(model: Path, data: Path, tmp_path: Path) -> None:
    """The check above could not fail if words never reached a report at all."""
    out = tmp_path / "out"
    assert _simulate(model, data, out, "--text", "full").exit_code == 0
    report = (out / "report.html").read_text(encoding="utf-8")
    assert [word for word in WORDS if word in report]
    assert not [word for word in WORDS if word in (out / "results.json").read_text(encoding="utf-8")]


def test_full_text_is_refused_in_ci_before_anything_is_done(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after an hour of attacks, and not after an earlier run's folder was cleared."""
    monkeypatch.setenv("CI", "true")
    result = _simulate(model, data, tmp_path / "out", "--text", "full")
    assert result.exit_code == 2
    assert "asked for in CI" in result.stderr
    assert not (tmp_path / "out").exists()


def _without_time(summaries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in s.items() if key != "seconds_per_step"} for s in summaries]


def test_the_same_seed_gives_the_same_numbers(
    audited: tuple[Path, Result], model: Path, data: Path, tmp_path: Path
) -> None:
    """To the last digit, times aside; the folder of an earlier run is used again."""
    options = ("--json", "--defenses", "none,freeze-embeddings,gaussian-noise(scale=10)")
    again = _simulate(model, data, tmp_path, *options)
    first = json.loads(audited[1].stdout)["summaries"]
    assert _without_time(json.loads(again.stdout)["summaries"]) == _without_time(first)
    third = _simulate(model, data, tmp_path, *options)
    assert _without_time(json.loads(third.stdout)["summaries"]) == _without_time(first)
    other = _simulate(model, data, tmp_path, *options, "--seed", 5)
    digests = [
        [step["snapshot"] for step in json.loads((folder / "results.json").read_text(encoding="utf-8"))["steps"]]
        for folder in (audited[0], tmp_path)
    ]
    assert other.exit_code == 0 and digests[0] != digests[1]


def test_simulate_on_a_terminal_shows_verdict_matrix_and_report(model: Path, data: Path, tmp_path: Path) -> None:
    """Without --json the answer is for people."""
    result = _simulate(model, data, tmp_path / "out")
    assert result.exit_code == 0
    for expected in ("span", "embedding-rows", "none", "report.html"):
        assert expected in result.stdout
    assert re.search("FAIL|INCONCLUSIVE", result.stdout)


def test_fewer_full_batches_than_steps_are_announced(model: Path, data: Path, tmp_path: Path) -> None:
    """Four rows make one batch of three."""
    result = _simulate(model, data, tmp_path / "out", "--steps", 9, "--batch-size", 3, "--attacks", "embedding-rows")
    assert result.exit_code == 0
    assert "--steps 9: the data has only 1 full batch of 3; all of them are audited" in result.stderr


def test_what_is_granted_is_printed(model: Path, data: Path, tmp_path: Path) -> None:
    """And knobs reach the plugins they name."""
    result = _simulate(
        model, data, tmp_path / "out", "--grant", "labels,lengths", "--attack-option", "span.beam=2", "--json"
    )
    assert json.loads(result.stdout)["granted"] == ["labels", "lengths"]


def test_simulate_trains_with_dropout_on_frozen_embeddings(model: Path, data: Path, tmp_path: Path) -> None:
    """The regime is written into the results."""
    result = _simulate(model, data, tmp_path / "out", "--mode", "train", "--freeze", "embeddings", "--json")
    assert result.exit_code == 0
    regime = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))["regime"]
    assert regime["training_mode"] is True
    assert "frozen: embeddings" in regime["trainable"]


def test_simulate_leaves_foreign_files_alone_and_refuses_a_training_runs_folder(
    model: Path, data: Path, tmp_path: Path
) -> None:
    """An earlier run's results are replaced; nothing else is touched."""
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    assert _simulate(model, data, tmp_path).exit_code == 0
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"
    (tmp_path / "spool").mkdir()
    before = (tmp_path / "results.json").read_bytes()
    result = _simulate(model, data, tmp_path)
    assert result.exit_code == 2 and "holds the audit of a training run" in result.stderr
    assert (tmp_path / "results.json").read_bytes() == before


# ---------------------------------------------------------------------- bad input

GOOD = {"text": "the old dog", "label": 1}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"sentence": "chased horse", "label": 0}],
            r"rows\.jsonl:1: looked for the field 'text' .* found label, sentence",
        ),
        ([GOOD, {"text": "chased horse"}], r"rows\.jsonl:2: classification needs the field 'label'"),
        ([GOOD, {"text": "chased horse", "label": 4}], r"has a label 4, but --num-labels is 2; give at least 5"),
        ([], r"rows\.jsonl: holds no rows"),
    ],
    ids=["no text field", "no label", "label out of range", "empty file"],
)
def test_bad_data_is_a_usage_error_that_names_the_line(
    model: Path, tmp_path: Path, rows: list[dict[str, Any]], message: str
) -> None:
    """Exit code 2, one line, nothing of the content, nothing written."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    result = _simulate(model, path, tmp_path / "out", "--num-labels", 2)
    assert result.exit_code == 2
    assert re.search(rf"^error: .*{message}", result.stderr, re.MULTILINE), result.stderr
    assert "chased" not in result.output and "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_one_plugin_may_be_tried_with_different_knobs() -> None:
    """Each keeps its own; an option that names it goes to all of them."""
    specs = with_options(specs_of("tag(steps=3),tag(steps=5),span"), ("tag.alpha=0.5",))
    assert [spec.label for spec in specs] == ["tag(steps=3, alpha=0.5)", "tag(steps=5, alpha=0.5)", "span"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--attacks", "spann"], r"no attack is called 'spann'; did you mean 'span'\?"),
        (["--defenses", "prun(share=0.5)"], r"no defense is called 'prun'; did you mean 'prune'\?"),
        (["--attacks", "span(beem=3)"], r"attack 'span' has no option 'beem'; did you mean 'beam'\?"),
        (["--attacks", "span(beam=many)"], r"attack 'span', option 'beam': Input should be a valid integer"),
        (["--attacks", "span(beam=3"], r"expected names separated by commas"),
        (["--attacks", ","], r"expected names separated by commas"),
        (["--attack-option", "span.beam"], r"'span\.beam': expected name\.option=value"),
        (["--attack-option", "tag.steps=3"], r"'tag' is not in this battery \(embedding-rows, span\)"),
        (["--grant", "weather"], r"--grant weather: an attack can be granted labels, lengths"),
        (["--freeze", "*"], r"--freeze leaves no parameter to share"),
        (["--freeze", "embedings"], r"--freeze embedings: matches no parameter"),
        (["--model", "no-such-folder"], r"no-such-folder: no such folder; .*nothing is downloaded"),
        (["--data", "no-such-file"], r"no-such-file: no such file"),
        (["--policy", "no-such-policy.yaml"], r"no-such-policy\.yaml"),
        (["--num-labels", "9"], r"do not fit a head of 9 classes"),
        (["--batch-size", "99"], r"the data has 4 rows, fewer than one batch of 99"),
    ],
)
def test_a_wrong_option_is_a_usage_error_that_says_what_would_be_right(
    model: Path, data: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    """Exit code 2 and one line on stderr; a later option overrides an earlier one."""
    result = _simulate(model, data, tmp_path / "out", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(rf"^error: .*{message}", result.stderr, re.MULTILINE), result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--atacks", "span"], r"No such option '?--atacks'?.*--attacks"),
        (["--steps", "0"], r"'--steps': 0 is not in the range"),
        (["--budget", "0"], r"'--budget': 0\S* is not in the range"),
        (["--mode", "evil"], r"'--mode': 'evil' is not one of 'eval', 'train'"),
        (["--task", "translation"], r"'--task': 'translation' is not one of"),
        (["--text", "everything"], r"'--text': 'everything' is not one of"),
    ],
)
def test_options_that_click_refuses_exit_two_as_well(
    model: Path, data: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    """With click's own words."""
    result = _simulate(model, data, tmp_path / "out", *options)
    assert result.exit_code == 2
    assert re.search(message, result.stderr, re.DOTALL), result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_a_usage_error(model: Path, data: Path, tmp_path: Path) -> None:
    """Falling back in silence would make an audit take a day."""
    result = _simulate(model, data, tmp_path / "out", "--device", "cuda")
    assert result.exit_code == 2
    assert "device cuda was asked for, but torch finds no GPU; use auto or cpu" in result.stderr


def test_an_error_is_json_too_where_json_was_asked_for(model: Path, data: Path, tmp_path: Path) -> None:
    """A machine that reads stdout gets one document in any case."""
    result = _simulate(model, data, tmp_path / "out", "--attacks", "spann", "--json")
    document = json.loads(result.stdout)
    assert (document["error"], document["exit"], result.exit_code) == ("UnknownPluginError", 2, 2)
    assert "did you mean 'span'" in document["message"]


def test_an_output_folder_that_is_a_file_is_refused(model: Path, data: Path, tmp_path: Path) -> None:
    """And the file stays."""
    path = tmp_path / "out"
    path.write_text("mine", encoding="utf-8")
    result = _simulate(model, data, path)
    assert result.exit_code == 2 and "found a file; give a folder" in result.stderr
    assert path.read_text(encoding="utf-8") == "mine"


# ---------------------------------------------------------------------- gate


def _policy(folder: Path, *rules: dict[str, Any], min_steps: int = 1) -> Path:
    path = folder / "policy.yaml"
    document = {
        "schema": "leakaudit.policy/1",
        "name": "test",
        "evidence": {"min_steps": min_steps},
        "rules": [{"id": f"rule-{number}", **rule} for number, rule in enumerate(rules)],
    }
    path.write_text(json.dumps(document), encoding="utf-8")  # JSON is YAML
    return path


LEAKS = {"event": "exact_sentence", "max_count": 0}
LABELS = {"event": "label_counts", "max_rate": 0.5}


def test_a_leak_fails_the_gate_with_exit_three(run_dir: Path, tmp_path: Path) -> None:
    """One recovered sentence is proof; verdict.json says the same."""
    result = _run("gate", run_dir, "--policy", _policy(tmp_path, LEAKS))
    assert result.exit_code == 3 and "FAIL" in result.stdout
    assert json.loads((run_dir / "verdict.json").read_text(encoding="utf-8"))["verdict"] == "FAIL"


def test_a_rule_that_cannot_fail_is_refused_with_exit_two(run_dir: Path, tmp_path: Path) -> None:
    """No ROUGE is above 1."""
    policy = _policy(tmp_path, {"metric": "rougeL", "statistic": "max", "max_value": 1.0})
    assert _run("gate", run_dir, "--policy", policy).exit_code == 2


@pytest.mark.parametrize("content", [None, "{", '{"schema": "leakaudit.results/9.0"}'])
def test_results_that_cannot_be_read_are_an_error_with_exit_five(run_dir: Path, content: str | None) -> None:
    """Missing, torn, or from a newer version: never a pass."""
    file = run_dir / "results.json"
    if content is None:
        file.unlink()
    else:
        file.write_text(content, encoding="utf-8")
    result = _run("gate", run_dir, "--json")
    assert result.exit_code == 5
    assert json.loads(result.stdout)["verdict"] == "ERROR"


def test_a_wrong_policy_is_a_usage_error_with_exit_two(run_dir: Path, tmp_path: Path) -> None:
    """A typo must not switch a rule off."""
    result = _run("gate", run_dir, "--policy", _policy(tmp_path, {"event": "exact_sentence", "max_rat": 0.1}))
    assert result.exit_code == 2
    assert re.search(r"^error: .*unknown key 'max_rat'; did you mean 'max_rate'\?", result.stderr, re.DOTALL)


def test_a_soft_failure_keeps_its_verdict(run_dir: Path, tmp_path: Path) -> None:
    """The pipeline goes on; the verdict does not change."""
    result = _run("gate", run_dir, "--policy", _policy(tmp_path, LEAKS), "--soft-fail", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["verdict"] == "FAIL"


def test_quiet_prints_one_line(run_dir: Path, tmp_path: Path) -> None:
    """For logs."""
    result = _run("gate", run_dir, "--policy", _policy(tmp_path, LEAKS, LABELS), "--quiet")
    assert len(result.stdout.strip().splitlines()) == 1 and result.exit_code == 3


def test_the_gate_takes_the_results_file_as_well(run_dir: Path, tmp_path: Path) -> None:
    """The folder is a convenience."""
    assert _run("gate", run_dir / "results.json", "--policy", _policy(tmp_path, LEAKS)).exit_code == 3


def test_the_gate_runs_without_torch(run_dir: Path, tmp_path: Path) -> None:
    """A CI machine has no model library: here any import of it is an error."""
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from leakaudit.cli import main\n"
        "main()\n"
    )
    arguments = ["gate", str(run_dir), "--policy", str(_policy(tmp_path, LEAKS))]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr


# ---------------------------------------------------------------------- report


def test_report_renders_the_masked_page_again(run_dir: Path, tmp_path: Path) -> None:
    """To the file that was named, without a word of the data."""
    page = tmp_path / "page.html"
    result = _run("report", run_dir, "-o", page)
    assert (result.exit_code, result.stdout.strip()) == (0, str(page))
    content = page.read_text(encoding="utf-8")
    assert "<html" in content and not [word for word in WORDS if word in content]


def test_a_masked_audit_cannot_be_shown_in_full(run_dir: Path) -> None:
    """The text was never kept."""
    result = _run("report", run_dir, "--text", "full")
    assert result.exit_code == 2 and result.stderr.startswith("error: ")


def test_a_report_of_nothing_is_an_error(tmp_path: Path) -> None:
    """Exit 5: there is no evidence."""
    result = _run("report", tmp_path / "nothing")
    assert result.exit_code == 5 and "no such folder; give the folder that holds results.json" in result.stderr


# ---------------------------------------------------------------------- run


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """Give a folder with two kept snapshots and the tokenizer beside them."""
    folder = tmp_path / "kept"
    folder.mkdir()
    model = tiny.bert(seed=1)
    for step, (text, label) in enumerate(ROWS[:2]):
        client = tiny.client_step(model, tiny.bert_tokenizer(), [text], [label])
        write_step(folder / f"step-{step}", client, step)
    tiny.bert_tokenizer().save_pretrained(folder / "tokenizer")
    return folder


def _config(folder: Path) -> Path:
    path = folder / "audit.yaml"
    path.write_text("attacks: [embedding-rows, span]\ncontrols: 0\n", encoding="utf-8")
    return path


def test_run_attacks_kept_snapshots(spool: Path, tmp_path: Path) -> None:
    """Found below the folder, with the tokenizer that was kept beside them."""
    result = _run("run", spool, "--config", _config(tmp_path), "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0
    by_attack = {summary["attack"]: summary for summary in json.loads(result.stdout)["summaries"]}
    assert by_attack["span"]["steps"] == 2 and by_attack["span"]["exact_rate"] == 1.0
    assert not [word for word in WORDS if word in result.output]


def test_run_takes_single_snapshots(spool: Path, tmp_path: Path) -> None:
    """One of the two."""
    result = _run("run", spool / "step-1", "--config", _config(tmp_path), "--out", tmp_path / "out", "--json")
    steps = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))["steps"]
    assert result.exit_code == 0 and [step["id"] for step in steps] == ["st-000001"]


def test_a_snapshot_that_was_changed_is_refused_with_exit_five(spool: Path, tmp_path: Path) -> None:
    """Its digest no longer fits."""
    file = spool / "step-0" / "observed.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    result = _run("run", spool, "--config", _config(tmp_path), "--out", tmp_path / "out")
    assert result.exit_code == 5
    assert re.search(r"^error: .*its digest is not the one in snapshot\.json", result.stderr, re.MULTILINE)


def test_a_folder_without_snapshots_says_how_to_keep_them(tmp_path: Path) -> None:
    """They are removed after the audit unless somebody asks."""
    result = _run("run", tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "no snapshot in" in result.stderr and "`keep_snapshots: true` keeps them" in result.stderr


def test_a_snapshot_without_a_tokenizer_asks_for_one(spool: Path, tmp_path: Path, model: Path) -> None:
    """And takes the one that is given."""
    shutil.rmtree(spool / "tokenizer")
    arguments = ("run", spool, "--config", _config(tmp_path), "--out", tmp_path / "out")
    result = _run(*arguments)
    assert result.exit_code == 2 and "no tokenizer folder beside it; give one with --tokenizer" in result.stderr
    assert _run(*arguments, "--tokenizer", model).exit_code == 0


# ---------------------------------------------------------------------- what there is


@pytest.mark.parametrize(
    ("command", "fields", "names"),
    [
        ("attacks", ("goal", "threat_model", "source"), {"embedding-rows", "span", "tag", "idlg", "llg"}),
        ("defenses", ("protects", "cost", "source"), {"none", "gaussian-noise", "freeze-embeddings", "prune"}),
    ],
)
def test_the_catalogue_tells_threat_model_and_source(command: str, fields: tuple[str, ...], names: set[str]) -> None:
    """For people and for machines."""
    rows = {row["name"]: row for row in json.loads(_run(command, "--json").stdout)}
    assert names <= set(rows)
    assert all(row[field] for row in rows.values() for field in (*fields, "what"))
    listed = " ".join(_run(command).stdout.split())
    for row in rows.values():
        assert row["name"] in listed
        assert " ".join(str(row["source"]).split()) in listed
    assert all(f"{field.replace('_', ' ')}:" in listed for field in fields)


@pytest.mark.parametrize("what", ["results", "policy", "config", "verdict", "nightly", "night"])
def test_schemas_are_valid_json_schemas(what: str) -> None:
    """They fit the meta-schema and refuse an empty object if fields are required."""
    schema = json.loads(_run("schema", what).stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["type"] == "object" and schema["properties"]


def test_the_results_of_a_run_fit_the_printed_schema(run_dir: Path) -> None:
    """What is published is what is written; verdict.json likewise."""
    for what in ("results", "verdict"):
        schema = json.loads(_run("schema", what).stdout)
        document = json.loads((run_dir / f"{what}.json").read_text(encoding="utf-8"))
        jsonschema.Draft202012Validator(schema).validate(document)


def test_help_lists_every_command_without_loading_torch() -> None:
    """Asking for help must not take seconds."""
    code = (
        "import sys\n"
        "from leakaudit.cli import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit as done:\n"
        "    assert not done.code\n"
        "print(sorted({'torch', 'transformers', 'scipy', 'numpy', 'altair'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in (
        "simulate",
        "worker",
        "run",
        "report",
        "gate",
        "export",
        "doctor",
        "attacks",
        "defenses",
        "schema",
        "history",
        "compare",
        "baseline",
    ):
        assert re.search(rf"^  {command} ", done.stdout, re.MULTILINE), command
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("group", [(), ("snapshots",), ("prior",), ("baseline",)])
def test_no_sentence_of_the_help_is_cut(group: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns every command has a whole sentence."""
    monkeypatch.setenv("COLUMNS", "80")
    text = _run(*group, "--help").stdout
    commands = text.partition("Commands:")[2].strip().split("\n")
    assert commands and "..." not in "".join(commands)
    assert all(re.fullmatch(r" *[a-z]+  +[A-Z].*\.", line) for line in commands), text


def test_doctor_recovers_a_known_sentence_on_this_machine() -> None:
    """Every check is a sentence; none fails where the tests run."""
    result = _run("doctor", "--json")
    checks = json.loads(result.stdout)
    assert result.exit_code == 0
    assert checks and all(check["sentence"] and check["state"] != "fail" for check in checks)


def test_doctor_fails_a_wrong_configuration(tmp_path: Path) -> None:
    """Exit 2, as a run with it would."""
    path = tmp_path / "audit.yaml"
    path.write_text("atacks: [span]\n", encoding="utf-8")
    result = _run("doctor", "--config", path, "--json")
    assert result.exit_code == 2
    failed = [check["sentence"] for check in json.loads(result.stdout) if check["state"] == "fail"]
    assert len(failed) == 1 and "did you mean 'attacks'" in failed[0]


@pytest.mark.parametrize(("key", "state"), [("max_snapshots: 5", "warn"), ("seed: 1", "ok")])
def test_doctor_warns_of_a_plan_that_can_never_pass(tmp_path: Path, key: str, state: str) -> None:
    """It names the number that the policy needs and how long the attacks may take."""
    from leakaudit.cli.doctor import examine

    path = tmp_path / "audit.yaml"
    path.write_text(f"out_dir: {tmp_path / 'audit'}\n{key}\n", encoding="utf-8")
    (found,) = [check for check in examine(path) if check.sentence.startswith("policy: ")]
    assert "needs 59 steps to pass (7 attacks, up to 60 s each: up to 7 min a step)" in found.sentence
    assert found.state == state
    assert ("`max_snapshots: 5` can never pass it: set 59, or auto" in found.sentence) == (state == "warn")


def test_a_step_recipe_is_what_a_client_step_needs(spool: Path) -> None:
    """What was written can be replayed: the fixture above is a real snapshot."""
    from leakaudit.storage.snapshots import read_snapshot

    snapshot = read_snapshot(spool / "step-0")
    update = ClientStep.of(snapshot).update()
    assert all(torch.allclose(update[name], seen, atol=1e-6) for name, seen in snapshot.observation.update.items())


def test_simulate_tries_the_attacks_of_the_callback_unless_others_are_asked_for() -> None:
    """There is one list, in the configuration, and the help shows it."""
    from leakaudit.cli.battery import battery_of_data
    from leakaudit.config.audit import DEFAULT_ATTACKS, LABEL_ATTACKS, AuditConfig

    assert battery_of_data(Path("texts.jsonl")) == DEFAULT_ATTACKS == AuditConfig().attacks
    assert battery_of_data(Path("arrays.safetensors")) == LABEL_ATTACKS
    said = "".join(CliRunner().invoke(main, ["simulate", "--help"]).output.split())
    for specs in (DEFAULT_ATTACKS, LABEL_ATTACKS):
        assert ",".join(spec.name for spec in specs) in said


def test_the_help_of_simulate_does_not_wait_for_torch() -> None:
    """The default attacks are known without any model library."""
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom leakaudit.cli import main\n"
        "assert CliRunner().invoke(main, ['simulate', '--help']).exit_code == 0\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr
