"""Steps wait for their attacks instead of being skipped.

The side process starts before the first step, and each lost step has its reason.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from leakaudit.callbacks.torch_loop import Watch, watch
from leakaudit.capture.context import OFF_SWITCH
from leakaudit.capture.recording.background_writer import BackgroundWriter
from leakaudit.capture.recording.recorder import Recorder
from leakaudit.capture.recording.step_writer import StepWriter
from leakaudit.capture.worker.process import SideProcess
from leakaudit.config.audit import AuditConfig
from leakaudit.storage.spool import Spool
from tests.support import tiny
from tests.support.processes import alive
from tests.support.tiny_trainer import audit_config

TOKENIZER = tiny.bert_tokenizer()


@contextmanager
def idle_worker() -> Iterator[None]:
    """No side process takes anything: it is busy for ever."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SideProcess, "ensure", lambda self: False)
        yield


def train(
    config: AuditConfig, steps: int, *, patience: bool = True, total: int | None = None, model: Any = None
) -> Watch:
    """Train for some steps and return the audit.

    With `patience` the loop waits for the writer, as a slow model does.
    """
    model = model or tiny.bert().train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with watch(model, optimizer, tokenizer=TOKENIZER, config=config, total_steps=total) as audit:
        for step in range(steps):
            model(
                **TOKENIZER(["the old dog saw"], return_tensors="pt"), labels=torch.tensor([step % 2])
            ).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if patience and audit._run is not None:
                audit._run.recorder.written()
    return audit


def kept_steps(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in Spool(folder / "audit" / "spool").entries())


def test_every_due_step_waits_while_the_battery_is_busy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing takes one out of the spool, and none is skipped."""
    with idle_worker():
        train(audit_config(tmp_path, at_end="leave", every_n_steps=2), 12)
    assert kept_steps(tmp_path) == [0, 2, 4, 6, 8, 10]
    assert "6 steps kept; training was held up" in capsys.readouterr().err


@pytest.mark.parametrize("distance", ["auto", 1, 2])
def test_a_stuck_disk_is_waited_for_once(
    tmp_path: Path, distance: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first wait in vain is said, and no later step waits.

    The end of the run waits a little for the step on its way.
    """
    waits: list[float] = []

    def wait(self: BackgroundWriter, patience_s: float) -> bool:
        waits.append(patience_s)
        return self.thread is None

    monkeypatch.setattr(BackgroundWriter, "wait", wait)
    monkeypatch.setattr(BackgroundWriter, "writing", lambda self: self.thread is not None)
    with idle_worker():
        train(audit_config(tmp_path, at_end="leave", every_n_steps=distance), 6, patience=False, total=6)
    assert waits == [
        10.0,
        10.0,
        10.0,
    ]  # before the first step there is nothing to wait for; then once in vain, and at the end
    assert capsys.readouterr().err.count("no later step waits for the disk") == 1


def test_a_full_spool_is_the_reason_that_is_said_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The queue is bounded by bytes.

    Steps that did not fit are counted with a reason of their own.
    """
    probe = train(audit_config(tmp_path / "probe", schedule="deferred", at_end="leave"), 1)
    (snapshot,) = Spool(probe.folder / "spool").entries()  # type: ignore[operator]
    size = sum(file.stat().st_size for file in snapshot.iterdir())
    config = audit_config(tmp_path, at_end="leave", every_n_steps=2, max_spool_gb=3.2 * size / 1e9)
    with idle_worker():
        train(config, 12)
    assert kept_steps(tmp_path) == [0, 2, 4]
    said = capsys.readouterr().err
    assert (
        f"3 steps kept; 3 steps not kept: the spool or the disk was full (`max_spool_gb: {config.max_spool_gb:g}`)"
        in said
    )
    totals = Spool(tmp_path / "audit" / "spool").totals()
    assert totals is not None and (totals.too_full, totals.skipped, totals.failed) == (3, 0, 0)


def test_a_step_that_comes_while_the_writer_is_at_work_is_counted_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training does not wait for the disk; a step that never began is not counted."""
    write = StepWriter.__call__

    def slowly(*args: Any) -> None:
        time.sleep(1.0)
        write(*args)

    monkeypatch.setattr(StepWriter, "__call__", slowly)
    with idle_worker():
        train(audit_config(tmp_path, at_end="leave", every_n_steps="auto"), 4, patience=False)  # 0, 1, 2, 4...
    assert kept_steps(tmp_path) == [0]
    assert "1 step kept; 2 steps not kept: the step before was still on its way to the disk" in capsys.readouterr().err


@pytest.mark.parametrize(("distance", "total"), [("auto", 3), (1, None)])
def test_steps_of_a_short_run_and_steps_that_were_asked_for_are_all_kept(
    tmp_path: Path, distance: Any, total: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step waits for the disk.

    The end of a short run would wait for it anyway.
    """
    write = StepWriter.__call__

    def slowly(*args: Any) -> None:
        time.sleep(0.3)
        write(*args)

    monkeypatch.setattr(StepWriter, "__call__", slowly)
    with idle_worker():
        train(audit_config(tmp_path, at_end="leave", every_n_steps=distance), 3, patience=False, total=total)
    assert kept_steps(tmp_path) == [0, 1, 2]


def test_the_room_for_a_step_is_what_is_written_of_it(tmp_path: Path) -> None:
    """Frozen weights count once.

    If all weights counted three times, a step of a LoRA run would never be kept.
    """
    model: Any = tiny.bert().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("classifier"))
    size = Recorder(model, torch.optim.SGD(model.classifier.parameters(), lr=0.1), print).bytes_to_write()
    everything = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
    assert 1.5 * size < everything
    with idle_worker():
        train(audit_config(tmp_path, at_end="leave", max_spool_gb=1.5 * size / 1e9), 2, model=model)
    assert kept_steps(tmp_path)[0] == 0


@pytest.mark.parametrize(("schedule", "starts"), [("beside", True), ("deferred", False)])
def test_the_side_process_is_there_before_the_first_step_is_due(tmp_path: Path, schedule: str, starts: bool) -> None:
    """It imports torch for seconds; what waits for the end of training starts nothing."""
    config = audit_config(tmp_path, first_step=2, schedule=schedule, at_end="leave")
    model = tiny.bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, tokenizer=TOKENIZER, config=config) as audit:
        assert audit._run is not None
        pid = audit._run.side.pid
        assert (pid is not None) == starts
    assert pid is None or not alive(pid)


def test_a_side_process_without_a_step_leaves_no_audit_behind(tmp_path: Path) -> None:
    """The folder says that the run was not audited, and the worker has ended.

    The next run can begin in the same folder.
    """
    folder = tmp_path / "audit"
    for _ in range(2):
        audit = train(audit_config(tmp_path, first_step=100), 2)
        assert audit._run is None
        assert sorted(path.name for path in folder.iterdir()) == ["not_audited.json", "worker.log"]
        assert "no step was kept" in json.loads((folder / "not_audited.json").read_text())["because"]
    assert [path.name for path in tmp_path.iterdir()] == ["audit"]


def test_training_is_the_same_with_a_queue_and_without_an_audit(tmp_path: Path) -> None:
    """To the bit."""
    with_it, without = tiny.bert().train(), tiny.bert().train()
    without.load_state_dict(copy.deepcopy(with_it.state_dict()))
    torch.manual_seed(1)
    with idle_worker():
        train(audit_config(tmp_path, at_end="leave"), 5, model=with_it)
    torch.manual_seed(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(OFF_SWITCH, "1")
        train(audit_config(tmp_path / "off"), 5, model=without)
    assert all(torch.equal(a, b) for a, b in zip(with_it.parameters(), without.parameters(), strict=True))


AUTOGROUP = Path("/proc/self/autogroup")


@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="no priorities here")
def test_the_side_process_yields_while_training_runs_and_not_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its priority is lower from its start until training ends.

    Where the system shares the processor between sessions, its session has the lower priority, too.
    """
    from tests.capture.test_worker_process import SLEEP, make

    side = make(tmp_path, monkeypatch, SLEEP, nice=7, wait_at_end_s=0.3)
    side.begin()

    def group() -> str:
        return Path(f"/proc/{side.pid}/autogroup").read_text().split()[-1]

    assert os.getpriority(os.PRIO_PROCESS, side.pid) == os.getpriority(os.PRIO_PROCESS, 0) + 7
    if AUTOGROUP.exists():
        assert group() == "7"
        side._raise_priority()
        assert group() == "0"
    side.stop()
