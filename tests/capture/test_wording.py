"""What the callback tells about kept steps, in plain English.

It tells where their private batches are.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from leakaudit.callbacks.torch_loop import watch
from tests.support import tiny


def _train(folder: Path, steps: int, *, stop: bool, every: int = 20) -> None:
    model, tokenizer = tiny.bert(seed=1), tiny.bert_tokenizer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"out_dir": folder / "out", "every_n_steps": every, "schedule": "deferred", "at_end": "leave"}
    with watch(model, optimizer, tokenizer=tokenizer, config=config, total_steps=steps):
        for _ in range(steps):
            batch = tokenizer(["the old dog saw a horse"], return_tensors="pt")
            optimizer.zero_grad()
            model(**batch, labels=torch.tensor([0])).loss.backward()
            optimizer.step()
        if stop:
            raise KeyboardInterrupt


@pytest.mark.parametrize("stop", [True, False])
def test_a_batch_that_stays_on_the_disk_is_spoken_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stop: bool
) -> None:
    """After Ctrl-C, and where the audit is left to others; with what removes it."""
    try:
        _train(tmp_path, 2, stop=stop)
    except KeyboardInterrupt:
        assert stop
    said = capsys.readouterr().err
    kept, report, off = said.splitlines()[:3]
    assert kept.startswith(
        "leakaudit: keeps 1 of 2 steps (every 20th); the policy needs 59 steps to pass, more than this run has"
    )
    report_file = tmp_path / "out" / "report.html"
    assert report == (
        f"leakaudit: report: {report_file}, by `leakaudit worker` later (7 attacks, up to 60 s each: up to 7 min a step)"
    )
    assert off == "leakaudit: switch off: LEAKAUDIT_DISABLED=1"
    assert ("1 step was kept" if stop else "1 step kept") in said and "1 steps" not in said
    spool = tmp_path / "out" / "spool"
    assert f"snapshots that stay in {spool}: not audited to the end: step 0" in said
    assert "Each holds the private batch and its labels, by design, in clear" in said
    assert f"`leakaudit snapshots purge {spool} --all` removes them" in said
    assert list((tmp_path / "out" / "spool").glob("*.ready"))


def test_every_step_needs_no_ordinal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The shortest plan."""
    _train(tmp_path, 1, stop=False, every=1)
    assert "keeps the only step; " in capsys.readouterr().err
