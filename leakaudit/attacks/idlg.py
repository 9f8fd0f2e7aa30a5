"""`idlg`: the label of one sequence from the sign of the output layer's update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from leakaudit.algorithms.labels.counts import batch_size
from leakaudit.algorithms.labels.counts_in_noise import count_in_noise
from leakaudit.algorithms.labels.output_layer import (
    Neutral,
    OutputLayer,
    bias_gradient,
    find_output_layer,
    logit_gradient,
    logits_told_by,
    neutral_outputs,
)
from leakaudit.plugins import (
    APPLIES,
    FALSE_EVENTS,
    AnatomyError,
    Applicability,
    Budget,
    Goal,
    Observation,
    Reconstruction,
    attack,
    not_applicable,
)


@attack("idlg")
@dataclass(frozen=True)
class Idlg:
    """The class whose logit has a negative gradient: the label of one sequence.

    With one sequence of class y, d_c = p_c - [c = y] (LLG, Eq. 9 with B = 1). It is negative for y and positive for
    all other classes, whatever the weights are. The bias update is d itself, so its smallest entry is always the label.

    Without a bias only the rows d_c a are known. Since d sums to 0, |d_y| is the sum of all other |d_c|, so y has
    the longest row. This is exact for three classes or more. With two classes both rows are equally long, and the sign
    comes from the mean feature of neutral inputs (see `output_layer`), which may be wrong. If the update is an estimate
    of a gradient, large rows are not known; then other parameters tell d.

    The attack always names exactly one label. If the number of sequences is not known, it means that all have this label. For larger
    batches use the attacks that count.
    """

    label: ClassVar[str] = "iDLG"
    meaning: ClassVar[str] = (
        "Reads one label from the signs of the classification head's gradient; right for a batch of one."
    )
    goal: ClassVar[Goal] = "labels"
    source: ClassVar[str] = "iDLG (Zhao et al. 2020), as LLG (Wainakh et al. 2022, Sec. 3.2 and Eq. 9) describes it"
    false_event_rate: ClassVar[float] = FALSE_EVENTS
    threat_model: ClassVar[str] = (
        "Sees one client's update and knows the weights; the output layer is trained with cross-entropy on one sequence."
    )

    def applies(self, seen: Observation) -> Applicability:
        """Return whether a shared output layer can be read.

        It has to be trained on one class a sequence.
        """
        try:
            find_output_layer(seen)
        except AnatomyError as error:
            return not_applicable(str(error))
        return APPLIES

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Return the label.

        Raises:
            AnatomyError: there is no output layer to read.
        """
        layer = find_output_layer(seen)
        rows_only = layer.bias is None or not bool(seen.update[layer.bias].any())
        projects = rows_only and (layer.module.out_features == 2 or bool(seen.error))
        neutral = neutral_outputs(seen, layer, rng) if projects else None
        return count_in_noise(seen, layer, rng, lambda noisy: self._label(noisy, layer, neutral))

    def _label(self, seen: Observation, layer: OutputLayer, neutral: Neutral | None) -> Reconstruction:
        """Return the label.

        `neutral` is given if neither the bias nor the lengths of the rows tell it.
        """
        gradient = bias_gradient(seen, layer)  # (C,)
        from_bias = gradient is not None
        rows = seen.update[layer.weight].norm(dim=1)  # (C,)
        told_by = {str(layer.bias) if from_bias else layer.weight: 1.0}
        if gradient is not None:
            label = int(gradient.argmin())
        elif neutral is None:
            label = int(rows.argmax())
        else:
            label, told_by = int(logit_gradient(seen, layer, neutral).argmin()), logits_told_by(seen, layer)
        unknown = batch_size(seen) is None
        facts = {"from_bias": float(from_bias), "batch_size_known": float(not unknown)}
        if gradient is not None:
            facts["negative_classes"] = float((gradient < 0).sum())
        counts = tuple(int(c == label) for c in range(len(rows)))
        return Reconstruction(label_counts=counts, counts_are_shares=unknown, diagnostics=facts, told_by=told_by)
