"""Classifiers of images and tables: any `nn.Module` that turns arrays into logits, as a client's model.

Text models of `transformers` bring their own loss and their own way of being called. `ArrayClassifier` gives both to every
other classifier, so that client steps, verification, defences and label attacks treat it alike.

A batch of arrays has no tokens. Its micro-batches carry an empty `input_ids` of shape (B, 0) beside `inputs`: B sequences of
nothing, which is what the rest of the house then sees of its text.

Letters: B examples, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from leakaudit.errors import DataError
from leakaudit.models import ModelRecipe, Vocabulary
from leakaudit.snapshot import MicroBatch, PublicFacts, dropout_rates


class Classified(dict[str, Tensor]):
    """What a classifier's forward pass gives, by name: `logits` (B, C) and, with labels, the scalar `loss`.

    A mapping with attributes, as in `transformers`: the recorder and private SGD walk over a model's outputs by name.
    """

    @property
    def logits(self) -> Tensor:
        """(B, C)."""
        return self["logits"]

    @property
    def loss(self) -> Tensor | None:
        """Scalar; None without labels."""
        return self.get("loss")


class ArrayClassifier(nn.Module):
    """A classifier of arrays with its loss, called like a model of `transformers`."""

    def __init__(
        self, net: nn.Module, input_shape: Sequence[int], num_labels: int, criterion: nn.Module | None = None
    ) -> None:
        """Wrap a classifier.

        Args:
            net: (B, *input_shape) float32 -> (B, C).
            input_shape: of one example.
            num_labels: C.
            criterion: the loss of (logits, labels) that the protocol prescribes; mean cross-entropy if None.
        """
        super().__init__()
        self.net = net
        self.criterion = nn.CrossEntropyLoss() if criterion is None else criterion
        self.input_shape = tuple(input_shape)
        self.num_labels = num_labels

    def forward(self, inputs: Tensor, labels: Tensor | None = None, **_: Any) -> Classified:
        """Classify (B, *input_shape); what else a batch holds is not read."""
        logits = self.net(inputs)
        return (
            Classified(logits=logits)
            if labels is None
            else Classified(loss=self.criterion(logits, labels), logits=logits)
        )


def array_batch(inputs: Tensor, labels: Tensor) -> MicroBatch:
    """Return a micro-batch of arrays.

    Args:
        inputs: (B, ...) float32.
        labels: (B,) int64.

    Raises:
        DataError: there is no example, or not one label each.
    """
    if len(inputs) == 0 or labels.shape != (len(inputs),):
        raise DataError(
            f"a batch is at least one example with one label each; got {len(inputs)} examples and labels {tuple(labels.shape)}"
        )
    nothing = torch.empty(len(inputs), 0, dtype=torch.long)
    return MicroBatch(inputs={"inputs": inputs, "labels": labels, "input_ids": nothing})


def array_facts(
    model: ArrayClassifier, *, training: bool, frozen: frozenset[str] = frozenset(), **more: Any
) -> PublicFacts:
    """Describe what everybody knows about a step of an array classifier in which all parameters but `frozen` are shared."""
    names = [name for name, _ in model.named_parameters()]
    return PublicFacts(
        task="classification",
        num_labels=model.num_labels,
        training_mode=training,
        dropout=dropout_rates(model.named_modules()),
        shared=tuple(name for name in names if name not in frozen),
        frozen=tuple(name for name in names if name in frozen),
        vocabulary=Vocabulary(size=0, max_length=0),
        **more,
    )


class NoText:
    """Stands where a tokenizer would: batches of arrays have no tokens to decode."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """Return the text of no tokens."""
        return ""

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return no tokens."""
        return []


def array_recipe(model: ArrayClassifier) -> ModelRecipe:
    """Return what a report says about the model. It names the class; it cannot rebuild the model in another process."""
    return ModelRecipe(class_name=type(model.net).__name__, config={"input_shape": list(model.input_shape)})


def save_auxiliary(path: Path, inputs: Mapping[str, Tensor], labels: Tensor) -> None:
    """Write labelled data that a threat model grants to attacks such as `llg-plus`.

    Args:
        path: a safetensors file.
        inputs: keyword arguments of the model's forward, each (N, ...); for text `input_ids` and `attention_mask`.
        labels: (N,) int64.
    """
    save_file({"labels": labels.contiguous()} | {f"inputs/{k}": v.contiguous() for k, v in inputs.items()}, path)


def load_auxiliary(path: Path) -> tuple[dict[str, Tensor], Tensor]:
    """Read what `save_auxiliary` wrote.

    Returns:
        The model's keyword arguments, each (N, ...), and (N,) labels.

    Raises:
        DataError: there is no such file, or it is another one.
    """
    try:
        tensors = load_file(path)
        labels = tensors["labels"]
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; `leakaudit.classifiers.save_auxiliary` writes one") from None
    except (SafetensorError, OSError, KeyError) as error:
        raise DataError(f"{path}: not readable as auxiliary data ({type(error).__name__})") from None
    inputs = {key.removeprefix("inputs/"): value for key, value in tensors.items() if key.startswith("inputs/")}
    if not inputs or any(len(value) != len(labels) for value in inputs.values()):
        raise DataError(f"{path}: auxiliary data are inputs with one label each; found {len(labels)} labels")
    return inputs, labels
