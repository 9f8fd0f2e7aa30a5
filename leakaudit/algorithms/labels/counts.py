"""From shares to counts: what all label attacks do with n_c / B once they have read it. C classes, B sequences.

How many sequences there are is an option of the threat model: granted as an attack's `data_count`, known from granted lengths
or from the protocol's batch size, or to be guessed from the shares themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from leakaudit.algorithms.labels.clipping import scale_is_known
from leakaudit.algorithms.labels.head_loss import HeadLoss, mean_gradient
from leakaudit.algorithms.labels.output_layer import OutputLayer, bias_gradient
from leakaudit.client.observation import Observation
from leakaudit.plugins.attack_protocol import FALSE_EVENTS, Reconstruction

LARGEST_GUESS = 64
"""Largest batch size that is tried when nothing public bounds it. Our choice: beyond it neighbouring shares n/B are closer
together than the error of the predicted probabilities, so the guess would mean nothing."""

ROUNDING = 1e-6
"""How far an entry of the bias's update may be off. Our choice: it is a sum of B numbers up to 1 / B, so float32 is off by 1e-7."""

NEAR_INTEGER = 0.1
"""How far B times a class's share may be from a whole number. Our choice."""


@dataclass(frozen=True)
class CountsLabels:
    """What all attacks that count labels have in common: they may be granted how many there are, and some labelled data as well."""

    data_count: int | None = None
    """Number of sequences behind the update, granted; None takes what the protocol makes public, else it is guessed."""

    goal: ClassVar[Literal["text", "words", "labels"]] = "labels"
    false_event_rate: ClassVar[float] = FALSE_EVENTS

    def __post_init__(self) -> None:
        """Refuse a number of sequences that is none."""
        if self.data_count is not None and self.data_count < 1:
            raise ValueError(
                f"data_count is the number of sequences behind the update, at least 1, got {self.data_count}"
            )

    @property
    def grants(self) -> tuple[str, ...]:
        """Name what the threat model grants beyond the update."""
        return tuple(name for name in ("auxiliary", "data_count") if getattr(self, name, None) is not None)

    def counted(
        self, shares: Tensor, seen: Observation, layer: OutputLayer, loss: HeadLoss, **facts: float
    ) -> Reconstruction:
        """Return the counts nearest to some shares, for as many sequences as are known or seem to be there.

        Args:
            shares: (C,) estimated n_c / B.
            seen: the observation.
            layer: its output layer.
            loss: of the head.
            facts: more to be said of it.
        """
        known = batch_size(seen, self.data_count)
        sequences = known or smallest_batch(shares)
        counts = whole_counts(shares, sequences, fewest_of_each(seen, layer, loss, known))
        found = {"batch_size": float(sequences), "batch_size_known": float(known is not None)}
        return Reconstruction(
            label_counts=counts, diagnostics=found | {"largest_misfit": misfit(shares, counts)} | facts
        )


def batch_size(seen: Observation, granted: int | None = None) -> int | None:
    """Return the number of sequences behind the update as far as an adversary knows it: those of all its local steps.

    Args:
        seen: its facts hold granted lengths and the protocol's batch size.
        granted: the attack's own `data_count`.
    """
    if granted is not None:
        return granted
    lengths = seen.facts.granted.lengths
    if lengths is not None:
        return len(lengths)
    bound = seen.facts.batch_size_bound
    return None if bound is None else bound * (seen.facts.local_steps if seen.facts.view == "delta" else 1)


def smallest_batch(shares: Tensor) -> int:
    """Return the smallest B that makes every B * share nearly whole, or the one that comes nearest to that.

    Args:
        shares: (C,) estimated n_c / B.

    >>> smallest_batch(torch.tensor([0.667, 0.0, 0.333]))
    3
    """
    sizes = torch.arange(1, LARGEST_GUESS + 1, device=shares.device)  # (64,)
    scaled = sizes[:, None] * shares  # (64, C)
    error = (scaled - scaled.round()).abs().amax(dim=1)  # (64,)
    near = (error <= NEAR_INTEGER).nonzero()
    return int(sizes[near[0, 0]]) if len(near) else int(sizes[error.argmin()])


def whole_counts(shares: Tensor, sequences: int, fewest: Tensor | None = None) -> tuple[int, ...]:
    """Return the whole numbers nearest to B * shares that add up to B and are not below what is known to be there.

    Rounding down and handing what is left to the largest remainders minimises the distance, in any norm.

    Args:
        shares: (C,) estimated n_c / B; they need not add up to 1.
        sequences: B.
        fewest: (C,) as `fewest_of_each` gives them; None for zeros.

    >>> whole_counts(torch.tensor([0.52, 0.26, 0.22, -0.01]), 4)
    (2, 1, 1, 0)
    >>> whole_counts(torch.tensor([0.52, 0.26, 0.22, -0.01]), 4, torch.tensor([0, 0, 0, 2]))
    (2, 0, 0, 2)
    """
    known = torch.zeros_like(shares, dtype=torch.long) if fewest is None else fewest
    open_ = sequences - int(known.sum())
    if open_ == 0:
        return tuple(known.tolist())
    wanted = on_the_simplex((shares.double() * sequences - known) / open_) * open_  # (C,)
    counts = wanted.floor()
    left = open_ - int(counts.sum())
    order = (wanted - counts).argsort(descending=True, stable=True)
    counts[order[:left]] += 1
    return tuple(int(count) for count in counts + known)


def fewest_of_each(seen: Observation, layer: OutputLayer, loss: HeadLoss, sequences: int | None) -> Tensor:
    """Return (C,) how many sequences of each class there are at least, whatever the model makes of them.

    Probabilities are not negative, so d = mean p - n / B (LLG, Eq. 9) gives n_c >= -B d_c: Property 1 as a number. A trained model
    that is wrong about a sequence shows it there. Zeros where d is not known to rounding: the bias is not shared, something
    declared was done to it, it was clipped, it is not float32; and with class weights, where the B in it is another one.

    Args:
        seen: the observation.
        layer: its output layer.
        loss: of the head.
        sequences: B, None where it is not known.
    """
    exact = not seen.facts.defenses and scale_is_known(seen) and seen.facts.dtype == "float32" and loss.weights is None
    bias = bias_gradient(seen, layer) if exact else None
    nothing = torch.zeros(layer.module.out_features, dtype=torch.long, device=seen.update[layer.weight].device)
    if bias is None or sequences is None:
        return nothing
    off = torch.full_like(bias, ROUNDING)
    if seen.facts.view == "delta":  # what rounding the weights before and after leaves of their difference
        size = layer.module.bias.detach().double().abs() + bias.abs()
        off += torch.finfo(torch.float32).eps * size / ((seen.facts.learning_rate or 1.0) * seen.facts.local_steps)
    least = loss.shares(-mean_gradient(bias, loss, sequences)) - off  # (C,)
    found = (sequences * least).ceil().clamp_min(0).long()
    return found if int(found.sum()) <= sequences else nothing  # the update was scaled by somebody


def on_the_simplex(values: Tensor) -> Tensor:
    """Return the nearest point whose entries are not negative and add up to 1.

    Source: Held, Wolfe and Crowder 1974, as in Duchi et al. 2008, Fig. 1: subtract one number from all and cut at 0.

    Args:
        values: (C,).

    >>> on_the_simplex(torch.tensor([0.75, 0.5, -0.5]))
    tensor([0.6250, 0.3750, 0.0000])
    """
    ordered = values.sort(descending=True).values
    excess = (ordered.cumsum(0) - 1) / torch.arange(1, len(values) + 1, device=values.device)
    last = int((ordered > excess).nonzero().max())
    return (values - excess[last]).clamp_min(0)


def misfit(shares: Tensor, counts: tuple[int, ...]) -> float:
    """Return how far the largest B * share is from its count: below 0.5 nothing but rounding was done."""
    sequences = sum(counts)
    return float((sequences * shares - torch.tensor(counts, dtype=shares.dtype, device=shares.device)).abs().max())


def solve_shares(predicted: Tensor, gradient: Tensor, loss: HeadLoss) -> Tensor:
    """Return (C,) shares n / B from (1 - e) x + e / C = x P - d, where x are the shares as the loss weighs them.

    The columns of P - 1 add up to 0, so without smoothing they leave one direction of x open; that shares add up to 1 closes it.
    Solved by pseudo-inverse, as iLRG (Ma et al. 2023) does.

    Args:
        predicted: (C, C) mean probabilities P_ji of class i for sequences of class j.
        gradient: (C,) of the logits, d.
        loss: of the head, with its smoothing e.
    """
    identity = torch.eye(len(gradient), dtype=torch.float64, device=gradient.device)
    system = torch.cat([(1 - loss.smoothing) * identity - predicted.double().T, torch.ones_like(identity[:1])])
    wanted = torch.cat([-gradient.double() - loss.smoothing / len(gradient), torch.ones_like(gradient[:1]).double()])
    return loss.unweighted(torch.linalg.pinv(system) @ wanted)
