"""Auxiliary data: labelled examples that a threat model grants.

The examples are similar to the client's.

Letters: N examples, H features, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from leakaudit.algorithms.labels.output_layer import OutputLayer
from leakaudit.client.observation import Observation
from leakaudit.errors import DataError
from leakaudit.models.array_classifier import load_auxiliary
from leakaudit.models.structure import head_outputs
from leakaudit.plugins.attack_protocol import APPLIES, Applicability, not_applicable

CHUNK = 64
"""Examples in one forward pass. Our choice: it bounds the memory."""


@dataclass(frozen=True)
class Auxiliary:
    """Auxiliary examples as the output layer sees them."""

    features: Tensor
    """(N, H) float64."""
    probabilities: Tensor
    """(N, C) float64."""
    labels: Tensor
    """(N,)."""

    def by_class(self, values: Tensor) -> Tensor:
        """Return (C, ...) means of (N, ...) values over each class.

        A class without an example gets the mean over all examples.
        """
        return class_means(values, self.labels, self.probabilities.shape[1])


def class_means(values: Tensor, labels: Tensor | None, classes: int) -> Tensor:
    """Return (C, ...) means of (N, ...) values over each class.

    Without labels, or for a class without an example, take the mean over all examples.
    """
    everything = values.mean(dim=0)
    known = [labels == c for c in range(classes)] if labels is not None else []
    means = [values[mine].mean(dim=0) if bool(mine.any()) else everything for mine in known]
    return torch.stack(means or [everything] * classes)


def can_use(path: Path | None, seen: Observation) -> Applicability:
    """Return whether the file exists and holds labels of the model's classes."""
    if path is None:
        return not_applicable(
            "no auxiliary data was granted; set `auxiliary` to a file that `leakaudit.models.save_auxiliary` wrote"
        )
    try:
        _, labels = load_auxiliary(path)
    except DataError as error:  # leave out the path: a report should not name a folder of this machine
        return not_applicable(str(error).replace(str(path), "auxiliary data"))
    classes = seen.facts.num_labels or 0
    if len(labels) == 0 or int(labels.min()) < 0 or int(labels.max()) >= classes:
        return not_applicable(f"auxiliary data: labels have to be classes from 0 to {classes - 1}, one or more of them")
    return APPLIES


def auxiliary_outputs(seen: Observation, layer: OutputLayer, path: Path) -> Auxiliary:
    """Run the public model on the auxiliary data.

    Raises:
        DataError: the file cannot be read.
    """
    inputs, labels = load_auxiliary(path)
    device = next(seen.model.parameters()).device
    features, logits = [], []
    for start in range(0, len(labels), CHUNK):
        part = {name: value[start : start + CHUNK].to(device) for name, value in inputs.items()}
        a, z = head_outputs(seen.model, layer.module, part)
        features.append(a.double())
        logits.append(z.double())
    return Auxiliary(torch.cat(features), torch.cat(logits).softmax(dim=1), labels.to(device))
