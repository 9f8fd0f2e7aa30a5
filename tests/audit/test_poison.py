"""An attempt or a snapshot that kills every worker costs itself only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from leakaudit.capture.worker import restarts as worker_restarts
from leakaudit.capture.worker.process import SideProcess
from leakaudit.config.audit import PluginSpec
from leakaudit.gate.evaluate import evaluate
from leakaudit.gate.policy import default_policy
from leakaudit.gate.verdict import Status
from leakaudit.results.files import load_results
from leakaudit.results.schema import AttemptStatus
from leakaudit.storage.attempt_deaths import DEATHS, MAX_DEATHS, STARTED, AttemptDeaths
from leakaudit.storage.spool import Spool
from tests.audit.test_worker import make, names
from tests.support import tiny
from tests.support.endless import ENDLESS
from tests.support.snapshots import write_step

DEADLY = 13
"""Bound of the batch size by which the attack below knows a deadly step."""

PLUGIN = f"""
import ctypes, os, signal
from dataclasses import dataclass
from typing import ClassVar
from leakaudit.plugins.attack_protocol import APPLIES, Reconstruction
from leakaudit.registry import attack

KINDS = {{
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "exit 0": lambda: os._exit(0),
    "exit 1": lambda: os._exit(1),
    "exit 2": lambda: os._exit(2),
    "exit 5": lambda: os._exit(5),
}}

@attack("poisoned")
@dataclass(frozen=True)
class Poisoned:
    goal: ClassVar[str] = "words"
    source: ClassVar[str] = "a test"
    threat_model: ClassVar[str] = "sees nothing"
    kind: str = ""

    def applies(self, seen):
        return APPLIES

    def __call__(self, seen, rng, budget):
        if seen.facts.batch_size_bound == {DEADLY}:
            KINDS[self.kind]()
        return Reconstruction(tokens=(7,))
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install an attack for the side process, not for this one."""
    folder = tmp_path / "plugin"
    info = folder / "poisoned-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "poisoned.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: poisoned\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[leakaudit.plugins]\npoisoned = poisoned\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])


def put(spool: Spool, number: int, *, deadly: bool) -> None:
    """Write a snapshot."""
    bound: dict[str, Any] = {"batch_size_bound": DEADLY} if deadly else {}
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), ["the old dog chased a cat ."], [1], **bound)
    write_step(spool.snapshot_folder(number), step, number)


def poisoned(folder: Path, kind: str, deadly: set[int], steps: int, **more: Any) -> tuple[Spool, SideProcess]:
    """Return a spool in which some snapshots kill their worker.

    Also return the trainer's side of the worker.
    """
    attacks = (
        PluginSpec(name="embedding-rows"),
        PluginSpec(name="poisoned", options={"kind": kind}),
        PluginSpec(name="llg"),
    )
    spool = make(folder, attacks=attacks, wait_at_end_s=240.0, **more)
    for number in range(steps):
        put(spool, number, deadly=number in deadly)
    return spool, SideProcess(spool)


@pytest.mark.parametrize("kind", ["killed", "segfault", "exit 0", "exit 2"])
def test_an_attempt_that_kills_workers_is_an_error_and_the_rest_of_its_step_is_audited(
    tmp_path: Path, plugin: None, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the exit code of the process, and also what comes after it."""
    spool, side = poisoned(tmp_path, kind, {1}, 3)
    side.wait_or_detach()
    side.stop()
    results = load_results(tmp_path / "audit")
    attempts = {(a.step, a.attack.partition("(")[0]): a for a in results.attempts}
    deadly = attempts.pop(("st-000001", "poisoned"))
    assert deadly.status is AttemptStatus.ERROR
    assert deadly.reason.startswith(f"{MAX_DEATHS} side processes died during this attempt")
    assert {a.status for a in attempts.values()} == {AttemptStatus.RAN} and len(attempts) == 8
    assert not [missing for missing in results.coverage.not_tested if missing.what == "step 1"]
    assert (tmp_path / "audit" / "report.html").is_file()
    assert names(spool) == [] and not side.given_up
    assert "died" not in capsys.readouterr().err.replace("worker died", "")


def test_many_deadly_snapshots_do_not_use_up_the_patience_for_the_others(tmp_path: Path, plugin: None) -> None:
    """Each attempt counts its own deaths; a gate counts it as lost, never as clean."""
    spool, side = poisoned(tmp_path, "exit 1", {0, 2}, 4)
    side.wait_or_detach()
    side.stop()
    results = load_results(tmp_path / "audit")
    ran = {a.step for a in results.attempts if a.attack.startswith("poisoned") and a.status is AttemptStatus.RAN}
    assert ran == {"st-000001", "st-000003"}
    assert [step.step for step in results.steps] == [0, 1, 2, 3]
    assert names(spool) == []


def test_a_worker_that_dies_over_nothing_is_still_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody could be charged with it."""
    spool = make(tmp_path, 1)
    side = SideProcess(spool)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    for _ in range(worker_restarts.RESTARTS + 1):
        assert side.ensure()
        assert side._process is not None
        side._process.wait(timeout=60)
    assert not side.ensure() and side.given_up
    assert "the side process died 3 times" in capsys.readouterr().err
    side.stop()


def test_a_counter_that_cannot_be_written_does_not_start_workers_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer counts for itself."""
    spool = make(tmp_path, 1)
    claimed = spool.queue.claim()
    assert claimed is not None
    side = SideProcess(spool)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    started = 0
    while side.ensure():
        started += 1
        assert side._process is not None and started < 20
        side._process.wait(timeout=60)
    assert side.given_up
    side.stop()


@pytest.mark.parametrize("junk", ["", "[", "null", "[1, 2]", '[["a", "b", "c", "two"], ["st", 2]]', '{"a": 1}'])
def test_a_note_that_cannot_be_read_charges_nobody(tmp_path: Path, junk: str) -> None:
    """A dead worker that may have been in an attempt is then charged to the snapshot."""
    (tmp_path / STARTED).write_text(junk)
    (tmp_path / DEATHS).write_text(junk)
    deaths = AttemptDeaths(tmp_path)
    assert deaths.started() == () and not deaths.charge()
    assert deaths.of(("a", "b", "c")) == 0


def test_only_a_process_that_dies_in_an_attempt_leaves_a_note(tmp_path: Path) -> None:
    """Neither an exception nor Ctrl-C is a death."""
    deaths, attempt = AttemptDeaths(tmp_path), ("st-000001", "span", "none")
    noted: list[tuple[str, ...]] = []

    def interrupted() -> None:
        with deaths.during(attempt):
            noted.append(deaths.started())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert noted == [attempt]
    assert not deaths.charge() and deaths.of(attempt) == 0
    for number in range(1, MAX_DEATHS + 1):
        assert not deaths.deadly(attempt)
        (tmp_path / STARTED).write_text(json.dumps(attempt))
        assert deaths.charge() and deaths.of(attempt) == number
    assert deaths.deadly(attempt) and not deaths.deadly(("st-000002", "span", "none"))


def test_workers_that_are_killed_at_random_moments_lose_no_step_and_repeat_nothing(tmp_path: Path) -> None:
    """Twenty SIGKILLs, at moments drawn from a fixed seed."""
    steps, kills = range(20), 20
    spool = make(
        tmp_path, *steps, attacks=(PluginSpec(name="embedding-rows"), PluginSpec(name="llg"), ENDLESS), budget_s=0.8
    )
    journal = tmp_path / "audit" / "journal.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.killed_workers", str(spool.root), str(kills), str(journal)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    died = json.loads(done.stdout.splitlines()[-1])
    assert died["kills"] == kills and died["changed"] == 0
    results = load_results(tmp_path / "audit")
    assert [step.step for step in results.steps] == list(steps)
    assert not [missing for missing in results.coverage.not_tested if missing.what.startswith("step ")]
    made = [(a.step, a.attack, a.defense) for a in results.attempts]
    assert len(made) == len(set(made)) == 3 * len(steps)
    assert all(a.status is not AttemptStatus.ERROR or "died during this attempt" in a.reason for a in results.attempts)
    assert sum(a.status is AttemptStatus.ERROR for a in results.attempts) <= kills // MAX_DEATHS
    assert names(spool) == []


def test_a_step_that_nobody_could_open_is_lost_to_the_gate(tmp_path: Path) -> None:
    """Also where not even its batch is known."""
    from datetime import UTC, datetime

    from leakaudit.audit.worker import run_worker
    from leakaudit.client.snapshot import TRUTH

    spool = make(tmp_path, *range(30))
    for number in range(15, 30):
        os.truncate(spool.snapshot_folder(number) / TRUTH, 10)
    assert run_worker(spool.root) == 0
    results = load_results(tmp_path / "audit")
    assert len(results.steps) == 30 and [step.n_sequences for step in results.steps[15:]] == [0] * 15
    assert "<html" in (tmp_path / "audit" / "report.html").read_text()
    verdict = evaluate(results, default_policy(), now=datetime.now(UTC))
    assert verdict.verdict is not Status.PASS
    assert any(rule.lost + rule.unjudged >= 15 for rule in verdict.rules), verdict.sentence
