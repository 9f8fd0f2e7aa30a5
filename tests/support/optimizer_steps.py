"""Client steps of every optimizer on small models, as differences of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from leakaudit.client.batches import make_batch, public_facts
from leakaudit.client.local_steps import state_tensors
from leakaudit.client.optimizer import ClientOptimizer, ParameterGroup
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import Truth
from leakaudit.models.loading import Task
from tests.support import tiny

RATE = 1e-3

OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "dampened": {"momentum": 0.9, "dampening": 0.5},
    "maximized": {"momentum": 0.9, "maximize": True, "weight_decay": 0.01},
    "Adam": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "AdamW": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "Adafactor": {},
}
"""Name -> options of the optimizer; the four names after SGD are SGD, too."""


def optimizer(name: str, parameters: Sequence[str], steps: int = 1, *, rate: float = RATE) -> ClientOptimizer:
    """Return a client's optimizer by a name of `OPTIONS`."""
    group = ParameterGroup(parameters=tuple(parameters), learning_rates=(rate,) * steps, options=OPTIONS[name])
    return ClientOptimizer(algorithm=name if name[0] == "A" else "SGD", groups=(group,))


def difference_step(
    name: str,
    batches: Sequence[Sequence[str]],
    labels: Sequence[Sequence[int]] | None = None,
    *,
    model: nn.Module | None = None,
    tokenizer: Any = None,
    task: Task = "classification",
    kept: Sequence[str] | None = None,
    rate: float = RATE,
    frozen: frozenset[str] = frozenset(),
    **facts: Any,
) -> ClientStep:
    """Return the step of a client that sends a difference of weights.

    Args:
        name: of the optimizer, in `OPTIONS`.
        batches: the texts of each local step.
        labels: their classes; all 0 if None.
        model: a small BERT if None.
        tokenizer: of the model.
        task: what the model is trained for.
        kept: texts of an earlier round, whose moments the optimizer kept; None for a new optimizer.
        rate: learning rate.
        frozen: names of parameters without an update.
        facts: further public facts.
    """
    model, tokenizer = model or tiny.bert(), tokenizer or tiny.bert_tokenizer()
    classes = labels or [[0] * len(texts) for texts in batches]
    made = [
        make_batch(tokenizer, list(texts), list(mine), task, tiny.POSITIONS)
        for texts, mine in zip(batches, classes, strict=True)
    ]
    names = [each for each, _ in model.named_parameters() if each not in frozen]
    described = optimizer(name, names, len(batches), rate=rate)
    state = {}
    if kept is not None:
        described = described.model_copy(update={"fresh": False})
        state = _moments(described, model, make_batch(tokenizer, list(kept), [0] * len(kept), task, tiny.POSITIONS))
    public = public_facts(
        model,
        tokenizer,
        task=task,
        training=False,
        frozen=frozen,
        view="delta",
        local_steps=len(batches),
        learning_rate=rate,
        optimizer=None if name == "SGD" else described,
        **facts,
    )
    return ClientStep(model, Truth(tuple(made), optimizer_state=state), StepRecipe(training=False), public)


def _moments(described: ClientOptimizer, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """Return the optimizer's state after one step on a batch; the model moves with it."""
    parameters = {name: p for name, p in model.named_parameters() if name in described.groups[0].parameters}
    mover = described.make(parameters)
    found: Any = model(**batch.inputs)
    found.loss.backward()
    mover.step()
    model.zero_grad(set_to_none=True)
    return {
        path: value.clone() for path, value in state_tensors(mover, {id(p): n for n, p in parameters.items()}).items()
    }
