"""`llg-star`: LLG with constants from dummy inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leakaudit.algorithms.labels.clipping import clipping_factor, scale_is_known
from leakaudit.algorithms.labels.counts import CountsLabels, batch_size, fewest_of_each, misfit, smallest_batch
from leakaudit.algorithms.labels.counts_in_noise import count_in_noise
from leakaudit.algorithms.labels.head_loss import HeadLoss, head_loss, mean_gradient
from leakaudit.algorithms.labels.llg import Read, can_read, extract_labels
from leakaudit.algorithms.labels.output_layer import (
    Neutral,
    NeutralInputs,
    OutputLayer,
    find_output_layer,
    logit_gradient,
    logits_told_by,
    neutral_outputs,
)
from leakaudit.plugins import Applicability, Budget, Observation, Reconstruction, attack


@attack("llg-star")
@dataclass(frozen=True)
class LlgStar(CountsLabels):
    """Class counts by Algorithm 1, with constants from dummy inputs (LLG*).

    The constants are impact and offsets. A batch of dummy inputs that all have label i has g_i = mean (p_i - 1) s and
    g_j = mean p_j s, where s is the sum of a feature's entries. So one forward pass gives all the batches of Eq. 19
    and 20. `read="rows"` does this, as the paper does.

    `auto` uses the gradient of the logits. There the impact is -1/B by Eq. 9. Eq. 20 reduces to the probability that
    the public model gives to a class for dummy inputs, so this is the offset. Features that can be negative break
    Property 1 for row sums; a head without bias is then read along the dummy inputs' mean feature.

    Clipping may multiply the gradient by an unknown k. Then the attack takes the smallest k that gives no class a
    negative share, which is right if some class is not in the batch and too small otherwise. It does the same if
    neither bias nor batch size is known, because the values from weight rows are too small by an unknown factor.
    """

    read: Read = "auto"
    """The gradient g of a class: row sums of the weight's update, or the gradient of the logits."""
    dummy: NeutralInputs = "random"
    """Dummy pictures; the paper takes zeros for MNIST. Text is always random words."""

    label: ClassVar[str] = "LLG*"
    meaning: ClassVar[str] = "Reads the label counts as LLG does, with its constants estimated on dummy inputs."
    source: ClassVar[str] = "LLG* (Wainakh et al. 2022), Algorithm 1, Eq. 8-20; the bias gradient as g is ours"
    threat_model: ClassVar[str] = (
        "Sees one client's update and knows the weights; the output layer is trained with cross-entropy."
    )

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
        neutral = neutral_outputs(seen, layer, rng, self.dummy)
        return count_in_noise(seen, layer, rng, lambda noisy: self._count(noisy, layer, loss, neutral))

    def _count(self, seen: Observation, layer: OutputLayer, loss: HeadLoss, neutral: Neutral) -> Reconstruction:
        known = batch_size(seen, self.data_count)
        facts = {"property_1": float(neutral.positive), "batch_size_known": float(known is not None)}
        if self.read == "rows":
            gradient = mean_gradient(seen.update[layer.weight].double().sum(dim=1), loss, known)
            sums = neutral.features.double().sum(dim=1)  # (N,)
            with torch.no_grad():
                p = layer.module(neutral.features).double().softmax(dim=1)  # (N, C)
            counts = from_row_sums(gradient, known or 1, p, sums)
            facts |= {"batch_size": float(known or 1)}
            return Reconstruction(
                label_counts=counts, counts_are_shares=known is None, diagnostics=facts, told_by={layer.weight: 1.0}
            )
        gradient = mean_gradient(logit_gradient(seen, layer, neutral), loss, known)  # (C,)
        sized = scale_is_known(seen) and (layer.bias is not None or known is not None)
        scale = 1.0 if sized else clipping_factor(gradient, neutral.probabilities)
        shares = loss.shares(neutral.probabilities - gradient / scale)  # (C,), n_c / B by Eq. 9
        sequences = known or smallest_batch(shares)
        predicted, fewest = neutral.probabilities, fewest_of_each(seen, layer, loss, known)
        counts = extract_labels(predicted - shares, sequences, -1 / sequences, predicted, fewest)
        facts |= {"batch_size": float(sequences), "scale": scale, "largest_misfit": misfit(shares, counts)}
        told_by = logits_told_by(seen, layer)
        return Reconstruction(label_counts=counts, counts_are_shares=known is None, diagnostics=facts, told_by=told_by)


def from_row_sums(gradient: Tensor, sequences: int, probabilities: Tensor, sums: Tensor) -> tuple[int, ...]:
    """Run Algorithm 1 with the impact and offsets of Eq. 19 and 20.

    Impact and offsets come from dummy inputs, which may have any label.

    Args:
        gradient: (C,) row sums of the weight's update.
        sequences: B.
        probabilities: (N, C) what the model predicts for the dummy inputs.
        sums: (N,) sums of their features.
    """
    classes = len(gradient)
    own = ((probabilities - 1) * sums[:, None]).mean(dim=0)  # (C,), g_i of a batch full of label i
    impact = float(own.sum()) / (classes * sequences) * (1 + 1 / classes)
    offsets = (probabilities * sums[:, None]).mean(dim=0)  # (C,), g_i of batches full of other labels
    return extract_labels(gradient, sequences, impact, offsets)
