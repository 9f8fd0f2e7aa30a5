"""`llg`: how many sequences of each class are in the batch, from the output layer's update and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from leakaudit.algorithms.labels.clipping import scale_is_known
from leakaudit.algorithms.labels.counts import CountsLabels, batch_size, fewest_of_each, smallest_batch
from leakaudit.algorithms.labels.counts_in_noise import count_in_noise
from leakaudit.algorithms.labels.head_loss import HeadLoss, head_loss, mean_gradient
from leakaudit.algorithms.labels.output_layer import OutputLayer, bias_gradient, find_output_layer, own_direction
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.plugins.attack_protocol import APPLIES, Applicability, Reconstruction, not_applicable
from leakaudit.plugins.budget import Budget
from leakaudit.registry import attack

Read = Literal["auto", "bias", "rows"]
"""What stands for LLG's g: the bias's update (`auto` takes it where it is shared), or the row sums of the weight's update."""


@attack("llg")
@dataclass(frozen=True)
class Llg(CountsLabels):
    """Class counts by LLG's Algorithm 1 on shared gradients only; the model itself is not used.

    Algorithm 1 takes every class with a negative gradient once (Property 1), then again and again the class with the
    smallest calibrated gradient, adding back the impact m of one sequence each time, until the batch is full.

    The paper's g are row sums of the weight's update, and m their mean (Eq. 18): that is `read="rows"`. The bias's update has
    Property 1 whatever the features are, and an impact that is known: by Eq. 9 it is mean p_c - n_c / B, so one sequence moves
    it by -1/B. A head without bias is read along the main direction of its update (`own_direction`) with m from Eq. 18.

    No offset is known here, so the classes are taken to be equally likely to the model, as they are before training.
    """

    read: Read = "auto"
    """What is read as the gradient g of a class."""

    label: ClassVar[str] = "LLG"
    meaning: ClassVar[str] = (
        "Reads the label counts from the signs and sizes of the rows of the classification head's gradient."
    )
    source: ClassVar[str] = "LLG (Wainakh et al. 2022), Algorithm 1, Eq. 18; the bias as g with Eq. 9 is ours"
    threat_model: ClassVar[str] = "Sees one client's update; the output layer is trained with cross-entropy."

    def applies(self, seen: Observation) -> Applicability:
        """Say whether there is a shared output layer trained on one class a sequence."""
        return can_read(seen, self.read)

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Count the labels.

        Raises:
            AnatomyError: there is no output layer to read.
        """
        layer, loss = find_output_layer(seen), head_loss(seen)
        return count_in_noise(seen, layer, rng, lambda noisy: self._count(noisy, layer, loss))

    def _count(self, seen: Observation, layer: OutputLayer, loss: HeadLoss) -> Reconstruction:
        bias = None if self.read == "rows" else bias_gradient(seen, layer)
        known = batch_size(seen, self.data_count)
        if self.read == "rows":
            gradient = seen.update[layer.weight].double().sum(dim=1)  # (C,), Sec. 2.3
        else:
            gradient = own_direction(seen, layer) if bias is None else bias
        gradient = mean_gradient(gradient, loss, known)
        sized = bias is not None and scale_is_known(seen)
        even = torch.full_like(gradient, 1 / len(gradient))
        sequences = known or (smallest_batch(loss.shares(even - gradient)) if sized else 1)
        if sized:
            shares = loss.shares(even - gradient)
            fewest = fewest_of_each(seen, layer, loss, known)
            counts = extract_labels(even - shares, sequences, -1 / sequences, even, fewest)
        else:
            counts = extract_labels(
                gradient, sequences, average_impact(gradient, sequences), torch.zeros_like(gradient)
            )
        facts = {
            "batch_size": float(sequences),
            "batch_size_known": float(known is not None),
            "from_bias": float(bias is not None),
            "negative_classes": float((gradient < 0).sum()),
        }
        return Reconstruction(label_counts=counts, diagnostics=facts)


def can_read(seen: Observation, read: Read = "auto") -> Applicability:
    """Say whether there is an output layer with what is to be read."""
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
    """Return the impact m of one sequence from the shared gradients alone: LLG, Eq. 18.

    Args:
        gradient: (C,) one number for each class.
        sequences: B, the paper's |D|.
    """
    return float(gradient[gradient < 0].sum()) / sequences * (1 + 1 / len(gradient))


def extract_labels(
    gradient: Tensor, sequences: int, impact: float, offsets: Tensor, fewest: Tensor | None = None
) -> tuple[int, ...]:
    """Count labels by LLG, Algorithm 1.

    Two departures: noise can make more classes negative than there are sequences; then only the most negative are taken. And where
    the bias says how many sequences of a class there are at least, so many are taken first instead of one.

    Args:
        gradient: (C,) the paper's G.
        sequences: B, the paper's |D|.
        impact: the paper's m, negative; 0 if no gradient is.
        offsets: (C,) the paper's S.
        fewest: (C,) as `fewest_of_each` gives them; None for zeros.

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
