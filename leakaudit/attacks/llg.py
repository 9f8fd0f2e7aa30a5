"""`llg`: how many sequences of each class are in the batch, from the output layer's update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from leakaudit.attacks.clipping import scale_is_known
from leakaudit.attacks.output_layer import check_gradient, find_output_layer, logit_gradient, neutral_outputs
from leakaudit.attacks.reconstruction import APPLIES, Applicability, Reconstruction, not_applicable
from leakaudit.budget import Budget
from leakaudit.errors import AnatomyError
from leakaudit.registry import attack
from leakaudit.snapshot import Observation

LARGEST_GUESS = 64
"""Largest batch size that is tried when nothing public bounds it. Our choice: beyond it neighbouring shares n/B are closer
together than the error of the predicted probabilities, so the guess would mean nothing."""

NEAR_INTEGER = 0.1
"""How far B times a class's share may be from a whole number. Our choice."""


@attack("llg")
@dataclass(frozen=True)
class Llg:
    """Class counts by LLG's Algorithm 1 on the gradient of the logits.

    Algorithm 1 takes every class with a negative gradient once (Property 1), then again and again the class with the
    smallest calibrated gradient, adding back the impact m of one sequence each time, until the batch is full.

    What the paper estimates is partly known here. On the bias gradient, Eq. 9 reads g_c = mean p_c - n_c / B: the impact is
    m = -1/B exactly, and the offset s_c = mean p_c is what the public model predicts for neutral inputs (the paper's
    white-box variant LLG*, with random tokens as dummy data). `white_box=False` is plain LLG: m from Eq. 18, no offsets.

    Batch size: the number of granted lengths, else `batch_size_bound`, since protocols fill their batches (Algorithm 1 too
    takes it as known or guessed). Granted labels are never used. If nothing is known, only the shares n_c / B can be read;
    the smallest B up to 64 that makes all of them whole is returned, so that counts with a common factor come back too
    small: 2 and 2 look like 1 and 1.

    Scale: clipping multiplies the gradient by an unknown k. Where it did, k is taken as the smallest factor that leaves no
    class a negative share, which is right if some class is not in the batch and too small otherwise. The same is done where
    neither bias nor batch size is known, because d read from weight rows is too small by an unknown factor.
    """

    white_box: bool = True
    """Calibrate with the public model (LLG*). False: use the shared gradients only (LLG)."""

    goal: ClassVar[Literal["text", "words", "labels"]] = "labels"
    source: ClassVar[str] = "LLG (Wainakh et al. 2022), Algorithm 1, Eq. 8-20; the bias gradient as g is ours"
    threat_model: ClassVar[str] = (
        "Sees one client's update and knows the weights; the output layer is trained with cross-entropy."
    )

    def applies(self, seen: Observation) -> Applicability:
        """Say whether there is a shared output layer trained on one class a sequence."""
        try:
            check_gradient(seen.facts)
            find_output_layer(seen)
        except AnatomyError as error:
            return not_applicable(str(error))
        return APPLIES

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Count the labels.

        Raises:
            AnatomyError: there is no output layer to read.
        """
        layer = find_output_layer(seen)
        neutral = neutral_outputs(seen, layer, rng)
        gradient = logit_gradient(seen, layer, neutral)  # (C,)
        sequences = batch_size(seen)
        known = sequences is not None
        sized = scale_is_known(seen) and (layer.bias is not None or known)
        scale = 1.0 if sized else clipping_factor(gradient, neutral.probabilities)
        shares = neutral.probabilities - gradient / scale  # (C,), n_c / B by Eq. 9
        sequences = sequences or smallest_batch(shares)
        if self.white_box:
            counts = extract_labels(gradient, sequences, -scale / sequences, scale * neutral.probabilities)
        else:
            counts = extract_labels(
                gradient, sequences, average_impact(gradient, sequences), torch.zeros_like(gradient)
            )
        misfit = float((sequences * shares - torch.tensor(counts, device=shares.device)).abs().max())
        facts = {"batch_size": sequences, "batch_size_known": known, "scale": scale, "largest_misfit": misfit}
        return Reconstruction(label_counts=counts, facts={name: float(value) for name, value in facts.items()})


def batch_size(seen: Observation) -> int | None:
    """Return the number of sequences as far as an adversary knows it."""
    lengths = seen.facts.granted.lengths
    return len(lengths) if lengths is not None else seen.facts.batch_size_bound


def clipping_factor(gradient: Tensor, probabilities: Tensor) -> float:
    """Return the smallest k up to 1 for which no share p_c - g_c / k is negative; 1 if every k will do.

    Args:
        gradient: (C,) clipped gradient of the logits.
        probabilities: (C,) what the model predicts for neutral inputs.
    """
    factor = float((gradient / probabilities.clamp_min(1e-12)).max())
    return min(1.0, factor) if factor > 0 else 1.0


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


def average_impact(gradient: Tensor, sequences: int) -> float:
    """Return the impact m of one sequence from the shared gradients alone: LLG, Eq. 18.

    Args:
        gradient: (C,) one number for each class.
        sequences: B, the paper's |D|.
    """
    return float(gradient[gradient < 0].sum()) / sequences * (1 + 1 / len(gradient))


def extract_labels(gradient: Tensor, sequences: int, impact: float, offsets: Tensor) -> tuple[int, ...]:
    """Count labels by LLG, Algorithm 1.

    One departure: noise can make more classes negative than there are sequences; then only the most negative are taken.

    Args:
        gradient: (C,) the paper's G.
        sequences: B, the paper's |D|.
        impact: the paper's m, negative; 0 if no gradient is.
        offsets: (C,) the paper's S.

    Returns:
        (C,) counts that add up to `sequences`.

    >>> extract_labels(torch.tensor([-0.5, 0.0, 0.25, 0.25]), 4, -0.25, torch.full((4,), 0.25))
    (3, 1, 0, 0)
    """
    counts = torch.zeros_like(gradient, dtype=torch.long)
    left = gradient.clone()
    for label in [c for c in left.argsort().tolist() if gradient[c] < 0][:sequences]:
        counts[label] += 1
        left[label] -= impact
    left -= offsets
    while int(counts.sum()) < sequences:
        label = int(left.argmin())
        counts[label] += 1
        left[label] -= impact
    return tuple(counts.tolist())
