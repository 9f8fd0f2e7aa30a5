"""Simulated client steps on texts, from a model, a data file and a seed.

Measurements of attacks use such steps.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.audit.simulation.clients import client_optimizer, take_rounds
from leakaudit.audit.simulation.examples import Example, Examples, Fields, read_data, read_examples
from leakaudit.audit.simulation.tables import content_of
from leakaudit.client.batches import make_batch, public_facts, with_random_state
from leakaudit.client.facts import Granted
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.snapshot import Provenance, Snapshot
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import MicroBatch, Truth
from leakaudit.config.secret_book import SecretBook, check_tokenizer, simulated_record
from leakaudit.config.secret_template import SecretTemplate
from leakaudit.config.simulation import Simulation
from leakaudit.errors import ConfigError, DataError
from leakaudit.models.loading import classes_of_head, load_model, load_tokenizer
from leakaudit.models.lora import add_lora, below_adapters
from leakaudit.models.recipe import ModelRecipe
from leakaudit.models.vocabulary import vocabulary_of
from leakaudit.results.wording import counted

__all__ = [
    "MAX_LENGTH", "Example", "Simulator", "batches", "examples_of", "frozen_parameters", "number_of_labels", "read_examples", "source_digest",
    "start_of",
]  # fmt: skip

MAX_LENGTH = 512
"""Largest number of tokens of a sequence, unless the model accepts fewer; trainers of BERT-like encoders use it."""


def batches(examples: Sequence[Example], batch_size: int, steps: int, seed: int) -> list[list[Example]]:
    """Return up to `steps` full batches of rows after a seeded shuffle.

    Raises:
        DataError: the rows are fewer than one full batch.
    """
    shuffled = list(examples)
    random.Random(seed).shuffle(shuffled)
    full = [shuffled[start : start + batch_size] for start in range(0, len(shuffled) - batch_size + 1, batch_size)]
    if not full:
        raise DataError(f"the data has {len(examples)} rows, fewer than one batch of {batch_size}")
    return full[:steps]


def frozen_parameters(model: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    """Return the names of the parameters that `--freeze` leaves out of the update.

    Raises:
        ConfigError: a pattern matches no parameter, or no parameter would be shared.
    """
    names = [name for name, _ in model.named_parameters()]
    tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    frozen: set[str] = set()
    for pattern in patterns:
        matched = tables & set(names) if pattern == "embeddings" else set(fnmatch.filter(names, pattern))
        if not matched:
            raise ConfigError(
                f"--freeze {pattern}: matches no parameter; write `embeddings` or a pattern like {names[0]!r}"
            )
        frozen |= matched
    if len(frozen) == len(names):
        raise ConfigError("--freeze leaves no parameter to share, so there is no update to attack")
    return frozenset(frozen)


def examples_of(what: Simulation) -> Examples:
    """Read the data of a simulation.

    Raises:
        DataError: they cannot be read.
    """
    return read_data(what.data, what.task, Fields(what.text_field, what.label_field))


def number_of_labels(what: Simulation, examples: Sequence[Example]) -> int:
    """Return the number of classes.

    It is `--num-labels`; else that of the classifier stored with the model; else what the data has.

    Raises:
        DataError: the data has a larger label.
    """
    largest = max((example.label for example in examples if example.label is not None), default=1)
    stored = classes_of_head(what.model) if what.task == "classification" else None
    if what.num_labels is not None:
        if largest >= what.num_labels:
            raise DataError(
                f"{what.data}: has a label {largest}, but --num-labels is {what.num_labels}; give at least {largest + 1}"
            )
        return what.num_labels
    if stored is None:
        return max(2, largest + 1)
    if largest >= stored:
        raise DataError(
            f"{what.data}: has a label {largest}, and the classifier in {what.model} has {counted(stored, 'class', 'classes')}: its labels go "
            f"from 0 to {stored - 1}; give the data that it was made for, or a model without a classifier"
        )
    return stored


def start_of(what: Simulation, labels: int) -> tuple[nn.Module, frozenset[str]]:
    """Load the model before its first step, with its adapters.

    Args:
        what: options of the simulation.
        labels: number of classes of a classifier.

    Returns:
        The model, and the names of the parameters that are not trained.

    Raises:
        ModelError, ConfigError: the model cannot be loaded, or an option does not fit it.
    """
    model = load_model(what.model, what.task, num_labels=labels, seed=what.seed)
    frozen = frozenset[str]()
    if what.lora_rank is not None:
        add_lora(model, what.lora_rank, what.lora_targets, seed=what.seed)
        frozen = below_adapters(model)
    frozen |= frozen_parameters(model, what.freeze)
    if not {name for name, _ in model.named_parameters()} - frozen:
        raise ConfigError("--freeze leaves no parameter to share, so there is no update to attack")
    return model, frozen


def source_digest(what: Any, model: nn.Module, tokenizer: str = "") -> str:
    """Return the SHA-256 of all that simulated steps depend on.

    It does not depend on the places of the files.

    Args:
        what: a `Simulation` or `ArraySimulation`; the content of its data file counts, its path does not.
        model: the model before the first step.
        tokenizer: facts about the tokenizer.
    """
    options = {
        field.name: repr(getattr(what, field.name)) for field in fields(what) if field.name not in ("model", "data")
    }
    digest = hashlib.sha256(json.dumps([options, tokenizer, _architecture(model)], default=str).encode())
    digest.update(content_of(what.data))
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _architecture(model: nn.Module) -> dict[str, Any]:
    """Return a model's configuration without the place that it was loaded from."""
    config: Any = getattr(model, "config", None)
    found: dict[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {}
    return {key: value for key, value in found.items() if key != "_name_or_path"}


class Simulator:
    """Maker of the snapshots of a simulation, one client step at a time."""

    def __init__(self, what: Simulation) -> None:
        """Load model, tokenizer and data.

        Raises:
            ModelError, DataError, ConfigError: something is missing or does not fit.
        """
        self.what = what
        self.read = examples_of(what)
        """What the data file holds."""
        examples = self.read.rows
        size = what.batch_size * what.local_steps * what.clients * what.window
        self.batches = batches(examples, size, what.steps, what.seed)
        labels = number_of_labels(what, examples)
        self.tokenizer = load_tokenizer(what.model)
        self.model, self._frozen = start_of(what, labels)
        self._secrets = None if what.secrets is None else self._checked(SecretTemplate.parse(what.secrets))
        public = vocabulary_of(self.tokenizer, self.model).model_dump_json()
        self.digest = source_digest(what, self.model, public + ("" if self._secrets is None else repr(self._secrets)))
        """SHA-256 of all that the steps depend on: options, data, weights and tokenizer; anyone who has the data can compute it."""
        self._shared = frozenset(name for name, _ in self.model.named_parameters()) - self._frozen
        ordered = tuple(name for name, _ in self.model.named_parameters() if name in self._shared)
        self._optimizer = client_optimizer(what.optimizer, what.learning_rate, what.local_steps, ordered)
        self._state = self._earlier_rounds(examples)
        self._recipe = ModelRecipe.of(self.model)

    @property
    def secrets(self) -> SecretBook | None:
        """The secrets in the steps; None if they hold none."""
        if self._secrets is None:
            return None
        drawn = [simulated_record(self._secrets, self.what.seed, step).secret for step in range(len(self))]
        return SecretBook.of(self._secrets, drawn)

    def __len__(self) -> int:
        """Return the number of steps for which there is data."""
        return len(self.batches)

    def __iter__(self) -> Iterator[Snapshot]:
        """Yield the snapshots in order.

        The weights do not change between steps.
        """
        for index in range(len(self)):
            yield self.snapshot(index)

    def _checked(self, template: SecretTemplate) -> SecretTemplate:
        """Return a template whose values the tokenizer tells apart.

        Raises:
            ConfigError: it does not.
        """
        longest = min(MAX_LENGTH, vocabulary_of(self.tokenizer, self.model).max_length)

        def read(text: str) -> str:
            ids = self.tokenizer(text, truncation=True, max_length=longest)["input_ids"]
            return str(self.tokenizer.decode(ids, skip_special_tokens=True))

        check_tokenizer(template, read)
        return template

    def _rows(self, index: int) -> list[Example]:
        """Return the rows of a step; a record with a secret replaces the first one."""
        rows = self.batches[index]
        if self._secrets is None:
            return rows
        record = simulated_record(self._secrets, self.what.seed, index)
        return [replace(rows[0], text=record.text, entities=None), *rows[1:]]

    def _batch(self, rows: Sequence[Example], turn: int) -> MicroBatch:
        """Return one micro-batch; in training mode it has its own random state."""
        what = self.what
        labels = [example.label for example in rows if example.label is not None]
        longest = min(MAX_LENGTH, vocabulary_of(self.tokenizer, self.model).max_length)
        batch = make_batch(self.tokenizer, [example.text for example in rows], labels, what.task, longest)
        if any(example.entities is not None for example in rows):
            batch = replace(batch, entities=tuple(example.entities for example in rows))
        return with_random_state(batch, 1_000_003 * what.seed + turn) if what.mode == "train" else batch

    def _earlier_rounds(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Train for the rounds before the audit; return the optimizer's state after them.

        They use batches from the end of the shuffled data; the audited steps use batches from its start.
        """
        what = self.what
        keeps_moments = self._optimizer is not None and not self._optimizer.fresh
        rounds = what.lora_warmup or int(keeps_moments)
        if not rounds:
            return {}
        rows = batches(examples, what.batch_size, len(examples), what.seed)[::-1]

        def add_gradient(number: int) -> None:
            self.model(**self._batch(rows[number % len(rows)], number).inputs).loss.backward()
            if what.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(
                    [p for name, p in self.model.named_parameters() if name in self._shared], what.max_grad_norm
                )

        self.model.train(what.mode == "train")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(what.seed)
            state = take_rounds(self.model, self._optimizer, self._shared, add_gradient, rounds)
        self.model.eval()
        return state

    def snapshot(self, index: int) -> Snapshot:
        """Return one step; equal indices give equal steps.

        Args:
            index: number of the step, counted from 0.
        """
        what, rows = self.what, self._rows(index)
        training = what.mode == "train"
        sends: dict[str, Any] = {}
        if what.learning_rate is not None:
            sends = {"view": "delta", "local_steps": what.local_steps, "learning_rate": what.learning_rate}
            sends["optimizer"] = self._optimizer
        elif what.clients > 1:
            sends = {"view": "reduced"}
        facts = public_facts(
            self.model,
            self.tokenizer,
            task=what.task,
            training=training,
            frozen=self._frozen,
            max_grad_norm=what.max_grad_norm,
            **sends,
        )
        labels = [example.label for example in rows if example.label is not None]
        size, passes = what.batch_size, what.local_steps * what.clients * what.window
        truth = Truth(
            tuple(self._batch(rows[k * size : (k + 1) * size], index * passes + k) for k in range(passes)),
            optimizer_state=self._state,
        )
        recipe = StepRecipe(
            training=training, max_grad_norm=what.max_grad_norm, processes=what.clients, window=what.window
        )
        observation = ClientStep(self.model, truth, recipe, facts).observe()
        return Snapshot(
            observation=observation.granting(Granted.of(truth.sequences(), labels, what.grant)),
            truth=truth,
            recipe=recipe,
            model_recipe=self._recipe,
            provenance=Provenance(
                framework="simulate",
                step=index,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                learning_rate=what.learning_rate,
            ),
        )
