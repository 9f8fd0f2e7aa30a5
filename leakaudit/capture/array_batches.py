"""Classifiers of pictures and tables in a training run: what stands in for the model, the tokenizer and the text of their batches.

The loop calls the user's classifier, and hooks see what goes in and out of it. Here that is put into the words of `ArrayClassifier`,
by which the side process makes it again: its array is `inputs`, its output `logits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from leakaudit.client.array_batches import no_tokens
from leakaudit.client.truth import MicroBatch
from leakaudit.config.audit import LABEL_ATTACKS, AuditConfig
from leakaudit.errors import SnapshotError
from leakaudit.models.array_classifier import ArrayClassifier, public_loss
from leakaudit.models.wrappers import unwrapped

LABELS = "labels"


def labels_only(net: nn.Module, num_labels: int, criterion: nn.Module | None = None) -> ArrayClassifier:
    """Return what is audited of a classifier of arrays; its parameters are those of the live one.

    Args:
        net: as the loop calls it, wrapped or not.
        num_labels: C.
        criterion: the loss that the protocol publishes; mean cross-entropy if None.

    Raises:
        SnapshotError: fewer than two classes.
    """
    if num_labels < 2:
        raise SnapshotError(f"a classifier has two classes or more; `num_labels` is {num_labels}")
    return ArrayClassifier(
        unwrapped(net), num_labels, None if criterion is None else public_loss(criterion, num_labels)
    )


def classifier_in(module: nn.Module) -> nn.Module:
    """Return the classifier in a module that trains it, such as a LightningModule: its one part with all parameters, or itself.

    A training step calls either the module, which calls that part, or the part; in both cases the part is called.
    """
    everything = {id(p) for p in module.parameters()}
    holders = [part for part in module.children() if {id(p) for p in part.parameters()} == everything]
    return holders[0] if len(holders) == 1 else module


def for_labels(config: AuditConfig) -> AuditConfig:
    """Return the configuration with label attacks, unless it names attacks itself: batches of arrays hold no text."""
    return config if "attacks" in config.model_fields_set else config.model_copy(update={"attacks": LABEL_ATTACKS})


def labels_of(batch: Any) -> dict[str, Tensor]:
    """Return the labels in a loader's batch such as (inputs, labels): its last entry."""
    last = batch[-1] if isinstance(batch, Sequence) and len(batch) > 1 else None
    return {LABELS: last} if isinstance(last, Tensor) else {}


def array_pass(seen: MicroBatch, num_labels: int) -> MicroBatch:
    """Return a recorded forward pass as one of an `ArrayClassifier`.

    Args:
        seen: with the names of the user's classifier.
        num_labels: C.

    Raises:
        SnapshotError: it was not called with one array, its labels are not known, or it returned something else than logits.
    """
    arrays = {name: value for name, value in seen.inputs.items() if name != LABELS}
    if len(arrays) != 1 or not all(value.is_floating_point() for value in arrays.values()):
        given = ", ".join(f"{name} ({str(value.dtype).removeprefix('torch.')})" for name, value in arrays.items())
        raise SnapshotError(
            f"its classifier was called with {given or 'nothing that is known'}; the audit takes classifiers of one array of "
            "floating-point numbers"
        )
    (inputs,) = arrays.values()
    labels = seen.inputs.get(LABELS, seen.withheld_inputs.get(LABELS))
    if labels is None:
        raise SnapshotError(
            "its labels are not known, so nothing could be scored: a batch names them `labels`, or the loop tells them before the "
            "forward pass (`audit.batch({'labels': labels})`)"
        )
    output_gradients = {"logits" if path == "output" else path: pull for path, pull in seen.output_gradients.items()}
    odd = [path for path in output_gradients if path not in ("logits", "loss")]
    logits = output_gradients.get("logits")
    if odd or (logits is not None and logits.shape != (len(inputs), num_labels)):
        found = f"its output {odd[0]!r}" if logits is None or odd else f"outputs of shape {tuple(logits.shape)}"
        raise SnapshotError(
            f"its loss is computed from {found}; the audit takes classifiers whose loss is computed from logits of shape "
            f"({len(inputs)}, {num_labels}), one for each class of an example (`num_labels`)"
        )
    inside = {LABELS: labels} if LABELS in seen.inputs else {}
    return replace(
        seen,
        inputs={"inputs": inputs, **inside, "input_ids": no_tokens(len(inputs))},
        withheld_inputs={LABELS: labels},
        output_gradients=output_gradients,
    )
