"""A Trainer on tiny models whose steps are kept without a side process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

from leakaudit.audit.verification import verify
from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.capture.adapter import Adapter
from leakaudit.capture.recording.background_writer import BackgroundWriter
from leakaudit.capture.worker import process as side_process
from leakaudit.client.snapshot import Snapshot
from leakaudit.client.step import ClientStep
from leakaudit.config.audit import AuditConfig, PluginSpec
from leakaudit.results.schema import Verification
from leakaudit.storage.snapshots import read_snapshot
from tests.support import tiny

TEXTS = (
    "the old dog chased a cat .",
    "a small bird saw the red fish near the river .",
    "one horse ate .",
    "two cats liked the big house and the tree on the road today .",
    "never liked a fish .",
    "the new blue house under a big tree .",
    "three dogs found a bird in the old tree .",
    "always a horse on the road .",
)


SETTINGS: Mapping[str, Any] = {
    "per_device_train_batch_size": 2,
    "max_steps": 3,
    "learning_rate": 0.05,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "logging_strategy": "no",
    "dataloader_pin_memory": False,
}
"""What every Trainer of these tests has, unless it says otherwise: plain SGD, batches of two, three steps, quiet, on a CPU."""


def settings(folder: Path, **arguments: Any) -> dict[str, Any]:
    """Return the arguments of a Trainer that writes into a folder."""
    return {"output_dir": str(folder / "trainer"), **SETTINGS, **arguments}


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Tokenised texts with classes in turn, or with none, for language models."""

    def __init__(self, tokenizer: Any, *, classes: int = 2) -> None:
        self.rows: list[dict[str, Any]] = [
            {**tokenizer(text), **({"labels": i % classes} if classes else {})} for i, text in enumerate(TEXTS)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


class Probe(TrainerCallback):
    """Copies the optimizer's gradients and weights, independently of the audit."""

    def __init__(self) -> None:
        self.updates: list[dict[str, Tensor]] = []
        self.weights: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        parameters = dict(kwargs["model"].named_parameters())
        self.updates.append({n: p.grad.detach().float().clone() for n, p in parameters.items() if p.grad is not None})
        self.weights.append({n: p.detach().clone() for n, p in parameters.items()})


class Tamper(TrainerCallback):
    """Does something to the gradients of one step, as a defence or an overflow would."""

    def __init__(self, step: int, change: Any) -> None:
        self.step, self.change = step, change

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            for parameter in kwargs["model"].parameters():
                if parameter.grad is not None:
                    self.change(parameter.grad)


def audit_config(folder: Path, **more: Any) -> AuditConfig:
    """Return a configuration with a fast battery; every step is due."""
    return AuditConfig(
        **{
            "out_dir": folder / "audit",
            "every_n_steps": 1,
            "attacks": (PluginSpec(name="embedding-rows"), PluginSpec(name="span")),
            "controls": 1,
            "device": "cpu",
            "nice": 0,  # on a busy machine the default would leave the side process next to nothing
            **more,
        }
    )


def make_trainer(
    folder: Path,
    *callbacks: TrainerCallback,
    model: nn.Module | None = None,
    tokenizer: Any = None,
    kind: type[Trainer] = Trainer,
    rows: Any = None,
    collator: Any = None,
    trainer_options: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """Return a Trainer of a tiny BERT: plain SGD, batches of two, three steps."""
    tokenizer = tokenizer or tiny.bert_tokenizer()
    options = settings(folder, learning_rate=0.1) | arguments
    return kind(
        model=tiny.bert() if model is None else model,
        args=TrainingArguments(**options),
        train_dataset=Rows(tokenizer) if rows is None else rows,
        data_collator=DataCollatorWithPadding(tokenizer) if collator is None else collator,
        processing_class=tokenizer,
        callbacks=list(callbacks),
        **(trainer_options or {}),
    )


@contextmanager
def without_side_process() -> Iterator[None]:
    """Keep every due step, with no side process.

    Training waits for the writer.
    """
    with pytest.MonkeyPatch.context() as patch:

        def writing(self: BackgroundWriter) -> bool:
            if self.thread is not None:
                self.thread.join()
            return False

        patch.setattr(BackgroundWriter, "writing", writing)
        patch.setattr(side_process.SideProcess, "ensure", lambda self: False)
        yield


def _take(spool: Path) -> list[Path]:
    taken = spool.parent / "taken"
    taken.mkdir(exist_ok=True)
    return [path.rename(taken / path.stem) for path in sorted(spool.glob("*.ready"))]


def kept(audit: Adapter) -> dict[int, Snapshot]:
    """Return the snapshots of a run without a side process, by step."""
    assert audit.folder is not None
    _take(audit.folder / "spool")
    return {int(path.name): read_snapshot(path) for path in sorted((audit.folder / "taken").iterdir())}


def train(folder: Path, *callbacks: TrainerCallback, attach: bool = True, **more: Any) -> dict[int, Snapshot]:
    """Train with an audit as the last callback and return what it kept, by step."""
    config = more.pop("config", None) or audit_config(folder)
    audit = LeakAuditCallback(config)
    trainer = make_trainer(folder, *callbacks, audit, **more)
    if attach:
        audit.attach(trainer)
    with without_side_process():
        trainer.train()
    return kept(audit)


def stamp(snapshot: Snapshot) -> Verification:
    """Return the verification of a snapshot."""
    return verify(ClientStep.of(snapshot), snapshot.observation.update)


def distance(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
    """Return the relative L2 error of `one` against `two`.

    Both must name the same parameters.
    """
    assert set(one) == set(two)
    difference = sum(float((one[n].double() - two[n].double()).square().sum()) for n in two)
    return float((difference / sum(float(two[n].double().square().sum()) for n in two)) ** 0.5)


def gradient(model: nn.Module, weights: Mapping[str, Tensor], batches: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the sum of the batches' mean-loss gradients, by plain autograd."""
    model.load_state_dict(dict(weights), strict=False)
    model.train()
    model.zero_grad()
    for batch in batches:
        model(**batch).loss.backward()
    found = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found
