"""`llg-plus`: LLG with constants from labelled data like the client's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from leakaudit.algorithms.labels.auxiliary_data import Auxiliary, auxiliary_outputs, can_use
from leakaudit.algorithms.labels.clipping import clipping_factor, scale_is_known
from leakaudit.algorithms.labels.counts import (
    CountsLabels,
    batch_size,
    fewest_of_each,
    misfit,
    on_the_simplex,
    smallest_batch,
    solve_shares,
)
from leakaudit.algorithms.labels.counts_in_noise import count_in_noise
from leakaudit.algorithms.labels.head_loss import HeadLoss, head_loss, mean_gradient
from leakaudit.algorithms.labels.llg import Read, can_read, extract_labels
from leakaudit.algorithms.labels.output_layer import (
    Neutral,
    OutputLayer,
    find_output_layer,
    logit_gradient,
    logits_told_by,
)
from leakaudit.plugins import Applicability, Budget, Observation, Reconstruction, attack


@attack("llg-plus")
@dataclass(frozen=True)
class LlgPlus(CountsLabels):
    """Class counts by Algorithm 1, with constants from auxiliary data (LLG+).

    The constants are impact and offsets. `read="rows"` is the method of the paper: row sums, with Eq. 19 and 20 over
    batches of one label. `auto` uses the gradient d of the logits. There the impact is -1/B by Eq. 9, and the offset of
    class i is the mean probability of i over the batch's own mixture of classes. With P_ji = mean p_i over auxiliary
    data of class j, the shares n / B solve n_i / B = sum_j (n_j / B) P_ji - d_i. Eq. 20 gives all other classes the
    same weight instead, which is wrong for a trained model.
    """

    auxiliary: Path | None = None
    """Labelled data, as `leakaudit.models.save_auxiliary` writes it. Granted: printed with every score."""
    read: Read = "auto"
    """The gradient g of a class: row sums of the weight's update, or the gradient of the logits."""

    label: ClassVar[str] = "LLG+"
    meaning: ClassVar[str] = (
        "Reads the label counts as LLG does, with its constants estimated on labelled data like the client's."
    )
    source: ClassVar[str] = "LLG+ (Wainakh et al. 2022), Algorithm 1, Eq. 8-20; offsets by mixture are ours"
    threat_model: ClassVar[str] = (
        "Sees one client's update, knows the weights and has labelled data like the client's; cross-entropy."
    )

    def applies(self, seen: Observation) -> Applicability:
        """Return whether auxiliary data and a readable output layer are there.

        The layer's update has to be shared, and it has to be trained on one class for each sequence.
        """
        return can_read(seen, self.read) and can_use(self.auxiliary, seen)

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Count the labels.

        Raises:
            AnatomyError: there is no output layer to read.
            DataError: the auxiliary data cannot be read.
        """
        layer, loss = find_output_layer(seen), head_loss(seen)
        own = auxiliary_outputs(seen, layer, self.auxiliary or Path())
        return count_in_noise(seen, layer, rng, lambda noisy: self._count(noisy, layer, loss, own))

    def _count(self, seen: Observation, layer: OutputLayer, loss: HeadLoss, own: Auxiliary) -> Reconstruction:
        known = batch_size(seen, self.data_count)
        if self.read == "rows":
            gradient = mean_gradient(seen.update[layer.weight].double().sum(dim=1), loss, known)
            counts = _from_row_sums(gradient, known or 1, own)
            facts = {"batch_size": float(known or 1), "batch_size_known": float(known is not None)}
            return Reconstruction(
                label_counts=counts, counts_are_shares=known is None, diagnostics=facts, told_by={layer.weight: 1.0}
            )
        neutral = Neutral(own.features, own.probabilities.mean(dim=0))
        gradient = mean_gradient(logit_gradient(seen, layer, neutral), loss, known)
        sized = scale_is_known(seen) and (layer.bias is not None or known is not None)
        scale = 1.0 if sized else clipping_factor(gradient, neutral.probabilities)
        predicted = own.by_class(own.probabilities)  # (C, C)
        shares = solve_shares(predicted, gradient / scale, loss)
        sequences = known or smallest_batch(shares)
        offsets = on_the_simplex(shares) @ predicted
        fewest = fewest_of_each(seen, layer, loss, known)
        counts = extract_labels(offsets - shares, sequences, -1 / sequences, offsets, fewest)
        facts = {"batch_size": float(sequences), "scale": scale, "largest_misfit": misfit(shares, counts)}
        facts |= {"batch_size_known": float(known is not None)}
        told_by = logits_told_by(seen, layer)
        return Reconstruction(label_counts=counts, counts_are_shares=known is None, diagnostics=facts, told_by=told_by)


def _from_row_sums(gradient: Tensor, sequences: int, own: Auxiliary) -> tuple[int, ...]:
    """Run Algorithm 1 with the impact and offsets of Eq. 19 and 20.

    Impact and offsets come from auxiliary batches of one class each.
    """
    classes = len(gradient)
    sums = own.features.sum(dim=1)  # (N,)
    full_batch = own.by_class(
        own.probabilities * sums[:, None]
    )  # (C, C): g_i of a batch of label j, without its own label's part
    label = own.by_class(sums)  # (C,): its own label's part
    impact = float((full_batch.diagonal() - label).sum()) / (classes * sequences) * (1 + 1 / classes)
    offsets = (full_batch.sum(dim=0) - full_batch.diagonal()) / (classes - 1)  # (C,)
    return extract_labels(gradient, sequences, impact, offsets)
