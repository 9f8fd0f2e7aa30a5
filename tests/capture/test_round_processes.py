"""One audit of rounds over several processes: in turn, at once, one killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from leakaudit.results.files import load_results
from leakaudit.storage.rounds_file import read_rounds

PATIENCE_S = 120.0
"""After which a test fails; a side process needs seconds to start, and tests share the processor."""


def client(folder: Path, times: int, *flags: str, **more: Any) -> subprocess.Popen[str]:
    """Start a client that trains some rounds."""
    command = [sys.executable, "-m", "tests.support.round_client", str(folder), str(times), json.dumps(more), *flags]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def trained(process: subprocess.Popen[str]) -> list[str]:
    """Wait for the next round of a client; return its folder and number."""
    assert process.stdout is not None
    return process.stdout.readline().split()


def until(condition: Callable[[], bool]) -> None:
    """Wait for something, but not forever."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def test_a_process_for_each_round_continues_the_audit_of_the_one_before(tmp_path: Path) -> None:
    """Flower may start a process for each message; with `rounds` the audit goes on.

    The first process does not wait for the attacks, and the worker outlives it.
    """
    first = client(tmp_path, 1, rounds=2)
    assert trained(first)[1] == "0"
    _, said = first.communicate(timeout=PATIENCE_S)
    assert "1 of 2 rounds so far" in said
    second = client(tmp_path, 1, rounds=2)
    assert trained(second)[1] == "1"
    _, said = second.communicate(timeout=PATIENCE_S)
    assert "continues the audit there at round 1" in said and "report.html" in said
    results = load_results(tmp_path / "audit")
    assert [step.step for step in results.steps] == [0, 1] and not results.run.interrupted
    assert (tmp_path / "audit" / "worker.log").read_text().count("computes on") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["audit"]


def test_processes_that_live_at_the_same_time_share_the_audit_and_the_last_one_ends_it(tmp_path: Path) -> None:
    """Clients of a simulation run in several processes, and may move between them."""
    one = client(tmp_path, 2)
    assert trained(one)[1] == "0"
    other = client(tmp_path, 1)
    assert trained(other)[1] == "1"
    _, said = other.communicate(timeout=PATIENCE_S)
    assert "verdict" not in said and not (tmp_path / "audit" / "spool" / "finished.json").exists()
    out, said = one.communicate("go\n", timeout=PATIENCE_S)
    assert out.split()[-1] == "2" and "report.html" in said
    results = load_results(tmp_path / "audit")
    assert [step.step for step in results.steps] == [0, 1, 2] and not results.run.interrupted
    assert read_rounds(tmp_path / "audit" / "spool").totals.kept == 3


def test_a_killed_client_leaves_a_worker_that_writes_the_results(tmp_path: Path) -> None:
    """The actor of a simulation may be killed at its end; nothing is lost."""
    process = client(tmp_path, 2)
    assert trained(process)[1] == "0"
    until(lambda: any((tmp_path / "audit" / "spool").glob("*.held")))
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    log = tmp_path / "audit" / "worker.log"
    until(lambda: (tmp_path / "audit" / "report.html").is_file() and "results.json and report.html" in log.read_text())
    results = load_results(tmp_path / "audit")
    assert [step.step for step in results.steps] == [0] and results.run.interrupted


def test_a_client_that_fails_does_not_wait_for_the_attacks(tmp_path: Path) -> None:
    """After an exception the program ends, and the side process continues alone."""
    process = client(tmp_path, 1, "--crash")
    trained(process)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert "the client failed" in said and "the side process continues alone" in said
    until(lambda: (tmp_path / "audit" / "report.html").is_file())


def test_encrypted_rounds_of_a_second_process_get_a_folder_of_their_own(tmp_path: Path) -> None:
    """Only the first process has the key that its worker reads with; one line says so."""
    from leakaudit.storage.encryption import new_identity

    key = new_identity()[0]
    one = client(tmp_path, 2, encrypt_to=[key], schedule="deferred", at_end="leave")
    assert trained(one)[0].endswith("audit")
    other = client(tmp_path, 1, encrypt_to=[key], schedule="deferred", at_end="leave")
    folder = trained(other)[0]
    _, said = other.communicate(timeout=PATIENCE_S)
    assert folder.endswith(f"audit.client-{other.pid}") and f"audit.client-{other.pid}" in said
    one.communicate("go\n", timeout=PATIENCE_S)
    assert read_rounds(tmp_path / "audit" / "spool").totals.kept == 2
