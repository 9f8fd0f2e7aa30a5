"""`gradient-mixture`: class counts as a mixture of known examples' gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from scipy.optimize import nnls
from torch import Tensor, nn

from leakaudit.algorithms.gradient_estimate import only_bounded
from leakaudit.algorithms.labels.auxiliary_data import Auxiliary, auxiliary_outputs, can_use
from leakaudit.algorithms.labels.clipping import scale_is_known
from leakaudit.algorithms.labels.counts import CountsLabels, batch_size
from leakaudit.algorithms.labels.counts_in_noise import count_in_noise
from leakaudit.algorithms.labels.head_loss import HeadLoss, head_loss, mean_gradient
from leakaudit.algorithms.labels.llg import can_read
from leakaudit.algorithms.labels.local_steps import after_the_steps
from leakaudit.algorithms.labels.output_layer import OutputLayer, find_output_layer
from leakaudit.plugins import Applicability, Budget, Observation, Reconstruction, attack

RIDGE = 1e-3
"""Weight of the sum of squared weights, beside the share of the update that stays unexplained.
Our choice: on trained digits all values from 0.0001 to 0.1 do equally well; larger ones harm large batches of a
fresh model."""

WHOLE = 10.0
"""Weight of the squared distance between the sum of all weights and 1. Our choice: the sum should be 1 whatever the
update is."""

FILLS = 10
"""Times that entries which are only bounded are filled with what the mixture makes of them. Our choice."""


@attack("gradient-mixture")
@dataclass(frozen=True)
class GradientMixture(CountsLabels):
    """Class counts from labelled examples like the client's, for trained models.

    A trained model is sure of most examples and wrong about a few. These few make up the update, and a class's mean
    prediction, which `llg-plus` uses, says little about them. But the update is sum_k d(k) a(k)^T / B with d(k) =
    p(k) - y(k) and features a(k), and each known example e has such a matrix V_e, too. Least squares gives weights
    w_e >= 0 with which the V_e explain the update. The weights of the examples of a class add up to its share. If all
    weights together add up to less than 1, the rest belongs to examples that the model is sure of, whose gradients are
    zero. This rest is spread evenly over the classes.

    After a first step of Adam many entries of the update tell only a sign and a least size. They are filled with what the
    mixture of the other entries makes of them, and the mixture is fitted again. That is enough for one text and too little
    for several at small learning rates, where the counts are no better than a random guess: `llg-plus` reads these better.

    Over several local steps V_e is the mean of its values before and after them.
    """

    auxiliary: Path | None = None
    """Labelled data, as `leakaudit.models.save_auxiliary` writes it. Granted: printed with every score."""

    label: ClassVar[str] = "gradient mixture"
    meaning: ClassVar[str] = (
        "Explains the update as a mixture of the gradients of labelled examples; their weights are the label counts."
    )
    source: ClassVar[str] = "own; the update as a sum over examples is Eq. 12 of LLG (Wainakh et al. 2022)"
    threat_model: ClassVar[str] = (
        "Sees one client's update, knows the weights and has labelled data like the client's; cross-entropy."
    )

    def applies(self, seen: Observation) -> Applicability:
        """Return whether auxiliary data and a readable output layer are there.

        The layer's update has to be shared, and it has to be trained on one class for each sequence.
        """
        return can_read(seen) and can_use(self.auxiliary, seen)

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Count the labels.

        Raises:
            AnatomyError: there is no output layer to read.
            DataError: the auxiliary data cannot be read.
        """
        layer, loss = find_output_layer(seen), head_loss(seen)
        states = self._states(seen, layer)
        gradients = [_gradients(own, loss, layer) for own in states]
        return count_in_noise(
            seen, layer, rng, lambda noisy: self._count(noisy, layer, loss, gradients, states[0].labels)
        )

    def _count(
        self,
        seen: Observation,
        layer: OutputLayer,
        loss: HeadLoss,
        gradients: Sequence[tuple[Tensor, Tensor]],
        labels: Tensor,
    ) -> Reconstruction:
        """Return the counts, given the gradients and the labels of known examples.

        The gradients are factors, as `mixture` takes them.
        """
        known = batch_size(seen, self.data_count)
        update = seen.update[layer.weight].double()  # (C, H)
        if layer.bias is not None:
            update = torch.cat([update, seen.update[layer.bias].double()[:, None]], dim=1)  # (C, H + 1)
        update = mean_gradient(update, loss, known)
        sized = scale_is_known(seen)
        weights = mixture(gradients, update, whole=sized)  # (N,)
        bounded = self._bounded(seen, layer)
        for _ in range(FILLS if bool(bounded.any()) else 0):
            explained_part = _mixed(gradients, weights.to(update))
            update = torch.where(
                bounded, torch.sign(update) * torch.maximum(update.abs(), explained_part.abs()), update
            )
            weights = mixture(gradients, update, whole=sized)
        shares = torch.zeros(len(update), dtype=torch.float64).index_add(0, labels.cpu(), weights)
        explained = float(shares.sum())
        if not sized and explained > 0:
            shares = shares / explained
        shares = shares + max(0.0, 1 - float(shares.sum())) / len(shares)
        shares = loss.unweighted(shares.to(update.device))
        return self.counted(shares, seen, layer, loss, explained_weight=explained)

    def _bounded(self, seen: Observation, layer: OutputLayer) -> Tensor:
        """Return (C, H or H + 1) which entries of the layer's update are only bounded."""
        weight = only_bounded(seen, layer.weight)
        return weight if layer.bias is None else torch.cat([weight, only_bounded(seen, layer.bias)[:, None]], dim=1)

    def _states(self, seen: Observation, layer: OutputLayer) -> list[Auxiliary]:
        """Return the model's outputs on the auxiliary data before the client's steps.

        If there were several steps, the outputs under the weights after them follow.
        """
        path = self.auxiliary or Path()
        found = [auxiliary_outputs(seen, layer, path)]
        if seen.facts.local_steps > 1:
            with after_the_steps(seen):
                found.append(auxiliary_outputs(seen, layer, path))
        return found


def _mixed(states: Sequence[tuple[Tensor, Tensor]], weights: Tensor) -> Tensor:
    """Return (C, H) the mixture of the known examples' gradients."""
    return torch.stack([(d * weights[:, None]).T @ a for d, a in states]).mean(dim=0)


def _gradients(own: Auxiliary, loss: HeadLoss, layer: OutputLayer) -> tuple[Tensor, Tensor]:
    """Return (N, C) and (N, H or H + 1): factors of each example's gradient.

    The gradient of the layer for one example is a matrix of rank one.
    """
    classes = own.probabilities.shape[1]
    target = torch.eye(classes, dtype=torch.float64, device=own.labels.device)[own.labels]
    output_gradients = own.probabilities - (1 - loss.smoothing) * target - loss.smoothing / classes  # (N, C)
    features = own.features
    if layer.bias is not None:
        features = torch.cat([features, torch.ones_like(features[:, :1])], dim=1)
    return output_gradients, features


def mixture(states: Sequence[tuple[Tensor, Tensor]], update: Tensor, *, whole: bool = True) -> Tensor:
    """Return (N,) the weights w >= 0 that explain the update best, on the CPU.

    They minimise |sum_e w_e V_e - G|^2 / |G|^2 + RIDGE |w|^2. With `whole` the term WHOLE (sum_e w_e + s - 1)^2 is
    added, where s >= 0 is the share of examples whose gradients are zero. Without this term a small V_e would get a
    large weight for a part of G that another one explains better. Only inner products of the V_e are needed, and for
    matrices of rank one these are <d a^T, d' a'^T> = (d . d') (a . a').

    Args:
        states: factors (N, C) and (N, H) of the V_e. If there are several states, V_e is their mean.
        update: (C, H) G.
        whole: whether the weights and s are shares of one batch. False if the length of G is unknown.
    """
    length = update.square().sum().clamp_min(1e-300)
    pairs = [(d @ e.T) * (a @ b.T) for d, a in states for e, b in states]
    gram = torch.stack(pairs).mean(dim=0) / length  # (N, N)
    agree = torch.stack([((d @ update) * a).sum(dim=1) for d, a in states]).mean(dim=0) / length  # (N,)
    gram = gram + RIDGE * torch.eye(len(gram), dtype=torch.float64, device=gram.device)
    if whole:
        gram = nn.functional.pad(gram, (0, 1, 0, 1))
        gram[-1, -1] = RIDGE / len(gram)  # s stands for many examples
        gram, agree = gram + WHOLE, nn.functional.pad(agree, (0, 1)) + WHOLE
    root = torch.linalg.cholesky(gram)  # w^T gram w - 2 w^T agree = |root^T w - root^-1 agree|^2 + const
    wanted = torch.linalg.solve_triangular(root, agree[:, None], upper=False)[:, 0]
    found, _ = nnls(root.T.cpu().numpy(), wanted.cpu().numpy(), maxiter=30 * len(gram))
    return torch.from_numpy(found)[: len(states[0][0])]
