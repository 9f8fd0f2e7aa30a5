"""Trainings of a tiny model that a rebuilt model would not repeat.

The tests of verification in place use them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.context import OFF_SWITCH
from leakaudit.client.snapshot import Snapshot
from leakaudit.models.factories import model_factory, rebuilt_by
from tests.support import stacks, tiny
from tests.support.stacks import Batch
from tests.support.tiny_trainer import audit_config, kept, without_side_process

Step = Callable[[nn.Module, Batch], None]
"""Forward and backward of one step, with hooks and noise of its own."""


def plainly(model: nn.Module, batch: Batch) -> None:
    """Send the model's own loss back."""
    model(**batch).loss.backward()


@dataclass
class Training:
    """One training in a loop of its own; a step a batch."""

    step: Step = plainly
    model: Callable[[], nn.Module] = lambda: tiny.bert(dropout=0.1)
    batches: list[Batch] = field(default_factory=lambda: stacks.classes(count=3))
    tokenizer: Callable[[], Any] = tiny.bert_tokenizer
    optimizer: Callable[[Any], Any] = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)
    after: Callable[[nn.Module], None] = lambda model: None
    """What the loop does to the gradients before the optimizer steps."""
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def run(self, folder: Path) -> tuple[dict[int, Snapshot], dict[str, Tensor]]:
        """Train with an audit; return the kept steps and the state of training.

        The state is weights, buffers and generators.
        """
        torch.manual_seed(0)
        model = self.model().train()
        optimizer = self.optimizer([p for p in model.parameters() if p.requires_grad])
        audit = watch(
            model, optimizer, tokenizer=self.tokenizer(), config=audit_config(folder, **self.config), **self.options
        )
        with without_side_process(), audit:
            for batch in self.batches:
                audit.batch(batch)
                self.step(model, dict(batch))
                self.after(model)
                optimizer.step()
                optimizer.zero_grad()
        left = {name: value.clone() for name, value in (*model.named_parameters(), *model.named_buffers())}
        return (kept(audit) if audit.folder else {}), {**left, "generator": torch.get_rng_state()}


@model_factory
def plain_bert(normed: bool = False, counting: bool = False) -> nn.Module:
    """Return the tiny BERT with the buffers of another activation.

    A live model with that activation claims to be rebuilt by it.
    """
    model: Any = tiny.bert(dropout=0.1)
    if normed:
        norm = nn.BatchNorm1d(tiny.HIDDEN, affine=False)
        model.bert.pooler.activation = nn.Sequential(norm, nn.Tanh())
    if counting:
        model.bert.pooler.activation.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)
    return model  # type: ignore[no-any-return]


def said_to_be_plain(model: nn.Module, **arguments: bool) -> nn.Module:
    """Return a model of which the audit is told that `plain_bert` makes it."""
    return rebuilt_by(model, "tests.support.in_place_cases:plain_bert", **arguments)


@contextlib.contextmanager
def without_audit(monkeypatch: Any) -> Iterator[None]:
    """Switch the audit off."""
    with monkeypatch.context() as off:
        off.setenv(OFF_SWITCH, "1")
        yield
