"""The end of training says which snapshots stay, where, and how they are removed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from leakaudit.callbacks.torch_loop import Watch, watch
from leakaudit.cli import main
from leakaudit.storage.spool import Spool
from tests.support import tiny

TOKENIZER = tiny.bert_tokenizer()


def _train(folder: Path, each: Callable[[Watch, int], None]) -> None:
    """Train five steps, keep every second one; call `each` after a written step."""
    model = tiny.bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {
        "out_dir": str(folder),
        "every_n_steps": 2,
        "schedule": "deferred",
        "at_end": "leave",
        "attacks": ["idlg"],
    }
    with watch(model, optimizer, tokenizer=TOKENIZER, config=config) as audit:
        for step in range(5):
            model(**TOKENIZER(["the old dog"], return_tensors="pt"), labels=torch.tensor([0])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert audit._run is not None and audit._run.recorder.written()
            each(audit, step)


def _worker_dies_over(audit: Watch, step: int) -> None:
    """Set the first snapshot aside, as a worker does after several crashes."""
    assert audit._run is not None
    spool = audit._run.spool
    if step == 0 and (claimed := spool.queue.claim()) is not None:
        spool.queue.set_aside(claimed, keep=True)


def test_the_last_line_names_what_stays_what_is_in_it_and_how_it_goes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command that it gives removes them."""
    _train(tmp_path / "audit", _worker_dies_over)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "snapshots that stay" in line]
    spool = tmp_path / "audit" / "spool"
    assert str(spool) in line
    assert "set aside: step 0" in line and "not audited to the end: step 2, 4" in line
    assert "the private batch and its labels, by design, in clear" in line
    command = line.split("`leakaudit ")[-1].split("`")[0].split()
    assert command == ["snapshots", "purge", str(spool), "--all"]
    done = CliRunner().invoke(main, command, input="y\n")
    assert done.exit_code == 0, done.output
    assert Spool(spool).entries() == []


def test_an_exception_of_the_users_leaves_the_same_word(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Training was broken off; what was kept is still there."""

    def breaks(audit: Watch, step: int) -> None:
        _worker_dies_over(audit, step)
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _train(tmp_path / "audit", breaks)
    said = capfd.readouterr().err
    assert "set aside: step 0" in said and "not audited to the end: step 2 " in said


def test_nothing_is_said_where_nothing_stays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every snapshot was audited and removed."""

    def audited(audit: Watch, step: int) -> None:
        assert audit._run is not None
        claimed = audit._run.spool.queue.claim()
        assert (claimed is None) == bool(step % 2)
        if claimed is not None:
            audit._run.spool.queue.discard_or_keep(claimed, keep=False)

    _train(tmp_path / "audit", audited)
    assert "snapshots that stay" not in capfd.readouterr().err
