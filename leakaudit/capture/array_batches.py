"""Classifiers of pictures and tables in a training run.

The loop calls the user's classifier, and hooks record its calls. The functions here convert a recorded call into a call of
`ArrayClassifier`, the model that the side process rebuilds. There the array is named `inputs` and the output `logits`.
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
    """Return the audited model of a classifier of arrays, with the live parameters.

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
    """Return the classifier in a module that trains it, such as a LightningModule.

    It is the only child that holds all parameters of the module; without such a child, it is the module itself. A training step that
    calls the module also calls that child.
    """
    everything = {id(p) for p in module.parameters()}
    holders = [part for part in module.children() if {id(p) for p in part.parameters()} == everything]
    return holders[0] if len(holders) == 1 else module


def for_labels(config: AuditConfig) -> AuditConfig:
    """Return the configuration with label attacks, unless it names attacks itself.

    Batches of arrays hold no text that other attacks could read.
    """
    return config if "attacks" in config.model_fields_set else config.model_copy(update={"attacks": LABEL_ATTACKS})


def labels_of(batch: Any) -> dict[str, Tensor]:
    """Return the labels in a loader's batch such as (inputs, labels): its last entry."""
    last = batch[-1] if isinstance(batch, Sequence) and len(batch) > 1 else None
    return {LABELS: last} if isinstance(last, Tensor) else {}


def array_pass(seen: MicroBatch, num_labels: int) -> MicroBatch:
    """Return a recorded forward pass as one of an `ArrayClassifier`.

    Args:
        seen: recorded at the user's classifier, with its names.
        num_labels: C.

    Raises:
        SnapshotError: it was not called with one array, its labels are not known, or its loss used other outputs than logits (B, C).
    """
    inputs = _only_array(seen)
    labels = seen.inputs.get(LABELS, seen.withheld_inputs.get(LABELS))
    if labels is None:
        raise SnapshotError(
            "its labels are not known, so nothing could be scored: a batch names them `labels`, or the loop tells them before the "
            "forward pass (`audit.batch({'labels': labels})`)"
        )
    inside = {LABELS: labels} if LABELS in seen.inputs else {}
    return replace(
        seen,
        inputs={"inputs": inputs, **inside, "input_ids": no_tokens(len(inputs))},
        withheld_inputs={LABELS: labels},
        output_gradients=_output_gradients(seen, (len(inputs), num_labels)),
    )


def _only_array(seen: MicroBatch) -> Tensor:
    """Return the array that a classifier was called with.

    Raises:
        SnapshotError: it was not called with one array of floating-point numbers.
    """
    arrays = {name: value for name, value in seen.inputs.items() if name != LABELS}
    if len(arrays) != 1 or not all(value.is_floating_point() for value in arrays.values()):
        given = ", ".join(f"{name} ({str(value.dtype).removeprefix('torch.')})" for name, value in arrays.items())
        raise SnapshotError(
            f"its classifier was called with {given or 'nothing that is known'}; the audit takes classifiers of one array of "
            "floating-point numbers"
        )
    (inputs,) = arrays.values()
    return inputs


def _output_gradients(seen: MicroBatch, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Return the gradients at the outputs, by the names of an `ArrayClassifier`.

    Args:
        seen: recorded at the user's classifier, whose only output has no name.
        shape: (B, C), of logits.

    Raises:
        SnapshotError: the loss was computed from something else than logits of that shape.
    """
    found = {"logits" if path == "output" else path: gradient for path, gradient in seen.output_gradients.items()}
    others = [path for path in found if path not in ("logits", "loss")]
    logits = found.get("logits")
    if others or (logits is not None and logits.shape != shape):
        what = f"its output {others[0]!r}" if logits is None or others else f"outputs of shape {tuple(logits.shape)}"
        raise SnapshotError(
            f"its loss is computed from {what}; the audit takes classifiers whose loss is computed from logits of shape "
            f"{shape}, one for each class of an example (`num_labels`)"
        )
    return found
