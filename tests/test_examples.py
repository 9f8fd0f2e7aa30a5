"""Every script in `examples/` runs as its head says, and each step it keeps carries the stamp it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_packaging import ROOT

STAMPS = {
    "with_accelerate": {"verified"},
    "with_classifier": {"verified"},
    "with_fedavg": {"verified"},
    "with_lightning": {"verified"},
    "with_opacus": {"noised"},
    "with_torch": {"verified"},
    "with_trainer": {"verified"},
}
"""Script -> stamps of the steps it keeps."""


@pytest.mark.parametrize("name", STAMPS)
def test_a_script_for_a_stack_runs_and_its_steps_are_what_was_sent(name: str, tmp_path: Path) -> None:
    """With a side process of its own, to a report."""
    done = subprocess.run(  # its output is looked at below
        [sys.executable, f"examples/{name}.py", "--out", str(tmp_path / "audit"), "--steps", "2"],
        cwd=ROOT,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads((tmp_path / "audit" / "results.json").read_text())
    assert {step["verification"]["status"] for step in results["steps"]} == STAMPS[name], results["steps"]
    assert (tmp_path / "audit" / "report.html").is_file()


def test_every_stack_has_its_script() -> None:
    """And no script is left untested."""
    scripts = {path.stem for path in (ROOT / "examples").glob("with_*.py")}
    assert scripts == set(STAMPS)
