"""`llg`: class counts from the output layer's update and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from leakaudit.algorithms.gradient_estimate import only_bounded
from leakaudit.algorithms.labels.clipping import scale_is_known
from leakaudit.algorithms.labels.counts import (
    CountsLabels,
    batch_size,
    expected_sizes,
    fewest_of_each,
    smallest_batch,
)
from leakaudit.algorithms.labels.counts_in_noise import count_in_noise
from leakaudit.algorithms.labels.head_loss import HeadLoss, head_loss, mean_gradient
from leakaudit.algorithms.labels.llg import Read, average_impact, can_read, extract_labels
from leakaudit.algorithms.labels.output_layer import OutputLayer, bias_gradient, find_output_layer, own_direction
from leakaudit.plugins import Applicability, Budget, Observation, Reconstruction, attack


@attack("llg")
@dataclass(frozen=True)
class Llg(CountsLabels):
    """Class counts by LLG's Algorithm 1, from shared gradients only.

    The attack does not run the model. Algorithm 1 takes every class with a negative gradient once (Property 1). Then
    it takes the class with the smallest calibrated gradient, subtracts the impact m of one sequence from that gradient,
    and repeats this until the batch is full.

    In the paper g is the row sums of the weight's update, and m comes from those below zero (Eq. 18). `read="rows"` does the
    same. The bias's update has Property 1 whatever the features are, and its impact is known: by Eq. 9 it is
    mean p_c - n_c / B, so one sequence changes it by -1/B. A head without bias is read along the main direction of its
    update (`own_direction`) with m from Eq. 18.

    After a first step of Adam the bias's entries often tell only their sign and a least size. Then the size is the mean of
    those that chance gives to entries of this sign (`expected_sizes`).

    No offset is known here. So the attack assumes that the model predicts all classes with the same probability, as it
    does before training.
    """

    read: Read = "auto"
    """The gradient g of a class: row sums of the weight's update, or the gradient of the logits."""

    label: ClassVar[str] = "LLG"
    meaning: ClassVar[str] = (
        "Reads the label counts from the signs and sizes of the rows of the classification head's gradient."
    )
    source: ClassVar[str] = "LLG (Wainakh et al. 2022), Algorithm 1, Eq. 18; the bias as g with Eq. 9 is ours"
    threat_model: ClassVar[str] = "Sees one client's update; the output layer is trained with cross-entropy."

    def applies(self, seen: Observation) -> Applicability:
        """Return whether a shared output layer can be read.

        It has to be trained on one class a sequence.
        """
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
        if bias is not None:
            gradient = expected_sizes(gradient, only_bounded(seen, str(layer.bias)), known or 1)
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
        told_by = {layer.weight if bias is None else str(layer.bias): 1.0}
        return Reconstruction(label_counts=counts, counts_are_shares=known is None, diagnostics=facts, told_by=told_by)
