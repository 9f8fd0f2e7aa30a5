"""`make gpu` on machines whose packages are not ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.benchmarks import gpu
from tests.gpu.record import FamilyRow

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("package", "found", "said"),
    [
        ("transformers", "4.52.1", "transformers is 4.52.1, and 4.53 or newer is needed"),
        ("torch", "2.3.1+cu124", "torch is 2.3.1+cu124, and 2.4 or newer is needed"),
        ("rouge-score", None, "rouge-score is missing"),
    ],
)
def test_what_is_too_old_or_missing_is_said_with_what_to_type(
    package: str, found: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything of it is imported."""
    real = gpu._installed
    monkeypatch.setattr(gpu, "_installed", lambda name: found if name == package else real(name))
    reason = gpu.why_not()
    assert said in reason and f"-m pip install '{package}>=" in reason and reason.count("\n") == 0


def test_an_older_helper_is_tried() -> None:
    """Only torch, transformers and pytest have to be as new as is asked for."""
    assert gpu.problems({"psutil": "5.9.8"}, {"psutil": "6.0"}) == []


def test_without_a_gpu_the_command_ends_with_a_sentence(tmp_path: Path) -> None:
    """It leaves the page as it is."""
    page = tmp_path / "page.md"
    page.write_text("as it was")
    command = ["-m", "tests.benchmarks.page", str(page), "--section", "S", "--", "tests.benchmarks.gpu"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "finds no GPU; look at nvidia-smi" in done.stderr and "Traceback" not in done.stderr
    assert page.read_text() == "as it was"


def test_no_test_begins_after_the_budget() -> None:
    """It is skipped and counted."""
    times = iter([0.0, gpu.BUDGET_S - 1, gpu.BUDGET_S + 1])
    run = gpu._Run(clock=lambda: next(times))
    run.pytest_runtest_setup(None)
    with pytest.raises(pytest.skip.Exception, match="seconds are over"):
        run.pytest_runtest_setup(None)
    assert run.left_out == 1


def test_all_of_it_takes_at_most_eight_minutes() -> None:
    """A test that begins at the last moment ends in time."""
    assert gpu.BUDGET_S + gpu.MOST_S < 8 * 60


def test_failed_tests_are_named_and_counted() -> None:
    """A failure before the test itself counts, too."""
    run = gpu._Run()
    reports: list[Any] = [
        SimpleNamespace(when="setup", outcome="passed", nodeid="a::one"),
        SimpleNamespace(when="call", outcome="passed", nodeid="a::one"),
        SimpleNamespace(when="setup", outcome="failed", nodeid="a::two"),
    ]
    for report in reports:
        run.pytest_runtest_logreport(report)
    assert run.counts == {"passed": 1, "failed": 1, "skipped": 0} and run.failed == ["two"]


def test_a_row_of_the_table() -> None:
    """A family without an attack on texts has a dash."""
    row = FamilyRow("T5", "tf32", 50, (50, 49), (1e-3, 2e-3), 0, (0, 0), (0.0, 0.0))
    assert gpu.table([row])[-1] == "| T5 | tf32 | 50 | 50 / 49 | 1.0e-03 / 2.0e-03 | - | - | - |"
