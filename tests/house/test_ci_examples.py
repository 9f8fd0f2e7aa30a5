"""The shell steps of the examples for CI run, and stop a release that leaks."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from leakaudit.reports.bundle_check import check_bundle
from leakaudit.results.files import to_json, with_digest
from tests.support.factories import audit

ROOT = Path(__file__).parents[2]
CI = ROOT / "examples" / "ci"
POLICY = (
    "schema: leakaudit.policy/1\nname: n\nevidence: {max_age: 3650d}\n"
    "rules: [{id: sentence-rate, event: exact_sentence, max_rate: 0.05}]\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a policy and programs that stand for those of the runner."""
    (tmp_path / "policy.yaml").write_text(POLICY)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (
        ("leakaudit", f'exec "{sys.executable}" -m leakaudit "$@"'),
        ("python", 'test "$1 $2 $3" = "-m pip install"'),
        ("huggingface-cli", 'echo "uploaded $*"'),
    ):
        file = programs / name
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def run_of(folder: Path, leaks: int, clean: int) -> str:
    """Write the results of a run, and return its folder."""
    run = folder / "run"
    run.mkdir()
    (run / "results.json").write_text(json.dumps(to_json(with_digest(audit(leaks, clean)))))
    return str(run)


def shell(folder: Path, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a step as a runner does: bash that stops at the first error."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
        "GITHUB_OUTPUT": str(folder / "output"),
        **variables,
    }
    return subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


CASES = [(60, 0, 3, "FAIL"), (0, 3, 4, "INCONCLUSIVE"), (0, 60, 0, "PASS")]


@pytest.mark.parametrize(("leaks", "clean", "code", "word"), CASES)
def test_the_steps_of_the_action_judge_and_show(folder: Path, leaks: int, clean: int, code: int, word: str) -> None:
    """The last step's code is the verdict; summary, outputs and JUnit are there."""
    action: dict[str, Any] = yaml.safe_load((CI / "github" / "action.yml").read_text())
    install, judge, evidence = action["runs"]["steps"]
    given = {"RUN": run_of(folder, leaks, clean), "POLICY": "policy.yaml", "POLICY_REF": "", "WAIVERS": ""}
    for step in (judge, evidence):
        assert set(step["env"]) == set(given) and "${{" not in step["run"]
    assert shell(folder, install["run"]).returncode == 0
    done = shell(folder, judge["run"], **given)
    assert done.returncode == code, done.stdout + done.stderr
    assert f"### leakaudit: {word}" in (folder / "summary.md").read_text()
    told = dict(line.split("=", 1) for line in (folder / "output").read_text().splitlines())
    assert told["verdict"] == word and set(action["outputs"]) <= set(told)
    assert ElementTree.parse(folder / "leakaudit.xml").getroot().tag == "testsuites"
    assert ("::error file=policy.yaml,line=4," in done.stdout) is (code != 0)
    assert evidence["if"] == "always()" and shell(folder, evidence["run"], **given).returncode == 0
    assert check_bundle(folder / "leakaudit-evidence.zip").problems == []


@pytest.mark.parametrize(("leaks", "clean", "code", "word"), CASES)
def test_the_job_of_gitlab_ends_with_the_verdict(folder: Path, leaks: int, clean: int, code: int, word: str) -> None:
    """Its artefacts are written whatever the verdict is."""
    job: dict[str, Any] = yaml.safe_load((CI / "gitlab.yml").read_text())["leakaudit"]
    variables = {"LEAKAUDIT_RUN": run_of(folder, leaks, clean), "LEAKAUDIT_POLICY": "policy.yaml"}
    assert variables.keys() == job["variables"].keys()
    done = shell(folder, "\n".join(job["script"]), **variables)
    assert shell(folder, "\n".join(job["after_script"]), **variables).returncode == 0
    assert done.returncode == code, done.stdout + done.stderr
    assert job["artifacts"]["when"] == "always"
    for name in (*job["artifacts"]["paths"], job["artifacts"]["reports"]["junit"]):
        assert (folder / name).is_file()
    assert word in (folder / "leakaudit.md").read_text()


@pytest.mark.parametrize(("leaks", "clean", "code", "word"), CASES)
def test_a_model_is_uploaded_only_if_the_gate_passes(
    folder: Path, leaks: int, clean: int, code: int, word: str
) -> None:
    """INCONCLUSIVE stops the upload as FAIL does."""
    run = run_of(folder, leaks, clean)
    (folder / "model").mkdir()
    (folder / "model" / "model.bin").write_bytes(b"weights")
    done = shell(folder, f'"{CI / "publish.sh"}" "{run}" policy.yaml org/model ./model')
    assert done.returncode == code and word in done.stdout
    assert ("uploaded upload org/model ./model" in done.stdout) is (code == 0)
