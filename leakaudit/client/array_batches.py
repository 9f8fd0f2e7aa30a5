"""Batches and public facts of array classifiers, in the form of text batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from leakaudit.client.facts import PublicFacts
from leakaudit.client.truth import MicroBatch
from leakaudit.errors import DataError
from leakaudit.models.array_classifier import ArrayClassifier
from leakaudit.models.structure import dropout_rates
from leakaudit.models.tensors import tied_names
from leakaudit.models.vocabulary import Vocabulary


def array_batch(inputs: Tensor, labels: Tensor) -> MicroBatch:
    """Return a micro-batch of arrays.

    Args:
        inputs: (B, ...) float32.
        labels: (B,) int64.

    Raises:
        DataError: there is no example, or not one label for each example.
    """
    if len(inputs) == 0 or labels.shape != (len(inputs),):
        raise DataError(
            f"a batch is at least one example with one label each; got {len(inputs)} examples and labels {tuple(labels.shape)}"
        )
    return MicroBatch(inputs={"inputs": inputs, "labels": labels, "input_ids": no_tokens(len(inputs))})


def no_tokens(examples: int) -> Tensor:
    """Return the empty token ids of examples without text: (B, 0) int64."""
    return torch.empty(examples, 0, dtype=torch.long)


def array_facts(
    model: ArrayClassifier,
    input_shape: Sequence[int],
    *,
    training: bool,
    frozen: frozenset[str] = frozenset(),
    **more: Any,
) -> PublicFacts:
    """Return the public facts of a step of an array classifier.

    All parameters except `frozen` are shared.
    """
    names = [name for name, _ in model.named_parameters()]
    return PublicFacts(
        task="classification",
        num_labels=model.num_labels,
        training_mode=training,
        dropout=dropout_rates(model.named_modules()),
        shared=tuple(name for name in names if name not in frozen),
        frozen=tuple(name for name in names if name in frozen),
        tied=tied_names(model),
        vocabulary=Vocabulary(size=0, max_length=0),
        input_shape=tuple(input_shape),
        **more,
    )
