"""The name of a run in `out_dir`, for sweeps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from pydantic import ValidationError

from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.run_name import named, path_safe
from leakaudit.capture.trackers import Trackers, WandbRun
from leakaudit.config.audit import AuditConfig
from leakaudit.errors import ConfigError
from tests.support import tiny, tiny_trainer

SWEEP = AuditConfig(out_dir=Path("audits/{run_name}"))


@pytest.fixture(autouse=True)
def _unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the names away that this process may have."""
    for name in ("LEAKAUDIT_RUN_NAME", "WANDB_RUN_ID", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def _trainer(run_name: str = "", tracker: str = "", *, writes: bool = True) -> Any:
    run = SimpleNamespace(id="", name=tracker, url="", define_metric=print, log=print, log_artifact=print)
    return SimpleNamespace(run_name=run_name, trackers=Trackers.of([WandbRun(run)]) if tracker else None, writes=writes)


def test_the_first_name_that_exists_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours, the trainer's, a tracker's, a tracker's variable."""
    monkeypatch.setenv("WANDB_RUN_ID", "w1")
    assert named(SWEEP, _trainer()).out_dir == Path("audits/w1")
    assert named(SWEEP, _trainer(tracker="sky 3")).out_dir == Path("audits/sky-3")
    assert named(SWEEP, _trainer("trial/2", "sky 3")).out_dir == Path("audits/trial-2")
    monkeypatch.setenv("LEAKAUDIT_RUN_NAME", "mine")
    assert named(SWEEP, _trainer("trial/2")).out_dir == Path("audits/mine")
    assert named(AuditConfig(), _trainer()).out_dir == AuditConfig().out_dir


@pytest.mark.parametrize("name", ["", "..", "///", "-"])
def test_a_run_without_a_name_is_refused(name: str) -> None:
    """The message says where a name comes from."""
    with pytest.raises(ConfigError, match=r"this run has none: set `run_name` of `TrainingArguments`"):
        named(SWEEP, _trainer(name))
    assert named(SWEEP, _trainer(name, writes=False)).out_dir.name == "other-process"


def test_a_name_is_one_part_of_a_path() -> None:
    """No folder is left, whatever the run is called."""
    assert path_safe("../../etc/passwd") == "etc-passwd"
    assert path_safe("a" * 300) == "a" * 100


def test_no_other_place_is_filled() -> None:
    """A mistyped place would become a folder with braces."""
    with pytest.raises(ValidationError, match="is the only name that can stand in braces"):
        AuditConfig(out_dir=Path("audits/{runname}"))


def test_trials_of_a_sweep_have_their_own_folders(tmp_path: Path) -> None:
    """The trainer's `run_name` is the name of the folder."""
    for name in ("lr 1", "lr 2"):
        audit = LeakAuditCallback(tiny_trainer.audit_config(tmp_path, out_dir=tmp_path / "audits" / "{run_name}"))
        trainer = tiny_trainer.make_trainer(tmp_path, audit, max_steps=1, run_name=name)
        with tiny_trainer.without_side_process():
            trainer.train()
    assert sorted(path.name for path in (tmp_path / "audits").iterdir() if path.is_dir()) == ["lr-1", "lr-2"]


def test_a_loop_without_a_name_trains_without_an_audit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No folder with braces is made."""
    model, tokenizer = cast(Any, tiny.bert().train()), tiny.bert_tokenizer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, tokenizer=tokenizer, config={"out_dir": tmp_path / "{run_name}"}):
        model(**tokenizer(["the old dog"], return_tensors="pt"), labels=torch.tensor([0])).loss.backward()
        optimizer.step()
    assert "needs the name of the run" in caplog.text and not list(tmp_path.iterdir())
