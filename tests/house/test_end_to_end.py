"""From a Trainer to a report, and through every accident.

The callback, the side process and the attacks are the real ones.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from leakaudit.audit.worker import run_worker
from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.config.audit import PluginSpec
from leakaudit.results.files import load_results
from leakaudit.results.journal import load_journal
from leakaudit.results.schema import AttemptStatus, VerificationStatus
from tests.support import tiny
from tests.support.endless import ENDLESS
from tests.support.processes import alive, until
from tests.support.spools import AFTER_AN_AUDIT
from tests.support.tiny_trainer import TEXTS, audit_config, make_trainer

ROOT = Path(__file__).parents[2]
PRIVATE = ("dog", "bird", "horse", "river", "cats", "fish", "chased")
"""Words of the training texts that no text of ours has."""


class Wait(TrainerCallback):
    """Holds training until a condition is met, as a slow model would.

    It stops waiting after a while.
    """

    def __init__(self, step: int, condition: Callable[[], bool]) -> None:
        self.step, self.condition = step, condition

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        deadline = time.monotonic() + 60
        while state.global_step == self.step and not self.condition() and time.monotonic() < deadline:
            time.sleep(0.05)


def test_a_run_is_audited_to_a_report_that_keeps_the_secret(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Two steps are kept and attacked during training, and one leaks.

    At least one of their two sentences is recovered word for word, the verdict fails, and no private word is in a log, a file
    name, the results or the masked report.
    """
    audit = LeakAuditCallback(audit_config(tmp_path, every_n_steps=4, max_snapshots=2, min_tokens=3))
    spool = tmp_path / "audit" / "spool"
    slow = Wait(4, lambda: spool.is_dir() and (tmp_path / "audit" / "journal.jsonl").exists() and not busy(spool))
    trainer = make_trainer(
        tmp_path, audit, slow, per_device_train_batch_size=1, max_steps=6, logging_strategy="steps", logging_steps=1
    )
    audit.attach(trainer)
    trainer.train()

    folder = audit.folder
    assert folder is not None
    results = load_results(folder)
    assert [record.step for record in results.steps] == [0, 4]
    assert {record.verification.status for record in results.steps} == {VerificationStatus.VERIFIED}
    assert [a.status for a in results.attempts] == [AttemptStatus.RAN] * 4
    summaries = {summary.attack: summary for summary in results.summaries}
    assert summaries["span"].scores["exact"] >= 0.5
    assert summaries["embedding-rows"].scores.get("token_recall") == 1.0
    assert results.controls.positive is not None and results.controls.positive.n == 1
    assert results.coverage.total_steps == 6 and results.overhead.blocked_s > 0.0
    assert json.loads((folder / "verdict.json").read_text())["verdict"] == "FAIL"
    logged = [entry["leakaudit/span/exact"] for entry in trainer.state.log_history if "leakaudit/step" in entry]
    assert sum(logged) / 2 == summaries["span"].scores.get("exact")

    left = sorted(path.name for path in spool.iterdir())
    assert left == AFTER_AN_AUDIT
    said = capfd.readouterr()
    assert re.search(
        rf"leakaudit: FAIL: [12] of [12] steps? leaked a sentence; report: {folder}/report.html\n", said.err
    )
    assert "leakaudit: 2 steps kept; training was held up for " in said.err
    words = re.compile(rf"\b({'|'.join(PRIVATE)})\b")
    assert not words.search(said.err + caplog.text)
    ids = [str(list(tiny.bert_tokenizer()(text)["input_ids"]))[1:-1] for text in TEXTS]
    for path in (p for p in folder.rglob("*") if p.is_file() and "tokenizer" not in p.parts):
        text = path.read_text()
        assert not words.search(path.name) and not words.search(text), path
        assert not any(one in text or one.replace(" ", "") in text for one in ids), path
    for path in folder.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path


def busy(spool: Path) -> bool:
    """Return whether a snapshot is in flight."""
    return any(path.suffix in (".tmp", ".ready", ".run") for path in spool.iterdir())


def test_a_worker_killed_during_training_is_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next step notices, the attempt is repeated, training does not.

    The endless attack makes sure that the worker still holds the snapshot when it is killed.
    """
    attacks = (PluginSpec(name="embedding-rows"), PluginSpec(name="span"), ENDLESS)
    audit = LeakAuditCallback(audit_config(tmp_path, every_n_steps=100, controls=0, attacks=attacks, budget_s=8.0))
    killed: list[int] = []

    def kill() -> bool:
        """Kill the worker as soon as it has claimed the snapshot."""
        if list((tmp_path / "audit" / "spool").glob("*.run")):
            assert audit._run is not None and audit._run.side._process is not None
            killed.append(audit._run.side._process.pid)
            os.kill(killed[0], signal.SIGKILL)
            audit._run.side._process.wait(timeout=60)
        return bool(killed)

    trainer = make_trainer(tmp_path, audit, Wait(3, kill), max_steps=5)
    audit.attach(trainer)
    seen: list[int] = []
    trainer.add_callback(Watch(audit, seen))
    trainer.train()
    assert trainer.state.global_step == 5
    assert killed and seen[-1] != killed[0], "started again during training, not only at its end"
    assert "side process died while it attacked snapshot 000000; starting it again" in caplog.text
    results = load_results(tmp_path / "audit")
    attempts = {attempt.attack.partition("(")[0]: attempt.status for attempt in results.attempts}
    assert attempts == {
        "embedding-rows": AttemptStatus.RAN,
        "span": AttemptStatus.RAN,
        "tag": AttemptStatus.BUDGET_EXHAUSTED,
    }
    assert len(load_journal(tmp_path / "audit" / "journal.jsonl")) == 3


class Watch(TrainerCallback):
    """Notes which side process is there at the end of each step."""

    def __init__(self, audit: LeakAuditCallback, seen: list[int]) -> None:
        self.audit, self.seen = audit, seen

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run = self.audit._run
        if run is not None and run.side._process is not None:
            self.seen.append(run.side._process.pid)


TRAINER = """
import signal, sys, time
from pathlib import Path
from transformers import TrainerCallback
from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.config.audit import PluginSpec
from tests.support.tiny_trainer import audit_config, make_trainer

class Slow(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.05)
        run = audit._run
        if run is not None and run.side._process is not None and not hasattr(self, "said"):
            self.said = print(run.side._process.pid, flush=True)

signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal; tests run in the background inherit deafness
folder = Path(sys.argv[1])
audit = LeakAuditCallback(audit_config(folder, controls=0, every_n_steps=10, max_snapshots=5))
trainer = make_trainer(folder, audit, Slow(), max_steps=100_000)
audit.attach(trainer)
trainer.train()
"""
"""Trains for ever and prints the worker's process id."""


@contextmanager
def training(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yield a training process whose worker is at work, and the worker's id."""
    with (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    worker = 0
    try:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        until((folder / "audit" / "journal.jsonl").exists)
        yield process, worker
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=60)
        if worker and alive(worker):
            os.kill(worker, signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_killed_trainer_takes_its_worker_along(tmp_path: Path) -> None:
    """Within three seconds; what was finished is in the journal."""
    with training(tmp_path) as (process, worker):
        process.kill()
        until(lambda: not alive(worker), seconds=15.0)  # three on an idle machine
    assert load_journal(tmp_path / "audit" / "journal.jsonl")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_ctrl_c_in_the_trainer_leaves_no_orphan_and_no_torn_snapshot(tmp_path: Path) -> None:
    """The trainer ends as without an audit, and says how to continue.

    A worker started by hand continues.
    """
    with training(tmp_path) as (process, worker):
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) != 0
        until(lambda: not alive(worker), seconds=15.0)  # three on an idle machine
    said = (tmp_path / "stderr").read_text()
    assert "KeyboardInterrupt" in said
    assert "training ended with KeyboardInterrupt" in said and "leakaudit worker" in said
    spool = tmp_path / "audit" / "spool"
    assert not list(spool.glob("*.tmp"))
    assert run_worker(spool) == 0
    results = load_results(tmp_path / "audit")
    assert results.run.interrupted
    assert {a.status for a in results.attempts} == {AttemptStatus.RAN}
    assert not busy(spool)
