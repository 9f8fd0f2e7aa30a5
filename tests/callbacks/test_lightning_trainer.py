"""The audit under Lightning: namespaces, clipping, resuming, exceptions.

What all adapters have in common is tested in `test_rows.py`.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakaudit.callbacks.lightning_trainer import LeakAuditCallback
from leakaudit.results.schema import VerificationStatus
from tests.support import stacks, tiny
from tests.support.stacks import Case
from tests.support.tiny_trainer import audit_config, kept, stamp, without_side_process

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on loaders and precision


def fit(folder: Path, audit: LeakAuditCallback, training_step: Any, *, batches: int = 3, **options: Any) -> Any:
    """Fit a module around the tiny BERT."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny.bert(dropout=0.1).train()

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = training_step(self, batch, index)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    rows: Any = stacks.classes(count=batches)
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=1, collate_fn=lambda picked: dict(picked[0]))
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=[audit], **options,
    )  # fmt: skip
    with without_side_process():
        trainer.fit(Module(), loader)
    return trainer


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
def test_both_namespaces_are_served(tmp_path: Path, namespace: str) -> None:
    """They are distinct classes of the same shape."""
    found = stacks.lightning(tmp_path, Case(batches=stacks.classes(), clip=0.001), namespace=namespace)
    assert len(found) == 4
    assert {stamp(snapshot).status for snapshot in found.values()} == {VerificationStatus.VERIFIED}


def test_clipping_by_value_is_repeated(tmp_path: Path) -> None:
    """`gradient_clip_algorithm="value"`: every entry is cut."""
    found = stacks.lightning(tmp_path, Case(batches=stacks.classes(), clip=1e-5), gradient_clip_algorithm="value")
    for snapshot in found.values():
        assert snapshot.recipe.max_grad_value == 1e-5 and snapshot.recipe.max_grad_norm is None
        assert max(float(g.abs().max()) for g in snapshot.observation.update.values()) <= 1.0001e-5
        assert stamp(snapshot).status is VerificationStatus.VERIFIED


def test_labels_that_the_module_keeps_from_the_model_are_known(tmp_path: Path) -> None:
    """They are in the batch that Lightning hands to the module."""
    audit = LeakAuditCallback(audit_config(tmp_path), tokenizer=tiny.bert_tokenizer())

    def step(module: Any, batch: Any, index: int) -> Tensor:
        labels = batch.pop("labels")
        return nn.functional.cross_entropy(module.model(**batch).logits, labels)

    fit(tmp_path, audit, step)
    for snapshot in kept(audit).values():
        assert snapshot.truth.labels() == [0, 1]
        assert stamp(snapshot).status is VerificationStatus.VERIFIED


def test_an_exception_in_training_ends_the_audit_and_goes_through(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lightning calls nothing else after it; what was kept is still attacked."""
    audit = LeakAuditCallback(audit_config(tmp_path), tokenizer=tiny.bert_tokenizer())

    def step(module: Any, batch: Any, index: int) -> Tensor:
        if index == 2:
            raise RuntimeError("enough")
        loss: Tensor = module.model(**batch).loss
        return loss

    with pytest.raises(RuntimeError, match="enough"):
        fit(tmp_path, audit, step)
    assert "training ended with RuntimeError; 2 steps were kept" in capsys.readouterr().err
    assert audit._run is None and not audit._counter._hooks
    assert list(kept(audit)) == [0, 1]


def test_a_copy_is_idle_and_a_checkpoint_counts_on(tmp_path: Path) -> None:
    """`ddp_spawn` pickles callbacks; a checkpoint keeps how many steps were kept."""
    audit = LeakAuditCallback(audit_config(tmp_path), tokenizer=tiny.bert_tokenizer())
    fit(tmp_path, audit, lambda module, batch, index: module.model(**batch).loss)
    assert audit.state_dict() == {"kept": 3}
    resumed = pickle.loads(pickle.dumps(audit))
    assert resumed._run is None and resumed.folder is None
    resumed.load_state_dict(audit.state_dict())
    assert resumed.state_dict() == {"kept": 3}


def test_a_module_without_a_tokenizer_is_said_to_need_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training goes through without the audit."""
    trainer = fit(tmp_path, LeakAuditCallback(audit_config(tmp_path)), lambda m, batch, i: m.model(**batch).loss)
    assert trainer.global_step == 3
    assert "there is no tokenizer, and attacks need one" in caplog.text


def test_numbers_go_to_every_logger(tmp_path: Path) -> None:
    """At the audited step, which is also a value."""
    audit = LeakAuditCallback(audit_config(tmp_path), tokenizer=tiny.bert_tokenizer())
    logged: list[tuple[dict[str, float], int]] = []

    class Logger:
        def log_metrics(self, numbers: dict[str, float], step: int) -> None:
            logged.append((numbers, step))

    class Trainer:
        loggers = (Logger(), Logger())

    audit._trainer = Trainer
    audit._trackers().send(3, {"leakaudit/span/exact": 1.0})
    assert logged == [({"leakaudit/step": 3, "leakaudit/span/exact": 1.0}, 3)] * 2
