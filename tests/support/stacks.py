"""The same tiny training in every stack, audited without a side process.

The tests of capture and the matrix use it.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DataCollatorWithPadding, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.callbacks.torch_loop import watch
from leakaudit.client.snapshot import Snapshot
from tests.support import tiny
from tests.support.tiny_trainer import SETTINGS, Rows, audit_config, kept, without_side_process

Batch = dict[str, Tensor]

RATE = 0.1
"""Learning rate of plain SGD, in every stack."""

IN_ORDER = {"train_sampling_strategy": "sequential"} if hasattr(TrainingArguments, "train_sampling_strategy") else {}
"""Arguments of a Trainer that takes batches in their order; transformers before 5.0 have none."""


@dataclass
class Case:
    """One training for every stack: by default four batches of two."""

    model: Callable[[], nn.Module] = tiny.bert
    tokenizer: Callable[[], Any] = tiny.bert_tokenizer
    batches: list[Batch] = field(default_factory=list)
    clip: float | None = None
    windows: int = 1
    """Micro-batches of one step; the last window of the epoch may be shorter."""
    precision: str = "no"
    loss: Callable[[Any, Tensor], Tensor] | None = None
    """Computed from the model's outputs and the labels, which the model then does not get."""
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    """Put around the model before training, such as `torch.compile`."""
    optimizer: Callable[[nn.Module], Any] = lambda model: torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=RATE
    )
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further `TrainingArguments`, for features that only that trainer has."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `watch`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Further keys of the audit's configuration."""
    audit: dict[str, Any] = field(default_factory=dict)
    """Further arguments that the audit takes in every stack, such as `defense`."""


def classes(size: int = 2, count: int = 4) -> list[Batch]:
    """Return `count` padded batches of `size` labelled texts."""
    tokenizer = tiny.bert_tokenizer()
    rows, collate = Rows(tokenizer).rows, DataCollatorWithPadding(tokenizer)
    picked = [[rows[(i * size + j) % len(rows)] for j in range(size)] for i in range(count)]
    return [dict(collate(row)) for row in picked]


def texts(size: int = 2, count: int = 4) -> list[Batch]:
    """Return the same texts for a language model: every token is a label."""
    tokenizer = tiny.gpt2_tokenizer()
    rows = Rows(tokenizer, classes=0).rows
    found = []
    for i in range(count):
        picked = [{"input_ids": rows[(i * size + j) % len(rows)]["input_ids"]} for j in range(size)]
        batch = dict(tokenizer.pad(picked, return_tensors="pt"))
        found.append({**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)})
    return found


Runner = Callable[[Path, Case], dict[int, Snapshot]]


def torch_loop(folder: Path, case: Case) -> dict[int, Snapshot]:
    """A plain loop; gradients are zeroed between forward and backward."""
    model = case.model().train()
    called = case.wrap(model)
    optimizer = case.optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if case.precision == "fp16" else None
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case.precision)
    watched = watch(
        called,
        optimizer,
        tokenizer=case.tokenizer(),
        config=audit_config(folder, **{"max_snapshots": 50, **case.config}),
        max_grad_norm=case.clip,
        scaler=scaler,
        **case.audit,
        **case.options,
    )
    with without_side_process(), watched:
        for start in range(0, len(case.batches), case.windows):
            window = case.batches[start : start + case.windows]
            for number, batch in enumerate(window):
                with torch.autocast("cpu", dtype=dtype) if dtype else contextlib.nullcontext():
                    loss = _loss(called, batch, case) / len(window)
                if number == 0:
                    optimizer.zero_grad()
                (scaler.scale(loss) if scaler else loss).backward()
            if case.clip:
                if scaler:
                    scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
    return kept(watched)


def accelerate(folder: Path, case: Case) -> dict[int, Snapshot]:
    """A loop around `Accelerator`, given the prepared objects."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=case.windows,
        mixed_precision=None if case.precision == "no" else case.precision,
    )
    plain = case.model().train()
    model, optimizer = accelerator.prepare(plain, case.optimizer(plain))
    model = case.wrap(model)
    loader = accelerator.prepare(_loader(case))
    watched = watch(
        model,
        optimizer,
        tokenizer=case.tokenizer(),
        config=audit_config(folder, **{"max_snapshots": 50, **case.config}),
        max_grad_norm=case.clip,
        **case.audit,
        **case.options,
    )
    with without_side_process(), watched:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(_loss(model, dict(batch), case))
                if accelerator.sync_gradients and case.clip:
                    accelerator.clip_grad_norm_(model.parameters(), case.clip)
                optimizer.step()
                optimizer.zero_grad()
    AcceleratorState._reset_state(reset_partial_state=True)
    return kept(watched)


def hf_trainer(folder: Path, case: Case, *, seq2seq: bool = False) -> dict[int, Snapshot]:
    """`Trainer`, or `Seq2SeqTrainer`, with the audit attached."""
    model = case.model()
    audit = LeakAuditCallback(audit_config(folder, **{"max_snapshots": 50, **case.config}), **case.audit)
    settings: dict[str, Any] = {
        **SETTINGS,
        "max_steps": -1,  # the Trainer's own: `num_train_epochs` decides
        "output_dir": str(folder / "trainer"),
        "per_device_train_batch_size": 1,
        "num_train_epochs": 1,
        "gradient_accumulation_steps": case.windows,
        "learning_rate": RATE,
        "max_grad_norm": case.clip or 0.0,
        "bf16": case.precision == "bf16",
        "remove_unused_columns": False,
        **IN_ORDER,
        **case.arguments,
    }
    own = case.loss
    kind: Any = Seq2SeqTrainer if seq2seq else Trainer
    trainer = kind(
        model=case.wrap(model),
        args=(Seq2SeqTrainingArguments if seq2seq else TrainingArguments)(**settings),
        train_dataset=case.batches,
        data_collator=lambda rows: dict(rows[0]),
        processing_class=case.tokenizer(),
        callbacks=[audit],
        compute_loss_func=None
        if own is None
        else (lambda outputs, labels, num_items_in_batch=None: own(outputs, labels)),
    )
    audit.attach(trainer)
    with without_side_process():
        trainer.train()
    return kept(audit)


def seq2seq_trainer(folder: Path, case: Case) -> dict[int, Snapshot]:
    """`Seq2SeqTrainer`."""
    return hf_trainer(folder, case, seq2seq=True)


def lightning(
    folder: Path, case: Case, *, manual: bool = False, namespace: str = "lightning.pytorch", **options: Any
) -> dict[int, Snapshot]:
    """Lightning with a module around the model, and either optimisation.

    It is automatic, or the module's own.
    """
    pl: Any = importlib.import_module(namespace)

    from leakaudit.callbacks.lightning_trainer import LeakAuditCallback as LightningAudit

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = case.wrap(case.model().train())
            self.automatic_optimization = not manual

        def training_step(self, batch: Batch, index: int) -> Tensor | None:
            loss = _loss(self.model, dict(batch), case)
            if not manual:
                return loss
            optimizer: Any = self.optimizers()
            first = index % case.windows == 0
            last = index % case.windows == case.windows - 1 or index == len(case.batches) - 1
            if first:
                optimizer.zero_grad()
            self.manual_backward(loss / case.windows)
            if last:
                if case.clip:
                    torch.nn.utils.clip_grad_norm_(self.parameters(), case.clip)
                optimizer.step()
            return None

        def configure_optimizers(self) -> Any:
            return case.optimizer(self)

    configured = audit_config(folder, **{"max_snapshots": 50, **case.config})
    audit = LightningAudit(configured, tokenizer=case.tokenizer(), **case.audit)
    with without_side_process(), _quiet_lightning():
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[audit],
            **{
                **_precision(case.precision),
                **({} if manual else {"gradient_clip_val": case.clip, "accumulate_grad_batches": case.windows}),
                **options,
            },
        )
        trainer.fit(Module(), _loader(case))
    return kept(audit)


def lightning_manual(folder: Path, case: Case) -> dict[int, Snapshot]:
    """Lightning with manual optimisation."""
    return lightning(folder, case, manual=True)


def _precision(name: str) -> dict[str, Any]:
    """Return Lightning's arguments for a precision.

    On a CPU Lightning makes no scaler by itself.
    """
    from lightning.pytorch.plugins import MixedPrecision

    if name == "fp16":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        return {"plugins": [MixedPrecision(precision="16-mixed", device="cpu", scaler=scaler)]}
    return {"precision": {"no": "32-true", "bf16": "bf16-mixed"}[name]}


@contextlib.contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Silence Lightning's advice about loaders and precision.

    Warnings are errors in the tests.
    """
    levels = {
        name: logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning")
    }
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _loss(model: nn.Module, batch: Batch, case: Case) -> Tensor:
    if case.loss is None:
        loss: Tensor = model(**batch).loss
        return loss
    labels = batch["labels"]
    return case.loss(model(**{name: value for name, value in batch.items() if name != "labels"}), labels)


def _loader(case: Case) -> Any:
    return torch.utils.data.DataLoader(case.batches, batch_size=1, collate_fn=lambda rows: dict(rows[0]))  # type: ignore[arg-type]


def private_run(
    folder: Path, sigma: float, *, bound: float = 1e-3, size: int = 4, physical: int | None = None, poisson: bool = False,
    rand_on_empty: bool = False, steps: int = 2, stepped: str = "private", rows: int = 8,
) -> tuple[dict[int, Snapshot], list[int]]:  # fmt: skip
    """Train with Opacus and return what was kept, and the size of every logical batch."""
    from opacus import PrivacyEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager
    from transformers import DataCollatorWithPadding

    tokenizer = tiny.bert_tokenizer()
    model = tiny.bert().train()
    positions: Any = model.bert.embeddings.position_embeddings  # type: ignore[union-attr]
    positions.weight.requires_grad_(
        False
    )  # Opacus cannot take a gradient per example of a table that all examples share
    original = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    pad = DataCollatorWithPadding(tokenizer, padding="max_length", max_length=20)
    data = Rows(tokenizer).rows[:rows]
    loader: Any = torch.utils.data.DataLoader(data, batch_size=size, collate_fn=lambda r: dict(pad(r)))  # type: ignore[arg-type]
    seen: list[int] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        module, optimizer, loader = PrivacyEngine().make_private(
            module=model, optimizer=original, data_loader=loader, noise_multiplier=sigma, max_grad_norm=bound,
            poisson_sampling=poisson, **({"rand_on_empty": rand_on_empty} if rand_on_empty else {}),
        )  # fmt: skip
        used: Any = optimizer if stepped == "private" else original
        watched = watch(module, used, tokenizer=tokenizer, config=audit_config(folder, max_snapshots=50))
        with without_side_process(), watched:
            for _ in range(steps):
                if physical:
                    manager = BatchMemoryManager(
                        data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
                    )
                    with manager as pieces:
                        _private_epoch(module, used, pieces, seen)
                else:
                    _private_epoch(module, used, loader, seen)
    return kept(watched), seen


def _private_epoch(module: Any, optimizer: Any, loader: Any, seen: list[int]) -> None:
    for batch in loader:
        seen.append(len(batch["input_ids"]))
        if seen[-1] == 0:
            continue
        optimizer.zero_grad()
        module(**batch).loss.backward()
        optimizer.step()


STACKS: dict[str, Runner] = {
    "Trainer": hf_trainer,
    "Seq2SeqTrainer": seq2seq_trainer,
    "Lightning, automatic": lightning,
    "Lightning, manual": lightning_manual,
    "Accelerate": accelerate,
    "plain torch": torch_loop,
}
"""Name in the matrix -> how to train in it."""
