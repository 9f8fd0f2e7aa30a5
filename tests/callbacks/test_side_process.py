"""The side process as the trainer sees it: started again when it dies, waited for with patience, never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from leakaudit.callbacks import side_process
from leakaudit.callbacks.side_process import SideProcess
from leakaudit.spool import Spool
from tests import tiny
from tests.callbacks import tiny_trainer


def _side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> Any:
    """Return a side process that runs `code` instead of a worker."""
    spool = Spool.create(
        tmp_path / "audit" / "spool", tiny_trainer.audit_config(tmp_path), tiny.bert_tokenizer(), "test"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: popen([sys.executable, "-c", code], **options))
    return SideProcess(spool, tmp_path / "worker.log", threads=1)


def test_a_side_process_that_keeps_dying_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After two restarts, with one line that says where to look."""
    side = _side(tmp_path, monkeypatch, "raise SystemExit(1)")
    for _ in range(side_process.RESTARTS + 1):
        assert side.ensure()
        side._process.wait(timeout=20)
    assert not side.ensure() and not side.ensure()
    assert side.given_up
    assert capsys.readouterr().err.count("the side process died 3 times: see") == 1
    side.stop()


@pytest.mark.parametrize("code", side_process.FINAL_CODES)
def test_a_side_process_that_is_through_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Nor is one that was asked to stop."""
    side = _side(tmp_path, monkeypatch, f"raise SystemExit({code})")
    side.wait(20.0, tmp_path / "journal.jsonl")
    assert side._process.returncode == code and side._starts == 1 and not side.given_up
    side.stop()


@pytest.mark.parametrize("interrupt", [False, True])
def test_waiting_ends_with_patience_or_ctrl_c_and_asks_for_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], interrupt: bool
) -> None:
    """The worker is asked to stop, not killed; training's result is not lost to the Ctrl-C."""
    side = _side(tmp_path, monkeypatch, "import time; time.sleep(60)")

    class Impatient:
        def __exit__(self, *error: object) -> None: ...

        def __enter__(self) -> Any:
            raise KeyboardInterrupt

    if interrupt:
        side.ensure()
        monkeypatch.setattr(side_process, "_countdown", Impatient)
    side.wait(30.0 if interrupt else 0.5, tmp_path / "journal.jsonl")
    assert side._process.returncode == -signal.SIGTERM
    said = "not waiting any longer" if interrupt else "out of patience after 0.5 s"
    assert said in capsys.readouterr().err
    side.stop()


def test_a_worker_that_somebody_started_by_hand_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the spool; a second one would be refused."""
    side = _side(tmp_path, monkeypatch, "pass")
    with side._spool.worker_lock():
        assert side.ensure()
    assert side._process is None


def test_a_fork_of_the_trainer_does_not_end_the_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loader processes inherit what is to be done at exit."""
    side = _side(tmp_path, monkeypatch, "import time; time.sleep(60)")
    side.ensure()
    with monkeypatch.context() as patch:
        patch.setattr(side, "_owner", os.getpid() + 1)
        side.stop()
    assert side._process.poll() is None
    side.stop()
    assert side._process.returncode == -signal.SIGKILL


def test_the_side_process_sees_nothing_of_a_distributed_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for peers that never come."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_USE_CPU", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MINE", "kept")
    environment = side_process.clean_environment(threads=3)
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_USE_CPU", "TORCHELASTIC_RUN_ID"} & set(environment)
    assert (environment["MINE"], environment["OMP_NUM_THREADS"]) == ("kept", "3")
    assert environment["LEAKAUDIT_PARENT_PID"] == str(os.getpid())
