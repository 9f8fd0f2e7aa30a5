"""Proof by simulation: a guess is proved if its update agrees to rounding.

No ground truth is needed. The labels need not be guessed: from the texts the public model computes the features a_b
that enter the output layer and the predicted probabilities p_b, and the layer's update dW = 1/B sum_b (p_b - y_b) a_b^T
is linear in the labels y_b.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations

import torch
from torch import Tensor, nn

from leakaudit.algorithms.adam_step import AdamStep, step_disagreement
from leakaudit.algorithms.labels.output_layer import OutputLayer, find_output_layer
from leakaudit.algorithms.padding import padded_batch
from leakaudit.client.facts import IGNORED_LABEL
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.models.structure.trace import inputs_of
from leakaudit.models.versions import call_with
from leakaudit.plugins.attack_protocol import GuessedSequence
from leakaudit.plugins.budget import Budget

AGREES = 1e-4
"""Largest median relative error over the weight matrices at which a guess is proved.
It is the median because the output layer dominates the error of the whole update, and in an untrained model that layer's
error hardly depends on one wrong word. Measured; see docs/decisions/span_constants.md."""

DISAGREES = 0.05
"""Largest median share of entries, over the weight matrices, that may disagree with a first Adam step if a guess is proved.
Chosen on training sentences; see docs/decisions/adam_deltas.md."""

MOST_RELABELLED = 16
"""Most texts of a guess whose labels are changed one by one.
Our choice: each change is one simulated step."""

MOST_ORDERED = 3
"""Largest number of local steps for which every order is simulated.
Our choice: three steps have 6 orders, five have 120."""


@dataclass(frozen=True)
class Proof:
    """The guess with its proof marks, its labels and the simulation's error."""

    sequences: tuple[GuessedSequence, ...]
    label_counts: tuple[int, ...] | None = None
    diagnostics: dict[str, float] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether all sequences are proved."""
        return all(sequence.proved for sequence in self.sequences)


def prove(seen: Observation, guess: Sequence[GuessedSequence], budget: Budget) -> Proof:
    """Simulate the step that a guess claims, and mark the guess if the update agrees.

    Nothing is simulated, and the guess is returned as it is, in these cases: the model is not whole; the guess is empty;
    the task is neither classification nor causal language modelling; dropout is on (masks of later layers are unknown); a
    defence is declared; a classifier does not share its output layer; the budget is used up.

    Args:
        seen: the observation.
        guess: every sequence of the batch.
        budget: checked before the simulation.
    """
    plain = Proof(tuple(guess))
    facts = seen.facts
    dropped = facts.training_mode and any(rate > 0 for rate in facts.dropout.values())
    known = facts.task in ("classification", "causal-lm")
    if not (seen.whole and guess and known) or dropped or facts.defenses or budget.exhausted():
        return plain
    step = AdamStep.of(seen)
    ids, mask = padded_batch(seen, [sequence.token_ids for sequence in guess])
    if facts.task == "causal-lm":  # a language model's labels are the tokens themselves
        labels = ids.masked_fill(mask == 0, IGNORED_LABEL)
    else:
        try:
            layer = find_output_layer(seen)
        except AnatomyError:
            return plain
        labels = _labels(seen if step is None else step.estimate, layer, ids, mask)
    limit = largest_error(seen)
    if step is not None:
        error, labels = _least_disagreement(step, ids, mask, labels)
    else:
        orders = _orders(seen, len(ids))
        error = min(_relative_error(seen, ids[order], mask[order], labels[order]) for order in orders)
    if error > limit:
        return Proof(tuple(guess), diagnostics={"resimulation_error": error})
    counts = torch.bincount(labels, minlength=facts.num_labels or 0) if facts.task == "classification" else None
    return Proof(
        sequences=tuple(replace(sequence, own_score=1.0, proved=True) for sequence in guess),
        label_counts=None if counts is None else tuple(counts.tolist()),
        diagnostics={"resimulation_error": error},
    )


def largest_error(seen: Observation) -> float:
    """Return the error of a simulated guess at which `prove` still proves it."""
    return AGREES if AdamStep.of(seen) is None else DISAGREES


def simulation_error(seen: Observation, guess: Sequence[Sequence[int]]) -> float:
    """Return the relative error of a guess's simulated update, as `prove` measures it.

    Args:
        seen: the observation, of a classifier with its output layer shared.
        guess: token ids of every sequence, in the order of the client's steps.

    Returns:
        The median relative error, or for a first Adam step the median share of entries that disagree; infinity if nothing can be
        simulated.
    """
    try:
        layer = find_output_layer(seen)
    except AnatomyError:
        return float("inf")
    if not seen.whole:
        return float("inf")
    ids, mask = padded_batch(seen, guess)
    step = AdamStep.of(seen)
    labels = _labels(seen if step is None else step.estimate, layer, ids, mask)
    return _relative_error(seen, ids, mask, labels) if step is None else _adam_disagreement(step, ids, mask, labels)


def _orders(seen: Observation, count: int) -> list[list[int]]:
    """Return the orders in which a client may have taken its texts.

    Only local steps depend on the order. With one text per step and at most `MOST_ORDERED` steps every order is tried.
    Otherwise only the guess's own order is tried, which is right to first order in the learning rate.
    """
    plain = list(range(count))
    if seen.facts.view != "delta" or count != seen.facts.local_steps or count > MOST_ORDERED:
        return [plain]
    return [list(order) for order in permutations(plain)]


def _labels(seen: Observation, layer: OutputLayer, ids: Tensor, mask: Tensor) -> Tensor:
    """Return (B,) int64: the labels that explain the output layer's update best.

    Least squares gives the gradients of the logits. Clipping scales them by an unknown factor, which is estimated and
    divided out.
    """
    with inputs_of(layer.module) as taken, torch.no_grad():
        logits = seen.model(input_ids=ids, attention_mask=mask).logits
    features = taken[-1]
    if features.dim() == 3:  # a decoder classifies at the last real token
        features = features[torch.arange(len(ids)), mask.sum(1) - 1]
    update = seen.update[layer.weight].double()
    matrix = features.double()
    if layer.bias is not None:
        update = torch.cat([update, seen.update[layer.bias].double()[:, None]], dim=1)
        matrix = torch.cat([matrix, torch.ones_like(matrix[:, :1])], dim=1)
    gradient = update @ torch.linalg.pinv(matrix)  # (C, B): (p_b - y_b) / B up to the clipping factor
    expected = logits.double().softmax(1).T / len(ids)
    scale = _clip_factor(gradient, expected)
    labels: Tensor = (expected - gradient / scale).argmax(dim=0)
    return labels


def _clip_factor(gradient: Tensor, expected: Tensor) -> float:
    """Return the factor by which clipping scaled the gradients.

    It is the c for which expected - gradient / c is a one-hot column over B for every sequence. For the class y: p_y -
    1 = B g_y / c; for all other classes p = B g / c, so their ratio is 1 / c.
    """
    others = gradient > 0
    if not bool(others.any()):
        return 1.0
    ratio = (gradient[others] / expected[others].clamp_min(1e-12)).median()
    return float(ratio.clamp_min(1e-12))


def _relative_error(seen: Observation, ids: Tensor, mask: Tensor, labels: Tensor) -> float:
    """Return the median relative error over weight matrices, after one common factor.

    The factor is needed because clipping scales the whole update.
    """
    tied = {name for pair in seen.facts.tied for name in pair}
    parameters = {
        name: parameter.detach().requires_grad_()
        for name, parameter in seen.model.named_parameters()
        if name in seen.update and name not in tied
    }
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    delta = seen.facts.view == "delta"
    gradients = _difference(seen, parameters, inputs) if delta else _gradients(seen.model, parameters, inputs)
    pairs = [
        (seen.update[name], gradient)
        for name, gradient in zip(parameters, gradients, strict=True)
        if gradient is not None and gradient.dim() == 2 and bool(gradient.any())
    ]
    own = sum(float(gradient.square().sum(dtype=torch.float64)) for _, gradient in pairs)
    if own == 0.0:
        return float("inf")
    factor = sum(float((observed * gradient).sum(dtype=torch.float64)) for observed, gradient in pairs) / own
    if factor <= 0.0:
        return float("inf")
    errors = [float((observed - factor * g).norm() / (factor * g.norm())) for observed, g in pairs]
    return float(torch.tensor(errors).median())


def _least_disagreement(step: AdamStep, ids: Tensor, mask: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """Return the disagreement with the step, and the labels that give it.

    A head's gradients are large, so a step of Adam says little about their size, and labels that are read from it may be wrong. For
    a classifier every label is changed in turn, and a change that helps is kept.
    """
    best = _adam_disagreement(step, ids, mask, labels)
    if step.seen.facts.task != "classification" or len(ids) > MOST_RELABELLED:
        return best, labels
    for row in range(len(ids)):
        for label in range(step.seen.facts.num_labels or 0):
            if best <= DISAGREES:
                return best, labels
            changed = labels.clone()
            changed[row] = label
            error = _adam_disagreement(step, ids, mask, changed) if label != int(labels[row]) else best
            if error < best:
                best, labels = error, changed
    return best, labels


def _adam_disagreement(step: AdamStep, ids: Tensor, mask: Tensor, labels: Tensor) -> float:
    """Return the median share of entries in which a guess disagrees with the step.

    Only weight matrices count that no other layer shares.
    """
    seen = step.seen
    tied = {name for pair in seen.facts.tied for name in pair}
    parameters = {
        name: parameter.detach().requires_grad_()
        for name, parameter in seen.model.named_parameters()
        if name in seen.update and name not in tied and parameter.dim() == 2
    }
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    gradients = zip(parameters, _gradients(seen.model, parameters, inputs), strict=True)
    return step_disagreement(step, {name: g for name, g in gradients if g is not None and bool(g.any())})


def _gradients(
    model: nn.Module, parameters: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> Sequence[Tensor | None]:
    with torch.enable_grad():
        loss = call_with(model, parameters, inputs).loss
        found: tuple[Tensor | None, ...] = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return found


def _difference(
    seen: Observation, parameters: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> Sequence[Tensor | None]:
    """Return the update of the client's local steps over the batch.

    The batch is split evenly over the steps, in its order. Weights are rounded as the client rounds them, so the right
    batch gives the observed difference up to its noise.
    """
    steps = min(seen.facts.local_steps, len(inputs["input_ids"]))
    rate = seen.facts.learning_rate or 1.0
    now = dict(parameters)
    for rows in torch.arange(len(inputs["input_ids"])).tensor_split(steps):
        part = {name: value[rows] for name, value in inputs.items()}
        made = _gradients(seen.model, now, part)
        now = {
            name: (weight if gradient is None else weight.detach().add(gradient, alpha=-rate)).requires_grad_()
            for (name, weight), gradient in zip(now.items(), made, strict=True)
        }
    return [(parameters[name] - now[name]).detach() / (rate * steps) for name in parameters]
