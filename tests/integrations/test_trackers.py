"""Trackers get the audit's numbers through the trainer's own logging."""

from __future__ import annotations

from pathlib import Path

import pytest

from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from tests.support import tiny_trainer

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]


def test_tensorboard_shows_the_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event file of the run holds `leakaudit/...` scalars beside the loss."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    audit = LeakAuditCallback(tiny_trainer.audit_config(tmp_path))
    trainer = tiny_trainer.make_trainer(
        tmp_path, audit, max_steps=3, report_to="tensorboard", logging_strategy="steps", logging_steps=1
    )
    audit.attach(trainer)
    trainer.train()
    board = events.EventAccumulator(str(tmp_path / "board")).Reload()
    tags = board.Tags()["scalars"]
    assert "train/loss" in tags
    assert any("leakaudit/" in tag for tag in tags), tags
