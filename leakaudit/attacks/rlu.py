"""`rlu`: class counts after several local steps, from the output layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from leakaudit.algorithms.labels.auxiliary_data import auxiliary_outputs, can_use, class_means
from leakaudit.algorithms.labels.clipping import clipping_factor, scale_is_known
from leakaudit.algorithms.labels.counts import CountsLabels, batch_size, solve_shares
from leakaudit.algorithms.labels.counts_in_noise import count_in_noise
from leakaudit.algorithms.labels.head_loss import HeadLoss, head_loss, mean_gradient
from leakaudit.algorithms.labels.llg import can_read
from leakaudit.algorithms.labels.local_steps import after_the_steps
from leakaudit.algorithms.labels.output_layer import (
    Neutral,
    NeutralInputs,
    OutputLayer,
    find_output_layer,
    logit_gradient,
    neutral_outputs,
)
from leakaudit.algorithms.labels.simulated_counts import nearest_shares
from leakaudit.plugins import APPLIES, Applicability, Budget, Observation, Reads, Reconstruction, attack, not_applicable


@attack("rlu")
@dataclass(frozen=True)
class Rlu(CountsLabels):
    """Class counts of a client that took several SGD steps (federated averaging).

    The update of the bias is the mean over the local steps t of mean p(t) - n(t) / B. So the shares n_i / N of the
    classes among all N sequences solve n_i / N = sum_j (n_j / N) P_ji - db_i. P_ji is the probability of class i for
    sequences of class j, averaged over the steps; for i != j it is RLU's erroneous confidence. The server knows the
    model before the steps and, by adding the update, the model after them. This attack assumes that the model changes
    evenly between the two: it interpolates the logits of the same inputs under both models, one point for each step.
    (RLU estimates the change by Monte Carlo.)

    With `auxiliary` data P is the mean of their predictions by class. Without such data the same dummy inputs stand for
    every class, so P does not show what the local steps taught the model about single classes.

    Several steps of Adam and of similar optimizers leave no gradient. There the attack simulates them: it draws the labels of
    all steps, lets the client's optimizer move the output bias by each draw, and takes the draws nearest to the observed
    movement (see `simulated_counts`). Moments of earlier rounds are not known, so it refuses where they were kept.

    For one step and no update of other layers it is `llg-plus` or `llg-star` solved by least squares.
    """

    auxiliary: Path | None = None
    """Labelled data, as `leakaudit.models.save_auxiliary` writes it. Granted: printed with every score. None: dummy inputs."""
    dummy: NeutralInputs = "random"
    """Dummy pictures where there are no auxiliary data; text is always random words."""

    label: ClassVar[str] = "RLU"
    reads: ClassVar[Reads] = "direction"
    meaning: ClassVar[str] = (
        "Reads the label counts from the output layer's update of one or several local steps, by a linear system."
    )
    source: ClassVar[str] = (
        "RLU (Chen and Vikalo 2024): least squares on the output layer's update with erroneous confidences; "
        "interpolation instead of Monte Carlo and the simulation of other optimizers are ours"
    )
    threat_model: ClassVar[str] = (
        "Sees the difference that a client's local steps made, knows the weights before them; cross-entropy."
    )

    def applies(self, seen: Observation) -> Applicability:
        """Return whether a shared output layer, and auxiliary data if named, can be read.

        The layer has to be trained on one class a sequence.
        """
        verdict = can_read(seen)
        if verdict and seen.only_a_direction:
            verdict = self._can_simulate(seen)
        return verdict if not verdict or self.auxiliary is None else can_use(self.auxiliary, seen)

    def _can_simulate(self, seen: Observation) -> Applicability:
        """Say whether the movement of the output bias can be simulated."""
        sent = seen.sent or seen
        if sent.facts.optimizer is None or not sent.facts.optimizer.fresh:
            return not_applicable(
                "the optimizer kept moments of earlier rounds, which move the output bias as labels do and are not in the update"
            )
        if sent.facts.defenses:
            return not_applicable("a declared defence changed the update after the optimizer's step")
        if find_output_layer(seen).bias is None:
            return not_applicable(
                "of steps whose gradients are not known it reads the output layer's bias, and none is shared"
            )
        return APPLIES

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Count the labels.

        Raises:
            AnatomyError: there is no output layer to read.
            DataError: the auxiliary data cannot be read.
        """
        layer, loss = find_output_layer(seen), head_loss(seen)
        state = rng.get_state()
        neutral, before, labels = self._outputs(seen, layer, rng)
        steps = seen.facts.local_steps
        after = before
        if steps > 1:
            with after_the_steps(seen):
                rng.set_state(state)  # the same dummy inputs again
                _, after, _ = self._outputs(seen, layer, rng)
        ways = torch.arange(steps, dtype=torch.float64) / steps  # step k of K starts at k / K of the way
        logits = [(1 - float(way)) * before + float(way) * after for way in ways]
        each_step = torch.stack([z.softmax(dim=1) for z in logits])  # (K, N, C)
        if seen.only_a_direction:
            return self._simulated(seen, layer, loss, each_step, labels, rng)
        predicted = each_step.mean(dim=0)  # (N, C)

        def count(noisy: Observation) -> Reconstruction:
            return self._count(noisy, layer, loss, neutral, predicted, labels)

        found = count_in_noise(seen, layer, rng, count)
        return replace(found, diagnostics={**found.diagnostics, "local_steps": float(steps)})

    def _simulated(
        self,
        seen: Observation,
        layer: OutputLayer,
        loss: HeadLoss,
        predicted: Tensor,
        labels: Tensor | None,
        rng: torch.Generator,
    ) -> Reconstruction:
        """Return the counts of a client whose optimizer leaves no gradient.

        Args:
            seen: the difference of weights.
            layer: its output layer, with a bias.
            loss: the head's loss.
            predicted: (K, N, C) predictions in each step.
            labels: (N,) of the inputs; None if they have none.
            rng: draws counts.
        """
        by_class = torch.stack([class_means(step, labels, step.shape[1]) for step in predicted])  # (K, C, C)
        sequences = batch_size(seen, self.data_count) or seen.facts.local_steps
        sent = seen.sent or seen
        shares, off = nearest_shares(sent, str(layer.bias), by_class, sequences, loss, rng)
        found = self.counted(shares.to(predicted), seen, layer, loss, movement_misfit=off)
        return replace(found, diagnostics={**found.diagnostics, "local_steps": float(seen.facts.local_steps)})

    def _count(
        self,
        seen: Observation,
        layer: OutputLayer,
        loss: HeadLoss,
        neutral: Neutral,
        predicted: Tensor,
        labels: Tensor | None,
    ) -> Reconstruction:
        """Return the counts, given (N, C) mean predictions for inputs of these labels.

        The mean is over the local steps.
        """
        known = batch_size(seen, self.data_count)
        by_class = class_means(predicted, labels, predicted.shape[1])
        gradient = mean_gradient(logit_gradient(seen, layer, neutral), loss, known)
        sized = scale_is_known(seen) and (layer.bias is not None or known is not None)
        scale = 1.0 if sized else clipping_factor(gradient, predicted.mean(dim=0))
        shares = solve_shares(by_class, gradient / scale, loss)
        return self.counted(shares, seen, layer, loss, scale=scale)

    def _outputs(
        self, seen: Observation, layer: OutputLayer, rng: torch.Generator
    ) -> tuple[Neutral, Tensor, Tensor | None]:
        """Return features and probabilities, (N, C) logits in float64, and (N,) labels.

        Labels are None where the inputs have none.
        """
        if self.auxiliary is None:
            neutral = neutral_outputs(seen, layer, rng, self.dummy)
            with torch.no_grad():
                return neutral, layer.module(neutral.features).double(), None
        own = auxiliary_outputs(seen, layer, self.auxiliary)
        logits = own.probabilities.clamp_min(1e-300).log()
        return Neutral(own.features, own.probabilities.mean(dim=0)), logits, own.labels
