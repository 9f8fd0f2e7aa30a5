"""Text batches of a client step, and the public facts of the step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from leakaudit.client.facts import PublicFacts
from leakaudit.client.truth import MicroBatch
from leakaudit.errors import DataError
from leakaudit.models.loading import Task
from leakaudit.models.structure import dropout_rates
from leakaudit.models.tensors import dtype_of, tied_names
from leakaudit.models.vocabulary import vocabulary_of


def public_facts(
    model: nn.Module, tokenizer: Any, *, task: Task, training: bool, frozen: frozenset[str] = frozenset(), **more: Any
) -> PublicFacts:
    """Return the public facts of a step on a text model.

    All parameters except `frozen` are shared. `dtype` is that of the model, unless `more` has another.
    """
    names = [name for name, _ in model.named_parameters()]
    more = {"dtype": str(dtype_of(model)).removeprefix("torch."), **more}
    return PublicFacts(
        task=task,
        num_labels=int(model.config.num_labels) if task == "classification" else None,  # type: ignore[union-attr, arg-type]
        training_mode=training,
        dropout=dropout_rates(model.named_modules()),
        shared=tuple(name for name in names if name not in frozen),
        frozen=tuple(name for name in names if name in frozen),
        tied=tied_names(model),
        vocabulary=vocabulary_of(tokenizer, model),
        **more,
    )


def make_batch(tokenizer: Any, texts: list[str], labels: list[int] | None, task: Task, max_length: int) -> MicroBatch:
    """Tokenise texts into one padded micro-batch with labels for the task.

    Args:
        tokenizer: a tokenizer of transformers.
        texts: B texts.
        labels: B classes for classification; ignored for causal-lm, where the labels are the tokens themselves.
        task: decides the labels: classes, or the tokens themselves.
        max_length: largest number of tokens; longer texts are cut, as trainers do.

    Raises:
        DataError: the batch is empty.
    """
    if not texts:
        raise DataError("an empty batch: at least one text is needed for a client step")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    encoded = tokenizer(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
    inputs = {name: encoded[name] for name in ("input_ids", "attention_mask") if name in encoded}
    if "token_type_ids" in encoded:
        inputs["token_type_ids"] = encoded["token_type_ids"]
    if task == "classification":
        inputs["labels"] = torch.tensor(labels, dtype=torch.long)
    else:
        inputs["labels"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    return MicroBatch(inputs=inputs)


def with_random_state(batch: MicroBatch, seed: int) -> MicroBatch:
    """Return the batch with the random state of a seed.

    With it, a simulated step with dropout can be repeated.
    """
    return replace(batch, rng={"cpu": torch.Generator().manual_seed(seed).get_state()})
