"""`leakaudit gate` on several runs: what it reads, writes and shows."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from leakaudit.cli import main
from leakaudit.results.files import to_json
from leakaudit.results.schema import Results
from tests.support.pooled import small_run, small_runs

AT = ("--at", "2026-11-02T12:00")
"""Two hours after the audits."""


def run(*arguments: object, at: tuple[str, ...] = AT) -> Result:
    return CliRunner().invoke(main, ["gate", *map(str, arguments), *at], catch_exceptions=False)


def write(folder: Path, found: Results) -> Path:
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(to_json(found)), encoding="utf-8")
    return folder


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(
        "schema: leakaudit.policy/1\nname: sentences\nrules:\n"
        "  - id: sentence-rate\n    event: exact_sentence\n    max_rate: 0.05\n"
    )
    return path


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Write six runs of ten clean steps; the working folder is another one."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return [write(tmp_path / "jobs" / f"job-{number}", found) for number, found in enumerate(small_runs(6))]


def test_six_jobs_pass_where_one_is_undecided(policy: Path, jobs: list[Path]) -> None:
    """The verdict of several is a file of its own; that of one run stays where it was."""
    assert run(jobs[0], "--policy", policy).exit_code == 4
    own = (jobs[0] / "verdict.json").read_bytes()
    done = run(*jobs, "--policy", policy)
    assert done.exit_code == 0, done.output
    assert "run run-3: 10 steps, alone INCONCLUSIVE" in done.stdout
    assert json.loads(Path("pooled_verdict.json").read_text())["steps"] == 60
    assert (jobs[0] / "verdict.json").read_bytes() == own and not (jobs[1] / "verdict.json").exists()


def test_all_takes_every_run_below_a_folder(policy: Path, jobs: list[Path]) -> None:
    """Nobody chooses: a run that leaked and a run that was not audited are among them."""
    below = jobs[0].parent
    assert run("--all", below, "--policy", policy).exit_code == 0
    leaking = write(below / "deep" / "job", small_run("leaking", 500, 5, leaks=10))
    assert run("--all", below, "--policy", policy).exit_code == 3
    (leaking / "results.json").unlink()
    (leaking / "not_audited.json").write_text("{}")
    done = run("--all", below, "--policy", policy)
    assert done.exit_code == 5 and "was not audited" in done.stdout


def test_an_unreadable_run_is_an_error_and_removes_the_earlier_verdict(policy: Path, jobs: list[Path]) -> None:
    """The other five do not pass without it."""
    assert run(*jobs, "--policy", policy).exit_code == 0
    (jobs[2] / "results.json").write_text("{}")
    done = run(*jobs, "--policy", policy, "-q")
    assert done.exit_code == 5 and "job-2" in done.stdout
    assert json.loads(Path("pooled_verdict.json").read_text())["verdict"] == "ERROR"


def test_wrong_calls_are_named(policy: Path, jobs: list[Path], tmp_path: Path) -> None:
    """Exit code 2, and no file of a run is overwritten."""
    for arguments, said in (
        ((), "name a run, or a folder of runs with --all"),
        ((jobs[0], "-o", "x.json"), "--out is for several runs"),
        ((jobs[0], "--despite", "data"), "--despite is for several runs"),
        ((*jobs, "--despite", "defence"), "did you mean 'defenses'"),
        ((*jobs, "-o", jobs[0] / "verdict.json"), "is a file of one run"),
        ((*jobs, "-o", jobs[0] / "results.json"), "is a file of one run"),
        (("--all", Path()), "no run is below this folder"),
    ):
        done = run(*arguments, "--policy", policy)
        assert done.exit_code == 2 and said in done.output, arguments
    assert (jobs[0] / "results.json").stat().st_size > 100


def test_other_keys_end_with_4_and_despite_pools_them(policy: Path, jobs: list[Path], tmp_path: Path) -> None:
    """The sentence has both devices, and says so where the option allows it."""
    other = small_run("cpu-less", 500, run={"environment": {"device": "cuda"}})
    jobs.append(write(tmp_path / "jobs" / "other", other))
    done = run(*jobs, "--policy", policy, "-q")
    assert done.exit_code == 4 and "'cuda', the others 'cpu'" in done.stdout and "--despite hardware" in done.stdout
    done = run(*jobs, "--policy", policy, "--despite", "hardware", "-q")
    assert done.exit_code == 0 and "differ in the device" in done.stdout


def test_every_output_shows_the_runs(policy: Path, jobs: list[Path]) -> None:
    """JUnit, summary and statement name the runs."""
    Path("model.bin").write_bytes(b"weights")
    outputs = ("--junit", "j.xml", "--summary", "s.md", "--attestation", "a.json", "--artifact", "model.bin")
    done = run(
        *jobs,
        "--policy",
        policy,
        *outputs,
        "--sarif",
        "s.sarif",
        "--cyclonedx",
        "c.json",
        "--github",
        "--badge",
        "b.json",
        at=(),
    )
    assert done.exit_code == 4, "judged today, the runs are too old"
    properties = {one.get("name"): one.get("value") for one in ElementTree.parse("j.xml").iter("property")}
    assert properties["run"] == "6 runs" and "run run-5: 10 steps" in (properties["runs"] or "")
    summary = Path("s.md").read_text()
    assert "6 runs, 60 steps audited." in summary and "run run-5: 10 steps, alone INCONCLUSIVE" in summary
    statement = json.loads(Path("a.json").read_text())
    names = [one["name"] for one in statement["predicate"]["configuration"]]
    assert names == ["policy", *(f"results.json of run-{number}" for number in range(6))]
    document = json.loads(run(*jobs, "--policy", policy, "--json").stdout)
    assert [one["run"] for one in document["runs"]] == [f"run-{number}" for number in range(6)]


def test_a_verdict_that_cannot_be_kept_where_the_caller_wants_it_is_an_error(policy: Path, jobs: list[Path]) -> None:
    """Wrong: exit code 0 without a word and without the file."""
    done = run(*jobs, "--policy", policy, "--out", "nowhere/v.json")
    assert done.exit_code == 5 and "v.json was not written" in done.stderr
    assert run(*jobs, "--policy", policy).exit_code == 0


@pytest.mark.parametrize("option", ["--out", "--junit", "--summary"])
def test_a_file_that_is_read_is_not_overwritten(option: str, policy: Path, jobs: list[Path]) -> None:
    """Wrong: the policy is gone."""
    text = policy.read_text()
    done = run(*jobs, "--policy", policy, option, policy)
    assert done.exit_code == 2 and "this file is read here" in done.stderr
    assert policy.read_text() == text
