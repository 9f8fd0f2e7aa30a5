"""`torchrun` and `accelerate launch` over two processes: one audit, one verdict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from leakaudit.results.files import load_results
from leakaudit.results.schema import VerificationStatus

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(600)]

LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "accelerate launch": [
        "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
        "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
    ],
}  # fmt: skip
"""Name -> module and options of a launcher. Without `--multi_gpu` accelerate starts processes on CPUs by MPI only."""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_processes_are_one_audit_with_one_verdict(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update that both send is kept once, and one report is written."""
    command = [sys.executable, "-m", *LAUNCHERS[launcher], "-m", "tests.support.launched", str(tmp_path)]
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["audit", "trainer"], said[-3000:]
    results = load_results(tmp_path / "audit")
    assert [step.step for step in results.steps] == [0, 1] and not results.run.interrupted
    assert {step.verification.status for step in results.steps} == {VerificationStatus.VERIFIED}
    assert said.count("report.html") >= 1 and said.count("; report: ") == 1
