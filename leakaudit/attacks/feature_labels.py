"""`feature-labels`: every sequence's label, from features found in the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from leakaudit.algorithms.labels.counts import whole_counts
from leakaudit.algorithms.labels.feature_roots import Roots, find_roots, row_space
from leakaudit.algorithms.labels.head_loss import HeadLoss, head_loss
from leakaudit.algorithms.labels.output_layer import OutputLayer, bias_gradient, find_output_layer, neutral_inputs
from leakaudit.models.structure import FeedForward, features_into, find_last_feed_forward, logit_jacobian, run_from
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

AGREES = 1e-2
"""Largest relative error at which labels explain the output layer's update.
Measured: the error is 1e-3 or less if all features are found."""

EXPLAINS = 0.05
"""Largest relative error at which m equal sequences explain their gradient.
Our choice: if m equal sequences have one label, m - 1 of them leave an error of 1 / m, which is larger for every m that
is tried."""

ROUNDING = 1e-3
"""Largest error, in units of one sequence's gradient, at which equal sequences explain their gradient.
It is for sequences whose label the model predicts with certainty, because they have hardly any gradient."""

CANDIDATES = 8
"""Sequences whose gradient is tried as the unit if the most likely one explains nothing.
Our choice."""

MOST_EQUAL = 16
"""Most equal sequences that are told apart in one batch. Our choice."""


@attack("feature-labels")
@dataclass(frozen=True)
class FeatureLabels:
    """Exact class counts by instance-wise predictions, at any stage of training.

    The update of the model's last feed-forward part gives the number of distinct sequences, and their features as roots
    (see `leakaudit.algorithms.labels.feature_roots`). From these the public model computes a_k, the inputs of its output
    layer, and its predictions p_k. Then dW = sum_k d_k a_k^T, with a 1 appended to a_k for the bias, is linear in d_k,
    and d_k = (m_k p_k - y_k) / B gives the label counts y_k of the m_k equal sequences with these features. The attack
    needs to know neither B nor a clipping factor: for the classes that are not the label, d_k / p_k is 1 / B times that
    factor.

    It also works with a frozen head. The update of the part's second layer is sum_k g_k u_k^T with known u_k, so it
    gives g_k. And g_k is d_k backpropagated through the public layers behind the part: C unknowns, and as many equations
    as the layer has outputs.

    It needs three things. The last feed-forward part has one row per sequence and no connection around it, as in
    encoders with a class token and a normalisation after each part, and in classifiers with two hidden layers. There are
    fewer sequences than the layer is wide. The update is exact to rounding. With dropout on, the features are still
    found, but the later masks are not. Then p_k is the prediction without dropout, and the counts are those nearest to
    B (mean p - db).
    """

    label: ClassVar[str] = "feature labels"
    meaning: ClassVar[str] = (
        "Finds every sequence's features in the update and reads its label from them. Where it applies it is exact."
    )
    goal: ClassVar[Goal] = "labels"
    source: ClassVar[str] = "derived here; instance-wise labels from features as in iLRG (Ma et al. 2023)"
    false_event_rate: ClassVar[float] = FALSE_EVENTS
    threat_model: ClassVar[str] = "Sees one client's gradient and knows the weights; cross-entropy."

    def applies(self, seen: Observation) -> Applicability:
        """Say whether a feed-forward part's update holds one row per sequence."""
        if seen.facts.local_steps > 1:
            return not_applicable("the update is the sum of several local steps, whose features lie in no common space")
        try:
            head_loss(seen)
            dummy = neutral_inputs(seen, torch.Generator().manual_seed(0), examples=2)
            part = find_last_feed_forward(seen.model, find_output_layer(seen, frozen=True).module, dummy)
            self._updates(seen, part)
        except AnatomyError as error:
            return not_applicable(str(error))
        return APPLIES

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Find the features, then the labels.

        Raises:
            AnatomyError: the update does not say how many sequences there are.
        """
        layer = find_output_layer(seen, frozen=True)
        dummy = neutral_inputs(seen, rng)
        part = find_last_feed_forward(seen.model, layer.module, {name: value[:2] for name, value in dummy.items()})
        first, second = self._updates(seen, part)
        roots = _roots(seen, part, first, second, dummy, rng, budget)
        found = {"batch_rank": float(roots.wanted), "features_found": float(len(roots.features))}
        if len(roots.features) == 0:
            even = _even(seen.facts.num_labels or 0, roots.wanted)
            return Reconstruction(label_counts=even, counts_told=False, stop="budget", diagnostics=found)
        features, logits = _from_features(seen, layer, part, roots.features, dummy)
        predicted = logits.double().softmax(dim=1)  # (N, C)
        complete = len(roots.features) == roots.wanted
        dropped = seen.facts.training_mode and bool(seen.facts.dropout)
        stop: Literal["done", "budget"] = "done" if complete or not budget.exhausted() else "budget"
        shared = layer.weight in seen.update and bool(seen.update[layer.weight].any())
        read = _noise_on(seen, layer.module, part.first, part.second)
        if shared:
            gradient, error = _from_head(seen, layer, features.double())
        else:
            gradient, error = _from_behind(seen, part, second, roots.features, dummy)
        if complete and not dropped:
            counts, off = labels_from(gradient, predicted, head_loss(seen))
            error = max(error, off)
            found |= {"relative_error": error, "sequences": float(sum(counts)), "proved": float(error < AGREES)}
            told = error < AGREES or read == 0.0
        else:
            of_all = bias_gradient(seen, layer) if shared else None
            total = gradient.sum(dim=0) if of_all is None else of_all  # (C,)
            counts = whole_counts(head_loss(seen).shares(predicted.mean(dim=0) - total), roots.wanted)
            found |= {"proved": 0.0}
            told = read == 0.0
        return Reconstruction(label_counts=counts, counts_told=told, stop=stop, diagnostics=found)

    def _updates(self, seen: Observation, part: FeedForward) -> tuple[Tensor, Tensor]:
        """Return the updates of both layers.

        Raises:
            AnatomyError: one of them is not shared.
        """
        names = {id(parameter): name for name, parameter in seen.model.named_parameters()}
        found = [names[id(module.weight)] for module in (part.first, part.second)]
        missing = [name for name in found if name not in seen.update]
        if missing:
            raise AnatomyError(f"the feed-forward part's {missing[0]!r} is frozen or its update is not shared")
        return seen.update[found[0]], seen.update[found[1]]


def _noise_on(seen: Observation, *layers: nn.Module) -> float:
    """Return the largest declared noise on the updates of some layers."""
    read = {id(parameter) for layer in layers for parameter in layer.parameters()}
    return seen.noise_level.of(*(name for name, p in seen.model.named_parameters() if id(p) in read))


def _roots(
    seen: Observation,
    part: FeedForward,
    first: Tensor,
    second: Tensor,
    dummy: dict[str, Tensor],
    rng: torch.Generator,
    budget: Budget,
) -> Roots:
    """Return the features that enter the feed-forward part, as far as they were found.

    Args:
        seen: the observation.
        part: the feed-forward part.
        first: (M, D) update of its first layer.
        second: (M', M) update of its second layer.
        dummy: any inputs of the model; the search starts near their features.
        rng: draws the starts.
        budget: checked before each start.

    Raises:
        AnatomyError: the two updates have different ranks.
    """
    inner, outer = row_space(first), row_space(second)
    if len(inner) != len(outer):
        raise AnatomyError(
            f"the feed-forward part's two updates have ranks {len(inner)} and {len(outer)}: they do not hold the same rows"
        )
    near = features_into(seen.model, part, dummy).double()
    centre = near.mean(dim=0)
    weight, bias = part.first.weight.detach().double(), part.first.bias
    shift = torch.zeros_like(weight[:, 0]) if bias is None else bias.detach().double()
    scatter = float((near - centre).norm(dim=1).mean())
    return find_roots(weight, shift, part.activation, inner, outer, centre, scatter, rng, budget)


def _from_head(seen: Observation, layer: OutputLayer, features: Tensor) -> tuple[Tensor, float]:
    """Return the gradients of the logits from the head's update.

    Args:
        seen: the observation.
        layer: its output layer.
        features: (N, H) its inputs.

    Returns:
        (N, C) gradients of the distinct sequences' logits, and the relative error with which they explain the update.
    """
    update, matrix = seen.update[layer.weight].double(), features
    bias = bias_gradient(seen, layer)
    if bias is not None:
        update = torch.cat([update, bias[:, None]], dim=1)
        matrix = torch.cat([matrix, torch.ones_like(matrix[:, :1])], dim=1)
    gradient = (update @ torch.linalg.pinv(matrix)).T
    return gradient, float((gradient.T @ matrix - update).norm() / update.norm())


def _from_behind(
    seen: Observation, part: FeedForward, update: Tensor, x: Tensor, dummy: dict[str, Tensor]
) -> tuple[Tensor, float]:
    """Return the gradients of the logits from the feed-forward part's second layer.

    This way is for a head that shares no update.

    Args:
        seen: the observation.
        part: the feed-forward part.
        update: (M', M) of its second layer.
        x: (N, D) features that enter the part.
        dummy: any inputs of the model.

    Returns:
        (N, C) gradients, and the relative error with which they explain the update.
    """
    bias = part.first.bias
    inner = x @ part.first.weight.detach().double().T + (0.0 if bias is None else bias.detach().double())
    with torch.no_grad():
        u: Tensor = part.activation(inner)  # (N, M)
    pulled = (update.double() @ torch.linalg.pinv(u)).T  # (N, M'): g_k
    behind = logit_jacobian(seen.model, part, x, dummy)  # (N, C, M')
    gradient = (torch.linalg.pinv(behind.transpose(1, 2)) @ pulled[:, :, None])[:, :, 0]  # (N, C)
    again = torch.einsum("nc,ncm->nm", gradient, behind).T @ u
    return gradient, float((again - update).norm() / update.norm())


def labels_from(gradient: Tensor, predicted: Tensor, loss: HeadLoss) -> tuple[tuple[int, ...], float]:
    """Return class counts, and the relative error with which they explain gradients.

    Args:
        gradient: (N, C) of the logits of each distinct sequence, w (m p - y) / B up to clipping.
        predicted: (N, C) predictions of the model.
        loss: of the head.
    """
    spread = loss.smoothing / predicted.shape[1]
    weights = torch.ones_like(predicted[0]) if loss.weights is None else loss.weights.to(predicted)
    # One sequence of class y adds s w_y (p - spread) to the gradients of the other classes, so their ratio to p - spread is
    # s w_y. If the model predicts the label with certainty, p - spread is nearly zero, so each sequence counts by its size.
    label = gradient.argmin(dim=1)
    rest = ~torch.nn.functional.one_hot(label, predicted.shape[1]).bool()
    left = (predicted - spread) * rest
    mass = left.square().sum(dim=1)  # (N,)
    scales = (gradient * left).sum(dim=1) / mass.clamp_min(1e-300) / weights[label]
    rows = [_Row(predicted[k], weights, loss.smoothing) for k in range(len(predicted))]
    units = [_weighted_median(scales, mass)]
    units += [scales[k] / m for k in mass.argsort(descending=True)[:CANDIDATES].tolist() for m in (1, 2, 3)]
    tried = []
    for unit in units:
        found = [row.labels(gradient[k] / unit) for k, row in enumerate(rows)]
        off = sum(error**2 for _, error in found) ** 0.5 * float(unit) / float(gradient.norm())
        tried.append((off, -float(unit), sum(counts for counts, _ in found)))
        if off <= AGREES and len(tried) == 1:
            break
    least = min(off for off, _, _ in tried)
    # Half the unit explains the same with twice as many sequences, so of equal explanations the fewest sequences win.
    off, _, counts = min((t for t in tried if t[0] <= 2 * least + 1e-6), key=lambda t: t[1])
    return tuple(torch.as_tensor(counts).tolist()), off


def _weighted_median(values: Tensor, weights: Tensor) -> Tensor:
    """Return the value below which half of the weight lies.

    Args:
        values: (N,).
        weights: (N,), each at least 0.
    """
    order = values.argsort()
    below = weights[order].cumsum(dim=0)
    return values[order[int((below >= below[-1] / 2).nonzero()[0, 0])]]


class _Row:
    """One distinct sequence of the batch, and the labels that its gradient can hold.

    The gradient of m equal sequences with label counts y is sum_c y_c w_c (p - e_c), with e_c the smoothed label c.
    """

    def __init__(self, predicted: Tensor, weights: Tensor, smoothing: float) -> None:
        classes = len(predicted)
        labels = (1 - smoothing) * torch.eye(
            classes, dtype=predicted.dtype, device=predicted.device
        ) + smoothing / classes
        self._effects = weights[:, None] * (predicted - labels)  # (C, C): the gradient of one sequence of each class
        self._inverse = torch.linalg.pinv(torch.cat([self._effects.T, torch.ones_like(self._effects[:1])]))

    def labels(self, gradient: Tensor) -> tuple[Tensor, float]:
        """Return the counts (C,) of the fewest equal sequences that explain a gradient.

        Args:
            gradient: (C,) in units of one sequence of weight 1.

        Returns:
            The counts, and their distance from the gradient.
        """
        nearest, closest = torch.zeros(len(gradient), dtype=torch.long, device=gradient.device), float("inf")
        for count in range(1, MOST_EQUAL + 1):
            solved = self._inverse @ torch.cat([gradient, torch.full_like(gradient[:1], count)])
            whole = torch.tensor(whole_counts(solved / count, count), device=gradient.device)
            error = float((whole.to(gradient) @ self._effects - gradient).norm())
            if error < closest:
                nearest, closest = whole, error
            if error <= max(EXPLAINS * float(gradient.norm()), ROUNDING):
                break
        return nearest, closest


def _from_features(
    seen: Observation, layer: OutputLayer, part: FeedForward, x: Tensor, dummy: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return inputs (N, H) and outputs (N, C) of the output layer, given features."""
    taken: list[Tensor] = []
    handle = layer.module.register_forward_pre_hook(lambda _, args: taken.append(args[0].detach()))
    try:
        logits = run_from(seen.model, part, x, dummy)
    finally:
        handle.remove()
    features = taken[-1]
    return (features if features.dim() == 2 else features[:, 0]), logits


def _even(classes: int, sequences: int) -> tuple[int, ...]:
    return whole_counts(torch.full((classes,), 1 / classes), sequences)
