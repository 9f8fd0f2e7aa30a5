"""Simulated client steps of classifiers of pictures or tables.

An `nn.Module`, a file of arrays and a seed determine the steps. Attacks on them only guess labels.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from leakaudit.audit.simulation.clients import client_optimizer
from leakaudit.audit.simulation.texts import frozen_parameters, source_digest
from leakaudit.client.array_batches import array_batch, array_facts
from leakaudit.client.batches import with_random_state
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.snapshot import Provenance, Snapshot
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import Truth
from leakaudit.config.client_optimizer import parse_optimizer
from leakaudit.config.simulation import MAX_CLASSES
from leakaudit.errors import ConfigError, DataError
from leakaudit.models.array_classifier import ArrayClassifier, NoText, array_recipe, load_auxiliary


@dataclass(frozen=True)
class ArraySimulation:
    """Options of a simulation on arrays."""

    model: nn.Module | str
    """A classifier of (B, ...) float32 arrays that returns (B, C) logits, an `ArrayClassifier` with a loss of its own, or
    `package.module:function` that returns one of the two."""
    data: Path
    """A file as `leakaudit.models.save_auxiliary` writes it: `inputs/inputs` (N, ...) float32 and `labels` (N,) int64."""
    num_labels: int | None = None
    """Number C of classes; None means the largest label of the data plus one, and at least 2."""
    batch_size: int = 1
    steps: int = 10
    seed: int = 0
    """Seed of the shuffle, of the dropout masks, and of a model that a function makes."""
    mode: Literal["eval", "train"] = "eval"
    freeze: tuple[str, ...] = ()
    """Patterns of parameter names, which begin with `net.`."""
    local_steps: int = 1
    learning_rate: float | None = None
    """Learning rate of the local steps; None means that the client sends the gradient of one step instead."""
    optimizer: str | None = None
    """Optimizer of the local steps, as in `leakaudit simulate --optimizer`; None for plain SGD. It begins every round anew."""
    max_grad_norm: float | None = None
    """L2 norm to which every gradient is clipped; None for no clipping."""

    def __post_init__(self) -> None:
        """Refuse invalid sizes, and local steps without a learning rate."""
        if min(self.batch_size, self.steps, self.local_steps) < 1:
            raise ConfigError(
                "batch size, steps and local steps are at least 1, got "
                f"{self.batch_size}, {self.steps} and {self.local_steps}"
            )
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise ConfigError(f"the learning rate is above 0, got {self.learning_rate:g}")
        if self.local_steps > 1 and self.learning_rate is None:
            raise ConfigError(
                f"{self.local_steps} local steps need a learning rate: what a client sends is a difference of weights"
            )
        if self.optimizer is not None and not parse_optimizer(self.optimizer).fresh:
            raise ConfigError(
                f"--optimizer {self.optimizer}: simulated clients of arrays keep no moments; set fresh=true"
            )
        if self.optimizer is not None and self.learning_rate is None:
            raise ConfigError(
                f"--optimizer {self.optimizer} needs --learning-rate: what a client sends is a difference of weights"
            )


class ArraySimulator:
    """Maker of the snapshots of a simulation.

    It has the same methods as `leakaudit.audit.simulation.texts.Simulator`.
    """

    def __init__(self, what: ArraySimulation) -> None:
        """Load the model and the data.

        Raises:
            ConfigError, DataError: something is missing or does not fit.
        """
        self.what = what
        self.tokenizer = NoText()
        inputs, self._labels = load_auxiliary(what.data)
        if "inputs" not in inputs:
            raise DataError(f"the data holds {', '.join(sorted(inputs))}; a classifier of arrays takes `inputs`")
        self._inputs = inputs["inputs"].float()
        if len(self._labels) == 0:
            raise DataError("the data holds no examples")
        if int(self._labels.max()) >= MAX_CLASSES:
            raise DataError(
                f"the data has a label above {MAX_CLASSES - 1:,}, the largest class that is taken; renumber the classes from 0 "
                "without gaps"
            )
        classes = what.num_labels or max(2, int(self._labels.max()) + 1)
        if int(self._labels.min()) < 0 or int(self._labels.max()) >= classes:
            raise DataError(
                f"the data has labels outside 0 to {classes - 1}; give the number of classes that the model has"
            )
        self.model = _classifier(what, classes)
        self._check_output()
        self.digest = source_digest(what, self.model)
        """SHA-256 of all that the steps depend on: options, data and weights; anyone who has the data can compute it."""
        self._frozen = frozen_parameters(self.model, what.freeze)
        order = list(range(len(self._labels)))
        random.Random(what.seed).shuffle(order)
        size = what.batch_size * what.local_steps
        self._batches = [order[start : start + size] for start in range(0, len(order) - size + 1, size)][: what.steps]
        if not self._batches:
            raise DataError(f"the data has {len(order)} examples, fewer than one batch of {size}")

    def _check_output(self) -> None:
        try:
            with torch.no_grad():
                shape = tuple(self.model(self._inputs[:1]).logits.shape)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the model does not take inputs of shape {tuple(self._inputs.shape[1:])}: {type(error).__name__}"
            ) from None
        if shape != (1, self.model.num_labels):
            raise ConfigError(
                f"the model gives {shape} for one example; a classifier gives (1, {self.model.num_labels}), a logit a class"
            )

    def __len__(self) -> int:
        """Return the number of steps for which there is data."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Snapshot]:
        """Yield the snapshots in order.

        The weights do not change between steps.
        """
        for index in range(len(self)):
            yield self.snapshot(index)

    def snapshot(self, index: int) -> Snapshot:
        """Return one step; equal indices give equal steps.

        Args:
            index: number of the step, counted from 0.
        """
        what, training, rows = self.what, self.what.mode == "train", self._batches[index]
        made = []
        for turn in range(what.local_steps):
            part = torch.tensor(rows[turn * what.batch_size : (turn + 1) * what.batch_size])
            batch = array_batch(self._inputs[part], self._labels[part])
            seed = 1_000_003 * what.seed + index * what.local_steps + turn
            made.append(with_random_state(batch, seed) if training else batch)
        more: dict[str, Any] = {"batch_size_bound": what.batch_size, "max_grad_norm": what.max_grad_norm}
        if what.learning_rate is not None:
            more |= {"view": "delta", "local_steps": what.local_steps, "learning_rate": what.learning_rate}
            shared = tuple(name for name, _ in self.model.named_parameters() if name not in self._frozen)
            more["optimizer"] = client_optimizer(what.optimizer, what.learning_rate, what.local_steps, shared)
        facts = array_facts(self.model, self._inputs.shape[1:], training=training, frozen=self._frozen, **more)
        truth, recipe = Truth(tuple(made)), StepRecipe(training=training, max_grad_norm=what.max_grad_norm)
        return Snapshot(
            observation=ClientStep(self.model, truth, recipe, facts).observe(),
            truth=truth,
            recipe=recipe,
            model_recipe=array_recipe(self.model),
            provenance=Provenance(
                framework="simulate",
                step=index,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                learning_rate=what.learning_rate,
            ),
        )


def _classifier(what: ArraySimulation, classes: int) -> ArrayClassifier:
    made: Any = what.model
    if isinstance(made, str):
        module, colon, name = made.partition(":")
        try:
            maker = getattr(importlib.import_module(module), name) if colon else None
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"--model {made}: cannot be imported ({type(error).__name__})") from None
        if not callable(maker):
            raise ConfigError(
                f"--model {made}: write `package.module:function` for a function that makes the classifier"
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(what.seed)
            made = maker()
    if not isinstance(made, nn.Module):
        raise ConfigError(f"the classifier is a {type(made).__name__}, not an nn.Module")
    model = made if isinstance(made, ArrayClassifier) else ArrayClassifier(made, classes)
    return model.eval()
