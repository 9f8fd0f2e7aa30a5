"""`ilrg`: class counts by a linear system from the output layer's update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leakaudit.algorithms.gradient_estimate import only_bounded
from leakaudit.algorithms.labels.clipping import clipping_factor, scale_is_known
from leakaudit.algorithms.labels.counts import CountsLabels, batch_size, on_the_simplex, solve_shares
from leakaudit.algorithms.labels.counts_in_noise import count_in_noise
from leakaudit.algorithms.labels.head_loss import HeadLoss, head_loss, mean_gradient
from leakaudit.algorithms.labels.llg import can_read
from leakaudit.algorithms.labels.output_layer import (
    Neutral,
    OutputLayer,
    bias_gradient,
    find_output_layer,
    logit_gradient,
    neutral_outputs,
)
from leakaudit.plugins import Applicability, Budget, Observation, Reconstruction, attack, not_applicable

TURNS = 8
"""Number of iterations that refine shares and class features. Our choice: shares hardly change after five or six."""

COMMON_TRUST = 0.05
"""Squared length of db at which the update and the dummy inputs have equal weight in the common feature.
Chosen on training texts of AG News and MTS-Dialog: all values from 0.02 to 0.1 do equally well."""

CLASS_TRUST = 0.02
"""Squared x_c (1 - P_cc) at which the update and the common feature have equal weight in a class's own feature.
Chosen on the same texts."""


@attack("ilrg")
@dataclass(frozen=True)
class Ilrg(CountsLabels):
    """Class counts by pseudo-inverse, from features that the update itself gives.

    All sequences of a class are assumed to have one feature, their mean (iLRG's class-wise embedding). If class c is
    more frequent than predicted, row c of the weight's update divided by entry c of the bias's update is such a mean.
    The head's weights turn features into probabilities P. Then the pseudo-inverse gives the shares n / B that solve
    n_i / B = sum_j (n_j / B) P_ji - db_i.

    For a class that is as frequent as predicted the quotient is 0 / 0, so on text many counts would be wrong. So both
    steps are regularised here. First all sequences share one feature m: the least-squares solution of dW = db m^T,
    regularised towards the feature of dummy inputs. Then dW_c = sum_j x_j P_jc mu_j - x_c mu_c, with x = n / B, is
    solved for the class's own feature mu_c, regularised towards m. P and x follow from mu, and this step is repeated.

    Features may be negative. The counts are exact if all sequences of a class get nearly the same prediction, as in an
    untrained model. If predictions differ from sequence to sequence, `feature-labels` reads each sequence.
    """

    dummy: bool = True
    """Run the model once on dummy inputs. If False, nothing is run, and m comes from the update alone."""

    label: ClassVar[str] = "iLRG"
    meaning: ClassVar[str] = (
        "Reads the label counts from the classification head's gradient by a linear system, with one row for each class."
    )
    source: ClassVar[str] = "iLRG (Ma et al. 2023, ICLR): class-wise embeddings and pseudo-inverse; the turns are ours"
    threat_model: ClassVar[str] = (
        "Sees one client's update and knows the weights; the output layer has a bias and is trained with cross-entropy."
    )

    def applies(self, seen: Observation) -> Applicability:
        """Return whether an output layer with a bias is shared and readable.

        It has to be trained on one class a sequence.
        """
        verdict = can_read(seen)
        if verdict and bias_gradient(seen, find_output_layer(seen)) is None:
            return not_applicable(
                "the output layer has no bias whose update is shared, so its features cannot be told from their gradients; "
                "llg-star reads heads without one"
            )
        return verdict

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Count the labels.

        Raises:
            AnatomyError: there is no output layer to read.
        """
        layer, loss = find_output_layer(seen), head_loss(seen)
        neutral = neutral_outputs(seen, layer, rng) if self.dummy else None
        return count_in_noise(seen, layer, rng, lambda noisy: self._count(noisy, layer, loss, neutral))

    def _count(self, seen: Observation, layer: OutputLayer, loss: HeadLoss, neutral: Neutral | None) -> Reconstruction:
        known = batch_size(seen, self.data_count)
        weight = mean_gradient(seen.update[layer.weight].double(), loss, known)  # (C, H)
        bias = bias_gradient(seen, layer) if neutral is None else logit_gradient(seen, layer, neutral)
        if bias is None:
            bias = torch.zeros_like(weight[:, 0])
        bias = mean_gradient(bias, loss, known)
        start = torch.zeros_like(weight[0]) if neutral is None else neutral.features.double().mean(dim=0)
        trust = COMMON_TRUST if self.dummy else 1e-30
        weight = at_least(weight, torch.outer(bias, start), only_bounded(seen, layer.weight))
        rest = bias @ (weight - torch.outer(bias, start))
        # Noise hides what the update says about features before it hides the counts.
        noisy = self.dummy and seen.noise_level.of(layer.weight, layer.bias) > 0.0
        scale = 1.0
        if not scale_is_known(seen):
            scale = clipping_factor(
                bias, _predict(layer, start[None] if self.dummy else rest[None] / bias.square().sum())[0]
            )
            weight, bias, rest = weight / scale, bias / scale, rest / scale**2
        common = start if noisy else start + rest / (bias.square().sum() + trust)  # (H,)
        features = common.expand(len(bias), -1)  # (C, H)
        shares = solve_shares(_predict(layer, features), bias, loss)
        for _ in range(0 if noisy else TURNS):
            inside = on_the_simplex(shares)
            features = class_features(layer, weight, common, features, inside)
            shares = (inside + solve_shares(_predict(layer, features), bias, loss)) / 2
        return self.counted(shares, seen, layer, loss, scale=scale)


def at_least(weight: Tensor, likely: Tensor, bounded: Tensor) -> Tensor:
    """Return an update in which entries that are only bounded have a likely size.

    Args:
        weight: (C, H) update.
        likely: (C, H) what other entries make likely.
        bounded: (C, H) bool; such an entry's sign is certain, and its size is at least that in `weight`.
    """
    return torch.where(bounded, torch.sign(weight) * torch.maximum(weight.abs(), likely.abs()), weight)


def class_features(layer: OutputLayer, weight: Tensor, common: Tensor, features: Tensor, shares: Tensor) -> Tensor:
    """Return (C, H) features of the classes, from the rows of the update.

    Row c is sum_j x_j P_jc mu_j - x_c mu_c, so (x_c - x_c P_cc) mu_c = sum_{j != c} x_j P_jc mu_j - dW_c. A ridge moves
    the solution towards the common feature if the factor on the left is small.

    Args:
        layer: the output layer, for its weights.
        weight: (C, H) update of the weight.
        common: (H,) the common feature.
        features: (C, H) features before this iteration.
        shares: (C,) x, from 0 to 1.
    """
    mixed = shares[:, None] * _predict(layer, features)  # (C, C): x_j P_jc
    own = mixed.diagonal()[:, None]  # (C, 1)
    others = mixed.T @ features - own * features  # (C, H)
    factor = shares[:, None] - own  # (C, 1)
    return (factor * (others - weight) + CLASS_TRUST * common) / (factor.square() + CLASS_TRUST)


def _predict(layer: OutputLayer, features: Tensor) -> Tensor:
    """Return the probabilities (N, C) of features (N, H), in float64."""
    weight, bias = layer.module.weight.detach().double(), layer.module.bias
    logits = features @ weight.T
    return (logits if bias is None else logits + bias.detach().double()).softmax(dim=1)
