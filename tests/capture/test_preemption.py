"""A job that is ended with SIGTERM leaves results of what is finished.

The trainer is a real process with its own side process, and with the signal's default action or the user's handler.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from leakaudit.cli import main
from leakaudit.results.files import load_results
from leakaudit.results.journal import load_journal
from leakaudit.storage.spool import Spool
from tests.support.processes import alive, until

ROOT = Path(__file__).parents[2]
PREEMPTED = 75
"""Exit code that the user's handler asks for."""

TRAINER = f"""
import signal, sys, time
from pathlib import Path
import torch
from leakaudit.callbacks.torch_loop import watch
from tests.support import tiny

folder, handler, waits = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "waiting"

def preempted(number, frame):
    raise SystemExit({PREEMPTED})

if handler == "own":
    signal.signal(signal.SIGTERM, preempted)
before = signal.getsignal(signal.SIGTERM)
tokenizer, model = tiny.bert_tokenizer(), tiny.bert().train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
attacks = [{{"name": "embedding-rows"}}, {{"name": "tag", "options": {{"steps": 10_000_000, "patience": 0}}}}]
config = {{
    "out_dir": str(folder / "audit"), "every_n_steps": 1, "max_snapshots": 2, "attacks": attacks, "controls": 0,
    "device": "cpu", "budget_s": 3600, "wait_at_end_s": 500,
}}
with watch(model, optimizer, tokenizer=tokenizer, config=config) as audit:
    for step in range(3 if waits else 10**9):
        model(**tokenizer(["the old dog"], return_tensors="pt"), labels=torch.tensor([0])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step < 3:
            audit._run.recorder.written()
        else:
            time.sleep(0.02)
        if step == 2:
            assert signal.getsignal(signal.SIGTERM) is before
            print(audit._run.side.pid, flush=True)
"""
"""Keeps two steps; then it trains for ever, or waits at the end of training.

The second attack on each step may take an hour, so that it never finishes, however slow the machine is.
"""


@contextmanager
def trainer(folder: Path, handler: str, moment: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yield a trainer whose worker has finished an attempt, and the worker's id."""
    with (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(folder), handler, moment],
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
        if moment == "waiting":
            until((folder / "audit" / "spool" / "finished.json").exists)
        yield process, worker
    finally:
        for pid in filter(None, (process.pid, worker)):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=60)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("moment", ["training", "waiting"])
@pytest.mark.parametrize("handler", ["default", "own"])
def test_sigterm_leaves_results_of_what_is_finished_that_say_so(tmp_path: Path, handler: str, moment: str) -> None:
    """The trainer ends as without an audit; the log says how the rest goes on."""
    folder = tmp_path / "audit"
    with trainer(tmp_path, handler, moment) as (process, worker):
        finished = load_journal(folder / "journal.jsonl")
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
        until(lambda: not alive(worker), seconds=30.0)
    assert code == (PREEMPTED if handler == "own" else -signal.SIGTERM)
    results = load_results(folder)
    assert results.run.interrupted
    assert {a.attack.partition("(")[0] for a in results.attempts} == {"embedding-rows"} and finished
    assert (folder / "report.html").is_file()
    gate = CliRunner().invoke(main, ["gate", str(folder)])
    assert gate.exit_code in (3, 4), gate.output  # a leak that was found, or too few steps
    assert "Training or audit was interrupted" in " ".join(gate.output.split())
    log = (tmp_path / "stderr").read_text() + (folder / "worker.log").read_text()
    assert f"`leakaudit worker {folder}" in log
    spool = Spool(folder / "spool")
    assert len(spool.entries()) == 2, "private batches stay for that command"
    with spool.worker_lock():
        assert not any(spool.queue.attempts.of((a.step, "tag", "none")) for a in results.attempts)
        assert {path.suffix for path in spool.entries()} == {".ready"}
    assert not (folder / "spool" / "attempt_deaths.json").exists(), "the end of the trainer is nobody's death"
