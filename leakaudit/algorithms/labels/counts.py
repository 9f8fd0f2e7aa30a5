"""Class counts from estimated shares n_c / B, for every label attack.

Letters: C classes, B sequences, n_c sequences of class c. B is granted as an attack's `data_count`, or known from granted lengths or the
protocol's batch size. Otherwise it is guessed from the shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from leakaudit.algorithms.gradient_estimate import only_bounded
from leakaudit.algorithms.labels.clipping import scale_is_known
from leakaudit.algorithms.labels.head_loss import HeadLoss, mean_gradient
from leakaudit.algorithms.labels.logit_regression import AT_LEAST
from leakaudit.algorithms.labels.output_layer import OutputLayer, bias_gradient
from leakaudit.client.observation import Observation
from leakaudit.plugins.attack_protocol import FALSE_EVENTS, Reconstruction

LARGEST_GUESS = 64
"""Largest batch size that is tried if no public fact gives one. Our choice: for larger B, neighbouring shares n/B are closer together
than the error of the predicted probabilities, so a guess would mean nothing."""

ROUNDING = 1e-6
"""Largest error of an entry of the bias's update. Our choice: the entry is a sum of B numbers of at most 1 / B, so the error of float32
is about 1e-7."""

ERRORS = 4.0
"""Standard deviations of an entry's error that a bound allows for. Our choice: more occur in one of 10,000 entries."""

NEAR_INTEGER = 0.1
"""Largest distance of B times a class's share from a whole number. Our choice."""


@dataclass(frozen=True)
class CountsLabels:
    """The options and the last step of all attacks that count labels.

    A threat model may grant the number of sequences, and labelled data.
    """

    data_count: int | None = None
    """Granted number of sequences behind the update. None takes the public number; if there is none, the attack guesses."""

    goal: ClassVar[Literal["text", "words", "labels"]] = "labels"
    false_event_rate: ClassVar[float] = FALSE_EVENTS

    def __post_init__(self) -> None:
        """Refuse a number of sequences below 1."""
        if self.data_count is not None and self.data_count < 1:
            raise ValueError(
                f"data_count is the number of sequences behind the update, at least 1, got {self.data_count}"
            )

    @property
    def grants(self) -> tuple[str, ...]:
        """The names of the options that the threat model grants."""
        return tuple(name for name in ("auxiliary", "data_count") if getattr(self, name, None) is not None)

    def counted(
        self, shares: Tensor, seen: Observation, layer: OutputLayer, loss: HeadLoss, **facts: float
    ) -> Reconstruction:
        """Return the counts that are nearest to the shares.

        The counts add up to the known or guessed number of sequences.

        Args:
            shares: (C,) estimated n_c / B.
            seen: the observation.
            layer: its output layer.
            loss: the head's loss.
            facts: further diagnostics.
        """
        known = batch_size(seen, self.data_count)
        sequences = known or smallest_batch(shares)
        counts = whole_counts(shares, sequences, fewest_of_each(seen, layer, loss, known))
        found = {"batch_size": float(sequences), "batch_size_known": float(known is not None)}
        return Reconstruction(
            label_counts=counts,
            counts_are_shares=known is None,
            diagnostics=found | {"largest_misfit": misfit(shares, counts)} | facts,
        )


def batch_size(seen: Observation, granted: int | None = None) -> int | None:
    """Return the number of sequences behind the update, if an adversary knows it.

    The sequences of all local steps are counted.

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
    return None if bound is None else bound * seen.facts.local_steps


def smallest_batch(shares: Tensor) -> int:
    """Return the smallest B that makes every B * share nearly whole.

    If no B does so, return the B that comes nearest.

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
    """Return the whole numbers nearest to B * shares that add up to B.

    No count is below its known minimum. The numbers are rounded down, and the classes with the largest remainders get the rest. This
    minimises the distance in any norm.

    Args:
        shares: (C,) estimated n_c / B; they need not add up to 1.
        sequences: B.
        fewest: (C,) lower bounds from `fewest_of_each`; None for zeros.

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
    """Return (C,) lower bounds on the number of sequences of each class.

    Probabilities are not negative, so d = mean p - n / B (LLG, Eq. 9) gives n_c >= -B d_c. This is LLG's Property 1 as a number. The
    bounds are zero if d is not known up to rounding: the bias is not shared, a defence is declared, the update may be clipped, or it is
    not float32. They are also zero with class weights, because the mean is then not over B.

    Args:
        seen: the observation.
        layer: its output layer.
        loss: the head's loss.
        sequences: B; None if it is not known.
    """
    exact = not seen.facts.defenses and scale_is_known(seen) and seen.facts.dtype == "float32" and loss.weights is None
    bias = bias_gradient(seen, layer) if exact else None
    nothing = torch.zeros(layer.module.out_features, dtype=torch.long, device=seen.update[layer.weight].device)
    if bias is None or sequences is None:
        return nothing
    off = torch.full_like(bias, ROUNDING)
    name = str(layer.bias)
    if name in seen.error:
        certain = torch.where(only_bounded(seen, name), AT_LEAST * bias, bias)
        off += torch.where(certain == bias, ERRORS * seen.error[name].double(), torch.zeros_like(bias))
        bias = certain
    elif seen.facts.view == "delta":  # error of the difference: the weights before and after are rounded
        size = layer.module.bias.detach().double().abs() + bias.abs()
        off += torch.finfo(torch.float32).eps * size / ((seen.facts.learning_rate or 1.0) * seen.facts.local_steps)
    least = loss.shares(-mean_gradient(bias, loss, sequences)) - off  # (C,)
    found = (sequences * least).ceil().clamp_min(0).long()
    return found if int(found.sum()) <= sequences else nothing  # the update was scaled


def expected_sizes(gradient: Tensor, bounded: Tensor, sequences: int) -> Tensor:
    """Return the logits' gradient with likely sizes for entries of unknown size.

    If every class is as likely, the count n of a class among B sequences is binomial. The sign of d = 1 / C - n / B says which counts are
    possible, and their mean gives the size.

    Args:
        gradient: (C,) of the logits.
        bounded: (C,) bool, entries of which only sign and least size are known.
        sequences: B.

    >>> expected_sizes(torch.tensor([-0.01, 0.01], dtype=torch.float64), torch.tensor([True, True]), 1)
    tensor([-0.5000,  0.5000], dtype=torch.float64)
    """
    even = 1 / len(gradient)
    counts = torch.arange(sequences + 1, dtype=torch.float64, device=gradient.device)  # (B + 1,)
    likely = torch.distributions.Binomial(sequences, torch.tensor(even, dtype=torch.float64)).log_prob(counts.cpu())
    sizes = even - counts / sequences  # (B + 1,)
    possible = (torch.sign(sizes)[None] == torch.sign(gradient)[:, None]) & bounded[:, None]  # (C, B + 1)
    weight = likely.exp().to(gradient) * possible
    mean = (weight * sizes).sum(dim=1) / weight.sum(dim=1).clamp_min(1e-300)
    return torch.where(possible.any(dim=1), mean.to(gradient), gradient)


def on_the_simplex(values: Tensor) -> Tensor:
    """Return the nearest point whose entries are not negative and add up to 1.

    One number is subtracted from all entries, and negative results become 0. Source: Held, Wolfe and Crowder 1974, as in Duchi et al.
    2008, Fig. 1.

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
    """Return the largest distance between B * share and its count.

    If it is below 0.5, the counts are B times the shares, rounded.
    """
    sequences = sum(counts)
    return float((sequences * shares - torch.tensor(counts, dtype=shares.dtype, device=shares.device)).abs().max())


def solve_shares(predicted: Tensor, gradient: Tensor, loss: HeadLoss) -> Tensor:
    """Return (C,) shares n / B as the solution of a linear system.

    The system is (1 - e) x + e / C = x P - d, where x are the shares as the loss weighs them. Each row of P - 1 adds up to 0, so without
    smoothing the system leaves one direction of x open. The sum of the shares, 1, is a further equation that determines it. The
    pseudo-inverse solves it, as in iLRG (Ma et al. 2023).

    Args:
        predicted: (C, C) mean probabilities P_ji of class i for sequences of class j.
        gradient: (C,) of the logits, d.
        loss: the head's loss, with its smoothing e.
    """
    identity = torch.eye(len(gradient), dtype=torch.float64, device=gradient.device)
    system = torch.cat([(1 - loss.smoothing) * identity - predicted.double().T, torch.ones_like(identity[:1])])
    wanted = torch.cat([-gradient.double() - loss.smoothing / len(gradient), torch.ones_like(gradient[:1]).double()])
    return loss.unweighted(torch.linalg.pinv(system) @ wanted)
