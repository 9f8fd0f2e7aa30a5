"""Loops copy and save their model at any time, also while a step is recorded."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.boundary import Hook
from tests.support import tiny
from tests.support.stacks import classes
from tests.support.tiny_trainer import audit_config, kept, make_trainer, stamp, without_side_process


def test_a_copy_of_a_recorded_model_is_a_model_without_a_recorder(tmp_path: Path) -> None:
    """The hooks on a model hold a lock, and a pass of a copy must not count."""
    model: Any = tiny.bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = classes()
    with (
        without_side_process(),
        watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(tmp_path)) as audit,
    ):
        for batch in batches:
            model(**batch).loss.backward()
            double = copy.deepcopy(model)
            double(**batches[0]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for step, snapshot in kept(audit).items():
        assert [
            torch.equal(b.inputs["input_ids"], batches[step]["input_ids"]) for b in snapshot.truth.micro_batches
        ] == [True]
        assert stamp(snapshot).status.value == "verified"


def test_a_model_that_is_saved_whole_is_loaded_where_this_package_is_not(tmp_path: Path) -> None:
    """A file of `torch.save(model)` must not name this package."""
    model: Any = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with without_side_process(), watch(model, optimizer, num_labels=2, config=audit_config(tmp_path)):
        file = io.BytesIO()
        torch.save(model, file)
    assert b"leakaudit" not in file.getvalue()
    saved = tmp_path / "model.pt"
    saved.write_bytes(file.getvalue())
    code = f"import torch; print(torch.load({str(saved)!r}, weights_only=False)(torch.ones(1, 2)).shape)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert answer.stdout.strip() == "torch.Size([1, 2])"


def test_a_copied_hook_does_nothing() -> None:
    """Whatever a module hands it, with keywords or without."""
    called: list[Any] = []
    hook = Hook(lambda *args: called.append(args))
    assert hook(1, 2) is None and called == [(1, 2)]
    assert copy.deepcopy(hook)(1, (2,), {"three": 3}) is None and len(called) == 1


@pytest.mark.parametrize("as_mapping", [True, False])
def test_a_configuration_with_a_path_in_it_leaves_checkpoints_as_they_are(tmp_path: Path, as_mapping: bool) -> None:
    """The Trainer writes the callback's configuration into its checkpoint, as JSON."""
    config: Any = {"out_dir": tmp_path / "audit", "every_n_steps": 1}
    trainer = make_trainer(
        tmp_path,
        LeakAuditCallback(config if as_mapping else audit_config(tmp_path)),
        save_strategy="steps",
        save_steps=1,
    )
    with without_side_process():
        trainer.train()
    assert (tmp_path / "trainer" / "checkpoint-3" / "trainer_state.json").exists()
