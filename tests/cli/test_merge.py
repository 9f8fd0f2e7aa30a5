"""`leakaudit simulate --shard` and `leakaudit merge`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from leakaudit.cli import main
from leakaudit.results.consistency import contradictions
from leakaudit.results.files import load_results
from tests.support import tiny
from tests.support.same_results import same_results

ROWS = [f"the old dog chased {number} small red horse near the river" for number in range(7)]
STEPS, SHARDS = 7, 3


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def simulate(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """Give a function that audits the same seven steps with a slow and a quick attack."""
    place = tmp_path_factory.mktemp("source")
    tiny.bert(seed=1, dropout=0.1).save_pretrained(place / "model")  # type: ignore[operator]
    tiny.bert_tokenizer().save_pretrained(place / "model")
    data = place / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": text, "label": n % 2}) + "\n" for n, text in enumerate(ROWS)))

    def run(out: Path, *more: object) -> Result:
        attacks = ("--attacks", "dlg(steps=3),span,idlg", "--defenses", "none,gaussian-noise(scale=0.1)")
        source = ("--model", place / "model", "--data", data, "--steps", STEPS, "--batch-size", 1)
        return _run("simulate", *source, *attacks, "--controls", 4, "--out", out, *more)

    return run


@pytest.fixture(scope="module")
def shards(simulate: Callable[..., Result], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Give the folders of all shards."""
    place = tmp_path_factory.mktemp("shards")
    folders = [place / f"shard-{index}" for index in range(1, SHARDS + 1)]
    for index, folder in enumerate(folders, start=1):
        done = simulate(folder, "--shard", f"{index}/{SHARDS}")
        assert done.exit_code == 0, done.output
    return folders


def test_a_shard_has_its_steps_and_says_so(shards: list[Path]) -> None:
    """Its command names it, and its coverage names what others have."""
    found = load_results(shards[1])
    assert [step.step for step in found.steps] == [1, 4]
    assert "--shard 2/3" in found.run.command
    assert (found.coverage.audited_steps, found.coverage.total_steps) == (2, STEPS)
    (others,) = [one for one in found.coverage.not_tested if "other shards" in one.why]
    assert others.what.startswith("5 steps")


def test_merged_shards_are_the_whole_audit(simulate: Callable[..., Result], shards: list[Path], tmp_path: Path) -> None:
    """Steps, attempts, summaries, controls and coverage are those of one machine."""
    assert simulate(tmp_path / "whole").exit_code == 0
    merged = _run("merge", *reversed(shards), "--out", tmp_path / "merged")
    assert merged.exit_code == 0, merged.output
    assert same_results(tmp_path / "merged") == same_results(tmp_path / "whole")
    found, whole = load_results(tmp_path / "merged"), load_results(tmp_path / "whole")
    assert found.controls == whole.controls
    assert found.controls.positive.n == 4
    assert found.run.pairing == whole.run.pairing
    assert not contradictions(found)
    assert "merge" in found.run.command and "--shard K/3" in found.run.command
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert {"results.json", "verdict.json", "report.html", "journal.jsonl"} <= names
    verdicts = [json.loads((tmp_path / name / "verdict.json").read_text()) for name in ("merged", "whole")]
    assert verdicts[0]["verdict"] == verdicts[1]["verdict"]


def test_a_missing_shard_is_named_and_partial_says_what_is_not_there(shards: list[Path], tmp_path: Path) -> None:
    """Without `--partial` nothing is written."""
    refused = _run("merge", shards[0], shards[2], "--out", tmp_path / "merged")
    assert (refused.exit_code, "missing: 2/3" in refused.output) == (2, True)
    assert not (tmp_path / "merged").exists()
    partly = _run("merge", shards[0], shards[2], "--partial", "--out", tmp_path / "merged")
    assert partly.exit_code == 0, partly.output
    found = load_results(tmp_path / "merged")
    assert [step.step for step in found.steps] == [0, 2, 3, 5, 6]
    (absent,) = [one for one in found.coverage.not_tested if "2/3" in one.why]
    assert absent.what.startswith("2 steps")


def test_a_shard_twice_is_refused(shards: list[Path], tmp_path: Path) -> None:
    """Also as a copy in another folder."""
    copy = shutil.copytree(shards[0], tmp_path / "copy")
    refused = _run("merge", *shards, copy, "--out", tmp_path / "merged")
    assert refused.exit_code == 5
    assert "both are shard 1/3" in refused.output


def test_the_policy_of_the_first_shard_is_that_of_the_whole_audit(shards: list[Path], tmp_path: Path) -> None:
    """A shard that began with another policy is refused with both digests."""
    assert _run("merge", *shards, "--out", tmp_path / "merged").exit_code == 0
    found, parts = load_results(tmp_path / "merged"), [load_results(folder) for folder in shards]
    policies = [one.run.policy for one in parts]
    assert found.run.policy == policies[0] and found.run.policy is not None
    assert found.subject.base_model == parts[0].subject.base_model != ""
    copy = shutil.copytree(shards[0], tmp_path / "copy")
    state = json.loads((copy / "state.json").read_text())
    state["origin"]["policy"]["digest"] = "sha256:" + "0" * 64
    (copy / "state.json").write_text(json.dumps(state))
    refused = _run("merge", copy, *shards[1:], "--out", tmp_path / "other")
    assert refused.exit_code == 5 and "the policy when they began (sha256:000" in refused.output
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("option", "named"),
    [
        (("--seed", "5"), "battery"),
        (("--budget", "59"), "battery"),
        (("--mode", "train"), "model, data or options"),
        (("--controls", "5"), "`controls`"),
    ],
)
def test_shards_of_different_audits_are_refused(
    simulate: Callable[..., Result], shards: list[Path], tmp_path: Path, option: tuple[str, ...], named: str
) -> None:
    """The message names what differs."""
    assert simulate(tmp_path / "other", *option, "--shard", "2/3").exit_code == 0
    refused = _run("merge", shards[0], tmp_path / "other", shards[2], "--out", tmp_path / "merged")
    assert refused.exit_code == 5
    assert named in refused.output


def test_an_unfinished_shard_is_refused_or_its_rest_named(shards: list[Path], tmp_path: Path) -> None:
    """What it lacks is not run, with the reason."""
    stopped = Path(shutil.copytree(shards[0], tmp_path / "stopped"))
    state = json.loads((stopped / "state.json").read_text())
    (stopped / "state.json").write_text(json.dumps(state | {"finished": False, "steps": state["steps"][:2]}))
    kept = {step["id"] for step in state["steps"][:2]}
    lines = (stopped / "journal.jsonl").read_text().splitlines(keepends=True)
    lines = [line for line in lines if json.loads(line)["attempt"]["step"] in kept][:-1]
    (stopped / "journal.jsonl").write_text("".join(lines))
    refused = _run("merge", stopped, *shards[1:], "--out", tmp_path / "merged")
    assert (refused.exit_code, "not finished: 1/3" in refused.output) == (2, True)
    assert _run("merge", stopped, *shards[1:], "--partial", "--out", tmp_path / "merged").exit_code == 0
    found = load_results(tmp_path / "merged")
    assert found.run.interrupted
    assert [one.what for one in found.coverage.not_tested if "stopped before" in one.why] == [
        "1 step that should have been kept"
    ]
    assert [attempt.status for attempt in found.attempts if "stopped" in attempt.reason] == ["skipped"]
    assert not contradictions(found)


def test_a_whole_audit_is_no_shard(simulate: Callable[..., Result], shards: list[Path], tmp_path: Path) -> None:
    """Neither is an empty folder, or the output a shard."""
    assert simulate(tmp_path / "whole", "--steps", 1, "--attacks", "idlg").exit_code == 0
    assert "holds a whole audit" in _run("merge", tmp_path / "whole", "--out", tmp_path / "merged").output
    assert "holds no audit" in _run("merge", tmp_path / "nothing", "--out", tmp_path / "merged").output
    assert "is the folder of a shard" in _run("merge", *shards, "--out", shards[0]).output
    assert (shards[0] / "results.json").exists()


def test_another_torch_is_refused(shards: list[Path], tmp_path: Path) -> None:
    """It may compute other results."""
    other = Path(shutil.copytree(shards[1], tmp_path / "other"))
    state: dict[str, Any] = json.loads((other / "state.json").read_text())
    state["shard"]["environment"]["torch"] = "1.0"
    (other / "state.json").write_text(json.dumps(state))
    refused = _run("merge", shards[0], other, shards[2], "--out", tmp_path / "merged")
    assert (refused.exit_code, "version of torch" in refused.output) == (5, True)


@pytest.mark.parametrize(
    ("shard", "said"),
    [("0/3", "is no shard"), ("4/3", "is no shard"), ("2", "is no shard"), ("1/8", "use at most 7 shards")],
)
def test_a_wrong_shard_is_refused(simulate: Callable[..., Result], tmp_path: Path, shard: str, said: str) -> None:
    """Before anything is attacked."""
    refused = simulate(tmp_path / "out", "--shard", shard)
    assert (refused.exit_code, said in refused.output) == (2, True)
    assert not (tmp_path / "out" / "results.json").exists()
