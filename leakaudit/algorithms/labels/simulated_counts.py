"""Class counts from the sum of several optimizer steps on the output bias.

Adam divides every step by the size of earlier gradients, so the movement of the bias has no unit. But labels are drawn: the counts of
small batches scatter by a known amount, and this scatter is the unit. So the attack draws counts of all local steps, lets the client's own
optimizer make a movement of each draw, and takes the draws whose movement is most like the observed one (approximate Bayesian
computation: Rubin 1984). The idea and its use here are our own. Clipping scales the gradients of steps differently; the draws leave that
out.

Letters: S draws, K local steps, B sequences of a step, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakaudit.algorithms.gradient_estimate import divisor_of
from leakaudit.algorithms.labels.head_loss import HeadLoss
from leakaudit.client.observation import Observation
from leakaudit.client.optimizer import ClientOptimizer

DRAWS = 20_000
"""Number S of draws for an optimizer that moves every entry by itself. Our choice: less than a second."""

DRAWS_OF_VECTORS = 2_000
"""Number S of draws for an optimizer that looks at whole parameters. Our choice: each draw is a parameter."""

NEAREST = 0.005
"""Share of the draws that are averaged. Our choice: 100 of 20,000."""


@dataclass(frozen=True)
class Drawn:
    """Draws of the labels of all local steps."""

    counts: Tensor
    """(S, K, C) float64 number of sequences."""

    @property
    def shares(self) -> Tensor:
        """(S, C) shares of the classes among all sequences."""
        total = self.counts.sum(dim=1)
        return total / total.sum(dim=1, keepdim=True)


def nearest_shares(
    sent: Observation, bias: str, predicted: Tensor, sequences: int, loss: HeadLoss, rng: torch.Generator
) -> tuple[Tensor, float]:
    """Return the shares n / N of the classes among the sequences of all steps.

    Args:
        sent: what the client sent, with an optimizer that began afresh.
        bias: name of the output layer's bias.
        predicted: (K, C, C) mean probability of class i for sequences of class j, in each step.
        sequences: N, the number of sequences of all steps.
        loss: the head's loss.
        rng: draws the counts; a CPU generator.

    Returns:
        (C,) float64, and the root mean square distance between the movements of the chosen draws and the observed one, in units of the
        update.
    """
    optimizer = sent.facts.optimizer
    assert optimizer is not None  # a caller passes a difference of weights that is not of plain SGD
    steps, classes = predicted.shape[:2]
    by_entry = optimizer.kind != "adafactor"
    draws = DRAWS if by_entry else DRAWS_OF_VECTORS
    drawn = _draw(draws, steps, classes, max(1, sequences // steps), rng)
    gradients = _gradients(drawn, predicted.double().cpu(), loss)  # (S, K, C)
    weight = dict(sent.model.named_parameters())[bias].detach().cpu()
    moved = _moved(optimizer, bias, weight, gradients, by_entry) / divisor_of(sent.facts)  # (S, C)
    off = (moved - sent.update[bias].cpu()).double().square().mean(dim=1).sqrt()  # (S,)
    nearest = off.argsort()[: max(1, int(NEAREST * draws))]
    return drawn.shares[nearest].mean(dim=0), float(off[nearest].square().mean().sqrt())


def _draw(draws: int, steps: int, classes: int, size: int, rng: torch.Generator) -> Drawn:
    """Draw labels from shares that are drawn evenly from all shares."""
    even = -torch.rand(draws, classes, generator=rng, dtype=torch.float64).clamp_min(1e-300).log()
    labels = torch.multinomial(even, steps * size, replacement=True, generator=rng)  # (S, K * B)
    one_hot = nn.functional.one_hot(labels.view(draws, steps, size), classes)
    return Drawn(one_hot.sum(dim=2).double())


def _gradients(drawn: Drawn, predicted: Tensor, loss: HeadLoss) -> Tensor:
    """Return (S, K, C) gradients of the logits: mean p - label, as the loss weighs it."""
    weights = torch.ones(predicted.shape[1], dtype=torch.float64) if loss.weights is None else loss.weights.cpu()
    size = drawn.counts.sum(dim=2, keepdim=True)
    weighted = drawn.counts * weights
    shares = weighted / weighted.sum(dim=2, keepdim=True)
    label = (1 - loss.smoothing) * shares + loss.smoothing / len(weights)
    gradient = torch.einsum("skj,kji->ski", shares, predicted) - label
    return gradient * size if loss.summed else gradient


def _moved(optimizer: ClientOptimizer, bias: str, weight: Tensor, gradients: Tensor, by_entry: bool) -> Tensor:
    """Return (S, C) weights before minus weights after the optimizer's steps.

    Args:
        optimizer: of the client.
        bias: name of the bias.
        weight: (C,) before the steps.
        gradients: (S, K, C).
        by_entry: whether the optimizer moves every entry by itself, so that all draws can be one parameter.
    """
    start = weight.expand(len(gradients), -1)
    parameters = [nn.Parameter(start.clone())] if by_entry else [nn.Parameter(row.clone()) for row in start]
    names = [f"{number}" for number in range(len(parameters))]
    group = optimizer.group_of(bias)
    if group is None:
        return torch.zeros_like(start)
    alone = optimizer.model_copy(update={"groups": (group.model_copy(update={"parameters": tuple(names)}),)})
    stepper = alone.make(dict(zip(names, parameters, strict=True)))
    for number, rate in enumerate(group.learning_rates):
        now = gradients[:, number].to(weight.dtype)
        for parameter, gradient in zip(parameters, [now] if by_entry else now, strict=True):
            parameter.grad = gradient
        stepper.param_groups[0]["lr"] = rate
        stepper.step()
    after = parameters[0] if by_entry else torch.stack(list(parameters))
    return start.float() - after.detach().float()
