"""One training under a defence, which changes the gradient of each step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.audit.frontier.evaluation import Outcomes, outcomes_of
from leakaudit.audit.simulation.examples import Example, Fields, read_data
from leakaudit.audit.simulation.texts import MAX_LENGTH, examples_of, number_of_labels, start_of
from leakaudit.client.batches import make_batch, public_facts, with_random_state
from leakaudit.client.facts import PublicFacts
from leakaudit.client.observation import Update, check_finite
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import MicroBatch, Truth
from leakaudit.config.client_optimizer import parse_optimizer
from leakaudit.config.frontier import Trainings
from leakaudit.config.simulation import Simulation
from leakaudit.errors import DataError, NonFiniteUpdateError
from leakaudit.models.loading import load_tokenizer
from leakaudit.models.vocabulary import vocabulary_of
from leakaudit.plugins.defense_protocol import Defense
from leakaudit.plugins.error_feedback import SentInOrder

EVAL_BATCH = 32
"""Texts of a batch of the evaluation. Our choice: it changes the speed only."""

SHARE_HELD_OUT = 10
"""One row of so many is held out for a choice, and one for the evaluation if it has no file of its own. Our choice: the usual tenth."""


@dataclass(frozen=True)
class Rows:
    """The rows of a frontier's data, in parts that do not overlap."""

    train: Sequence[Example]
    choice: Sequence[Example]
    """Rows on which learning rates and strengths are chosen, so that the evaluation stays untouched by the choice."""
    evaluation: Sequence[Example]

    @classmethod
    def of(cls, what: Simulation, trainings: Trainings) -> Rows:
        """Read and split the rows. The split is the same for every seed.

        Raises:
            DataError: a file cannot be read, a label is missing, or there are too few rows for one batch.
        """
        read = examples_of(what)
        rows = list(read.rows)
        random.Random(0).shuffle(rows)
        tenth = max(1, len(rows) // SHARE_HELD_OUT)
        choice, rest = rows[:tenth], rows[tenth:]
        if trainings.eval is None:
            evaluation, rest = rest[:tenth], rest[tenth:]
        else:
            evaluation = list(
                read_data(trainings.eval, what.task, Fields(what.text_field, what.label_field), read).rows
            )
        if len(rest) < trainings.train_batch_size:
            raise DataError(
                f"{what.data}: {len(rest)} of {len(rows)} rows are left for training, fewer than one batch of "
                f"{trainings.train_batch_size}; give more rows or a smaller --train-batch-size"
            )
        return cls(rest, choice, evaluation)


@dataclass(frozen=True)
class Trained:
    """What a training gave."""

    diverged_at: int | None = None
    """Step, counted from 1, at which a number was not finite; None if the training ended well."""
    choice: Outcomes | None = None
    evaluation: Outcomes | None = None


class Trainer:
    """A maker of trainings that differ in their defence and seed only."""

    def __init__(self, what: Simulation, trainings: Trainings, device: torch.device) -> None:
        """Read data and tokenizer.

        Raises:
            DataError, ModelError: something is missing or does not fit.
        """
        self.what = what
        self.trainings = trainings
        self.device = device
        self.check: Callable[[], None] = lambda: None
        """Called before every training step; it may raise to stop the work."""
        self.rows = Rows.of(what, trainings)
        self.tokenizer = load_tokenizer(what.model)
        every = (*self.rows.train, *self.rows.choice, *self.rows.evaluation)
        self._labels = number_of_labels(what, every)

    def start(self, seed: int) -> Run:
        """Load the model of a seed before its first step."""
        model, frozen = start_of(replace(self.what, seed=seed), self._labels)
        return Run(self, model.to(self.device), frozen, seed)

    def batch(self, rows: Sequence[Example]) -> MicroBatch:
        """Tokenise rows into one micro-batch on the CPU."""
        labels = [row.label for row in rows if row.label is not None]
        return make_batch(self.tokenizer, [row.text for row in rows], labels, self.what.task, self._longest)

    @cached_property
    def _longest(self) -> int:
        model, _ = start_of(self.what, self._labels)
        return min(MAX_LENGTH, vocabulary_of(self.tokenizer, model).max_length)

    def batches_of(self, seed: int) -> Iterator[MicroBatch]:
        """Yield training batches without an end; each pass has an order of its own.

        Rows that do not fill a batch are left out of a pass. With dropout, every batch has a random state of its own.
        """
        size, rng, rows, number = self.trainings.train_batch_size, random.Random(seed), list(self.rows.train), 0
        while True:
            rng.shuffle(rows)
            for start in range(0, len(rows) - size + 1, size):
                batch = self.batch(rows[start : start + size])
                yield with_random_state(batch, 1_000_003 * seed + number) if self.what.mode == "train" else batch
                number += 1

    def train(self, defense: Defense | None, seed: int, steps: int, rate: float) -> Trained:
        """Train a model from its start and measure it.

        Args:
            defense: changes every gradient; None trains without one.
            seed: of a fresh head, the order of the data, dropout and the noise of the defence.
            steps: optimizer steps.
            rate: learning rate.

        Raises:
            SnapshotError, ValueError: the defence does not fit this training.
        """
        run = self.start(seed)
        optimizer, rng = run.optimizer(rate), torch.Generator().manual_seed(seed)
        batches = self.batches_of(seed)
        for number in range(1, steps + 1):
            try:
                run.advance(next(batches), defense, rng, optimizer)
            except NonFiniteUpdateError:
                return Trained(diverged_at=number)
        choice, evaluation = run.measure(self.rows.choice), run.measure(self.rows.evaluation)
        if not (choice.is_finite and evaluation.is_finite):
            return Trained(diverged_at=steps)
        return Trained(choice=choice, evaluation=evaluation)


@dataclass(frozen=True)
class Run:
    """A model in training."""

    trainer: Trainer
    model: nn.Module
    frozen: frozenset[str]
    seed: int
    left: dict[str, Tensor] = field(default_factory=dict)
    """What a defence with error feedback dropped from earlier updates."""

    @cached_property
    def facts(self) -> PublicFacts:
        """Public facts of every step."""
        what = self.trainer.what
        return public_facts(
            self.model,
            self.trainer.tokenizer,
            task=what.task,
            training=what.mode == "train",
            frozen=self.frozen,
            max_grad_norm=what.max_grad_norm,
        )

    def optimizer(self, rate: float) -> torch.optim.Optimizer:
        """Return a new optimizer of the trained parameters."""
        options = parse_optimizer(self.trainer.trainings.train_optimizer)
        shared = [parameter for name, parameter in self.model.named_parameters() if name not in self.frozen]
        made: Any = getattr(torch.optim, options.algorithm)
        optimizer: torch.optim.Optimizer = made(shared, lr=rate, **options.options())
        return optimizer

    def sent(self, batch: MicroBatch, defense: Defense | None, rng: torch.Generator) -> Update:
        """Return the gradient of a batch as a client under a defence sends it.

        The defence gets the same step as in an audit, so what is trained with is what is attacked.

        Raises:
            NonFiniteUpdateError: the gradient, or what is sent, is not finite.
            SnapshotError, ValueError: the defence does not fit this step.
        """
        what = self.trainer.what
        recipe = StepRecipe(training=what.mode == "train", max_grad_norm=what.max_grad_norm)
        step = ClientStep(self.model, Truth((batch,)).to(self.trainer.device), recipe, self.facts)
        seen = step.observe()
        if defense is None:
            return seen.update
        if defense.error_feedback:  # one step alone does not know what earlier ones dropped
            sent = SentInOrder(defense, self.left).send_part(seen.update, defense.chosen(self.model), rng)
        else:
            sent = defense(step, seen, rng).update
        check_finite(sent)
        return sent

    def advance(
        self, batch: MicroBatch, defense: Defense | None, rng: torch.Generator, optimizer: torch.optim.Optimizer
    ) -> Update:
        """Take one optimizer step with what is sent, and return what was sent.

        A parameter that the defence withholds does not change.
        """
        self.trainer.check()
        sent = self.sent(batch, defense, rng)
        for name, parameter in self.model.named_parameters():
            parameter.grad = sent[name].to(parameter) if name in sent else None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return sent

    def measure(self, rows: Sequence[Example]) -> Outcomes:
        """Return what the model does on rows that it was not trained on."""
        batches = [
            Truth((self.trainer.batch(rows[start : start + EVAL_BATCH]),)).to(self.trainer.device).micro_batches[0]
            for start in range(0, len(rows), EVAL_BATCH)
        ]
        return outcomes_of(self.model, batches, self.trainer.what.task)
