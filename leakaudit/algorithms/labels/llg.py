"""LLG's Algorithm 1: label counts from one number for each class."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from leakaudit.algorithms.labels.output_layer import find_output_layer
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.plugins.attack_protocol import APPLIES, Applicability, not_applicable

Read = Literal["auto", "bias", "rows"]
"""The numbers that are used as LLG's g: the bias's update, or the row sums of the weight's update. `auto` takes the bias if its update
is shared."""


def can_read(seen: Observation, read: Read = "auto") -> Applicability:
    """Return whether there is an output layer whose update `read` can use."""
    try:
        layer = find_output_layer(seen)
    except AnatomyError as error:
        return not_applicable(str(error))
    if read == "bias" and layer.bias is None:
        return not_applicable(
            f"the output layer {layer.weight!r} has no bias whose update is shared; read rows instead"
        )
    if not bool(seen.update[layer.weight].any()):
        return not_applicable(f"the update of the output layer {layer.weight!r} is all zero")
    return APPLIES


def average_impact(gradient: Tensor, sequences: int) -> float:
    """Return the impact m of one sequence from shared gradients: LLG, Eq. 18.

    Args:
        gradient: (C,) one number for each class.
        sequences: B, the paper's |D|.
    """
    return float(gradient[gradient < 0].sum()) / sequences * (1 + 1 / len(gradient))


def extract_labels(
    gradient: Tensor, sequences: int, impact: float, offsets: Tensor, fewest: Tensor | None = None
) -> tuple[int, ...]:
    """Count labels by LLG, Algorithm 1.

    We change it in two ways. Noise can make more classes negative than there are sequences; then only the most negative ones are taken. And
    if the bias gives a lower bound on the sequences of a class, that many are taken first instead of one.

    Args:
        gradient: (C,) the paper's G.
        sequences: B, the paper's |D|.
        impact: the paper's m, negative; 0 if no gradient is negative.
        offsets: (C,) the paper's S.
        fewest: (C,) lower bounds from `fewest_of_each`; None for zeros.

    Returns:
        (C,) counts that add up to `sequences`.

    >>> extract_labels(torch.tensor([-0.5, 0.0, 0.25, 0.25]), 4, -0.25, torch.full((4,), 0.25))
    (3, 1, 0, 0)
    """
    counts = torch.zeros_like(gradient, dtype=torch.long) if fewest is None else fewest.clone()
    left = gradient - impact * counts
    for label in [c for c in gradient.argsort().tolist() if gradient[c] < 0 and counts[c] == 0]:
        if int(counts.sum()) < sequences:
            counts[label] += 1
            left[label] -= impact
    left -= offsets
    while int(counts.sum()) < sequences:
        label = int(left.argmin())
        counts[label] += 1
        left[label] -= impact
    return tuple(counts.tolist())
