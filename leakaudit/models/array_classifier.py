"""Classifiers of images and tables, as a client's model.

Text models of `transformers` have their own loss and their own signature. `ArrayClassifier` gives both to every other classifier, so
that client steps, verification, defences and label attacks treat all models alike. If a callback watches a training run, the loop still
calls the user's classifier, and the audit sees its parameters as `net.<name>`.

A batch of arrays has no tokens. Its micro-batches have an empty `input_ids` of shape (B, 0) beside `inputs`, so all other packages see B
empty sequences.

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

from leakaudit.errors import DataError, ModelError
from leakaudit.files.private_files import write_atomic
from leakaudit.models.factories import model_factory
from leakaudit.models.loading import load_tokenizer
from leakaudit.models.rebuilding import blank_model
from leakaudit.models.recipe import ModelRecipe

NO_TEXT = "no_text.json"
"""File in the place of a tokenizer's files if batches hold no text."""


LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)
"""Losses that are rebuilt with their options. For other losses only the name is kept, so that an attack can say why it reads no labels."""


class Classified(dict[str, Tensor]):
    """The output of a classifier: `logits` (B, C) and, with labels, the scalar `loss`.

    It is a mapping with attributes, as in `transformers`, because the recorder and private SGD read a model's outputs by name.
    """

    @property
    def logits(self) -> Tensor:
        """Logits (B, C)."""
        return self["logits"]

    @property
    def loss(self) -> Tensor | None:
        """Loss, a scalar; None without labels."""
        return self.get("loss")


class ArrayClassifier(nn.Module):
    """A classifier of arrays with its loss, called like a model of `transformers`."""

    def __init__(self, net: nn.Module, num_labels: int, criterion: nn.Module | None = None) -> None:
        """Wrap a classifier.

        Args:
            net: (B, ...) float32 -> logits (B, C), or an object with the attribute `logits`.
            num_labels: C.
            criterion: the protocol's loss of (logits, labels); None means mean cross-entropy.
        """
        super().__init__()
        self.net = net
        self.criterion = nn.CrossEntropyLoss() if criterion is None else criterion
        self.num_labels = num_labels

    def forward(self, inputs: Tensor, labels: Tensor | None = None, **_: Any) -> Classified:
        """Classify arrays (B, ...); other arguments are ignored."""
        found = self.net(inputs)
        logits: Tensor = found if isinstance(found, Tensor) else found.logits
        return (
            Classified(logits=logits)
            if labels is None
            else Classified(loss=self.criterion(logits, labels), logits=logits)
        )


class NoText:
    """Substitute for a tokenizer: batches of arrays have no tokens to decode."""

    def decode(self, _ids: Sequence[int], **_: Any) -> str:
        """Return an empty text."""
        return ""

    def convert_ids_to_tokens(self, _ids: Sequence[int]) -> list[str]:
        """Return an empty list."""
        return []

    def save_pretrained(self, folder: Path) -> None:
        """Write the file `NO_TEXT` instead of a tokenizer."""
        folder.mkdir(mode=0o700)
        write_atomic(folder / NO_TEXT, "{}\n")


def reader_in(folder: Path) -> Any:
    """Return the tokenizer in a folder, or `NoText` if batches hold no text.

    Raises:
        ModelError: the folder has neither.
    """
    return NoText() if (folder / NO_TEXT).is_file() else load_tokenizer(folder)


def array_recipe(model: ArrayClassifier) -> ModelRecipe:
    """Return the recipe of an array classifier.

    It has no `made_by` if the inner classifier has no recipe.
    """
    name = type(model.net).__name__
    try:
        net = ModelRecipe.of(model.net)
    except ModelError:
        return ModelRecipe(class_name=name)
    made_by = f"{array_classifier.__module__}:{array_classifier.__name__}"
    arguments = {
        "net": net.model_dump(mode="json"),
        "num_labels": model.num_labels,
        "criterion": _described(model.criterion),
    }
    return ModelRecipe(class_name=name, made_by=made_by, arguments=arguments)


@model_factory
def array_classifier(net: dict[str, Any], num_labels: int, criterion: dict[str, Any]) -> nn.Module:
    """Make an array classifier from the arguments that `array_recipe` returns.

    The caller loads the weights afterwards.
    """
    return ArrayClassifier(blank_model(ModelRecipe.model_validate(net)), num_labels, _loss(criterion, num_labels))


def public_loss(criterion: nn.Module, num_labels: int) -> nn.Module:
    """Return the part of a loss that attacks know.

    Attacks know the options of the losses in `LOSSES`, and only the name of any other loss.
    """
    return criterion if isinstance(criterion, LOSSES) else _loss(_described(criterion), num_labels)


def _described(criterion: nn.Module) -> dict[str, Any]:
    """Return a loss as plain data.

    Class weights are a buffer, so they are stored with the weights.
    """
    options = ("label_smoothing", "reduction", "ignore_index") if isinstance(criterion, LOSSES) else ()
    described = {name: getattr(criterion, name) for name in options if hasattr(criterion, name)}
    weighted = isinstance(criterion, LOSSES) and criterion.weight is not None
    return {"loss": type(criterion).__name__, "weighted": weighted, "options": described}


def _loss(described: Mapping[str, Any], num_labels: int) -> nn.Module:
    """Rebuild a loss; an unknown loss becomes an empty module with its name."""
    name = described["loss"]
    for kind in LOSSES:
        if kind.__name__ == name:
            return kind(weight=torch.ones(num_labels) if described["weighted"] else None, **described["options"])
    known = getattr(nn, name, None)
    base = known if isinstance(known, type) and issubclass(known, nn.modules.loss._Loss) else nn.Module
    stand_in: nn.Module = type(name, (base,), {"forward": _not_computed})()
    return stand_in


def _not_computed(self: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
    raise NotImplementedError(f"of the loss {type(self).__name__} only its name is known")


def save_auxiliary(path: Path, inputs: Mapping[str, Tensor], labels: Tensor) -> None:
    """Write labelled data that a threat model grants to attacks such as `llg-plus`.

    Args:
        path: path of the safetensors file.
        inputs: keyword arguments of the model's forward, each (N, ...); for text `input_ids` and `attention_mask`.
        labels: (N,) int64.
    """
    save_file({"labels": labels.contiguous()} | {f"inputs/{k}": v.contiguous() for k, v in inputs.items()}, path)


def load_auxiliary(path: Path) -> tuple[dict[str, Tensor], Tensor]:
    """Read the data that `save_auxiliary` wrote.

    Returns:
        The model's keyword arguments, each (N, ...), and (N,) labels.

    Raises:
        DataError: the file does not exist, or it holds other content.
    """
    try:
        tensors = load_file(path)
        labels = tensors["labels"]
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; `leakaudit.models.save_auxiliary` writes one") from None
    except (SafetensorError, OSError, KeyError) as error:
        raise DataError(f"{path}: not readable as auxiliary data ({type(error).__name__})") from None
    if labels.dim() != 1 or labels.is_floating_point() or labels.dtype is torch.bool:
        raise DataError(
            f"{path}: `labels` is a {str(labels.dtype).removeprefix('torch.')} tensor of shape {tuple(labels.shape)}; "
            "classes are (N,) whole numbers"
        )
    inputs = {key.removeprefix("inputs/"): value for key, value in tensors.items() if key.startswith("inputs/")}
    if not inputs or any(value.dim() == 0 or len(value) != len(labels) for value in inputs.values()):
        raise DataError(f"{path}: auxiliary data are inputs with one label each; found {len(labels)} labels")
    return inputs, labels
