"""Scores a canary gradient in updates whose noise is drawn again.

The client of a private step adds the noise itself. So from one stored step it can be drawn again as often as wanted, without training. The scores with
and without the canary then show how well these two neighbouring data sets can be told apart in this step, without sampling. They are about the noise that
`Release` draws, and not about the draw that was sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.client.observation import Update
from leakaudit.results.epsilon_bounds import Detections, detection_mu

DRAWS = 1000
"""Draws of the noise with the canary, and as many without. Our choice: they can show a mu of up to 5.4 (1,000 and 0 hits, 95 % confidence)."""

Release = Callable[[Update, torch.Generator], Update]
"""Returns what is sent of an update before noise: the run's own mechanism, or a declared one."""


@dataclass(frozen=True)
class CanaryScores:
    """Scores of one canary, which are comparable among each other."""

    with_record: tuple[float, ...]
    """(N,) scores of releases of the step that holds the canary, in units of the update."""
    without_record: tuple[float, ...]
    """(N,) scores of releases of the step without it."""
    length: float
    """Norm of what the canary adds to the update. Without noise the scores are this and 0."""

    def detections(self) -> Detections:
        """Return how often a score is above half of the canary's length.

        This threshold is the middle between the two means, whatever the noise, so it is fixed before the noise is drawn.
        """
        middle = self.length / 2
        return Detections(
            sum(score > middle for score in self.with_record),
            len(self.with_record),
            sum(score > middle for score in self.without_record),
            len(self.without_record),
        )

    def mu(self, confidence: float = 0.95) -> float:
        """Bound mu of one step from below; see `detection_mu` for its conditions.

        A claim of mu for one step, without sampling, that is smaller than the bound is contradicted with this confidence. A bound below the claim confirms
        nothing.
        """
        return detection_mu(self.detections(), confidence=confidence)


def canary_scores(
    with_record: Update, without_record: Update, release: Release, rng: torch.Generator, draws: int = DRAWS
) -> CanaryScores:
    """Score a canary in many releases of one step.

    The score of a release u is <u - without, d> / ||d|| with d = with - without. For Gaussian noise of standard deviation s in every entry
    the scores are N(||d||, s^2) and N(0, s^2), so mu = ||d|| / s, and no test tells these two updates apart better. Source: Nasr et al. 2023
    (arXiv 2302.07956), section 5, gradient canaries; the redrawing of known noise is our own.

    Args:
        with_record: parameter name -> update with the canary, clipped and before noise.
        without_record: the same without it, with the same divisor.
        release: adds the noise.
        rng: source of the noise.
        draws: number of releases of each of the two.

    Raises:
        ValueError: the two updates have other parameters, or are the same.
    """
    if with_record.keys() != without_record.keys():
        raise ValueError("the updates with and without the canary have different parameters")
    direction = {name: with_record[name].double() - without_record[name].double() for name in with_record}
    length = float(torch.sqrt(_inner(direction, direction)))
    if not length > 0:
        raise ValueError("the updates with and without the canary are the same, so no score can tell them apart")

    def score(update: Update) -> float:
        sent = release(update, rng)
        shift = {name: sent[name].double() - without_record[name].double() for name in direction}
        return float(_inner(shift, direction)) / length

    return CanaryScores(
        tuple(score(with_record) for _ in range(draws)), tuple(score(without_record) for _ in range(draws)), length
    )


def gaussian_release(sigma: float) -> Release:
    """Return the mechanism that adds Gaussian noise to every entry.

    Args:
        sigma: standard deviation in units of the update, 0 or more.
    """

    def release(update: Update, rng: torch.Generator) -> Update:
        return {
            name: tensor + sigma * torch.randn(tensor.shape, generator=rng, device=rng.device).to(tensor.device)
            for name, tensor in update.items()
        }

    return release


def _inner(one: Update, other: Update) -> Tensor:
    """Return the inner product over all parameters."""
    return torch.stack([(one[name] * other[name]).sum() for name in one]).sum()
