"""A night that runs a training and audits the steps that its callback kept."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from click.testing import CliRunner, Result

from leakaudit.cli import main
from leakaudit.history.nights import History

TRAIN = """
import sys
from pathlib import Path
import torch
from leakaudit.callbacks.torch_loop import watch
from tests.support import tiny

texts = ["the nurse reads the letter", "a doctor sees two people now"] * 3
tokenizer, model = tiny.bert_tokenizer(), tiny.bert()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config = {"attacks": ["span"], "every_n_steps": 1, "controls": 0}
with watch(model, optimizer, tokenizer=tokenizer, config=config, total_steps=3):
    for step in range(3):
        batch = tokenizer(texts[step : step + 1], return_tensors="pt")
        model(**batch, labels=torch.tensor([1])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
print("trained")
"""


def _configure(place: Path, program: str, **training: Any) -> None:
    (place / "train.py").write_text(program, encoding="utf-8")
    section = {"command": [sys.executable, "train.py"]} | training
    fields = {"schema": "leakaudit.nightly/1", "training": section, "attacks": ["span"], "controls": 0}
    (place / "nightly.yaml").write_text(yaml.safe_dump(fields), encoding="utf-8")


def _night(place: Path, at: str = "2026-11-01") -> Result:
    return CliRunner().invoke(main, ["nightly", "--config", str(place / "nightly.yaml"), "--at", at])


def _folder(place: Path) -> Path:
    return place / "leakaudit-nights/nights/2026-11-01T0000Z"


@pytest.fixture(autouse=True)
def _finds_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def test_a_night_trains_audits_and_keeps_no_snapshot(tmp_path: Path) -> None:
    """The command finds its folder; its output is kept, what its callback kept is not."""
    _configure(tmp_path, TRAIN)
    done = _night(tmp_path)
    assert done.exit_code == 3, done.output
    (record,) = History.load(tmp_path / "leakaudit-nights/history").records
    assert record.status == "audited"
    assert record.steps >= 1
    printed = (_folder(tmp_path) / "training.log").read_text(encoding="utf-8")
    assert "trained" in printed
    assert "the night attacks the kept steps" in printed and "leakaudit worker" not in printed
    assert not list((tmp_path / "leakaudit-nights").rglob("snapshot.json"))


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise SystemExit(9)", "the training failed (exit code 9)"),
        ("import os; os.kill(os.getpid(), 9)", "the training failed (signal 9)"),
        ("print('no callback')", "the training kept no step; it needs the callback of leakaudit, attached"),
        ("import time; time.sleep(60)", "the training took longer than its limit of 3 s"),
    ],
)
def test_a_training_that_fails_is_a_gap_with_its_reason(tmp_path: Path, program: str, said: str) -> None:
    """The message names the file with the output."""
    _configure(tmp_path, program, time_limit="3s")
    done = _night(tmp_path)
    assert done.exit_code == 5
    assert said in done.stderr
    assert "training.log" in done.stderr
    (record,) = History.load(tmp_path / "leakaudit-nights/history").records
    assert (record.status, record.reason) == ("gap", f"the steps could not be made: {said}")


def test_a_training_that_cannot_be_started_is_a_gap(tmp_path: Path) -> None:
    """Its first word is not a program."""
    _configure(tmp_path, "", command=["/nowhere/at-all"])
    done = _night(tmp_path)
    assert done.exit_code == 5
    assert "the training cannot be started (No such file or directory)" in done.stderr


def test_the_training_of_a_killed_night_is_ended_before_another_one_begins(tmp_path: Path) -> None:
    """SIGKILL ends the night only; two trainings never run side by side."""
    waits = "import os, time\nopen('pids', 'a').write(f'{os.getpid()}\\n')\ntime.sleep(600)"
    _configure(tmp_path, waits)
    command = [sys.executable, "-m", "leakaudit", "nightly", "--config", str(tmp_path / "nightly.yaml")]
    process = subprocess.Popen([*command, "--at", "2026-11-01"], stderr=subprocess.DEVNULL)
    first = _pid(tmp_path, 1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert psutil.pid_exists(first)
    (tmp_path / "train.py").write_text(
        f"import psutil\nassert not psutil.pid_exists({first}) or psutil.Process({first}).status() == 'zombie'\n{TRAIN}",
        encoding="utf-8",
    )
    done = _night(tmp_path)
    assert done.exit_code == 3, done.output
    assert "of an earlier start still runs" in done.stderr


def _pid(place: Path, number: int) -> int:
    """Return the process id that the training wrote, once it has."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = (place / "pids").read_text().split() if (place / "pids").exists() else []
        if len(found) >= number:
            return int(found[number - 1])
        time.sleep(0.05)
    raise AssertionError("the training did not start")


def test_what_a_training_prints_is_for_its_owner_only(tmp_path: Path) -> None:
    """It may hold private text."""
    _configure(tmp_path, "print('a private word'); raise SystemExit(1)")
    done = _night(tmp_path)
    log = _folder(tmp_path) / "training.log"
    assert "a private word" in log.read_text(encoding="utf-8")
    assert log.stat().st_mode & 0o077 == 0
    assert "private word" not in done.output
