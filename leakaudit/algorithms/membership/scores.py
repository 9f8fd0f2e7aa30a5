"""Scores that say who was in a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from leakaudit.algorithms.gradient_estimate import as_gradient
from leakaudit.algorithms.membership.alignment import align
from leakaudit.algorithms.membership.candidates import Candidate
from leakaudit.algorithms.membership.readings import FEWEST, Readings, read_texts
from leakaudit.client.observation import Observation, Update
from leakaudit.errors import ConfigError, SnapshotError


@dataclass(frozen=True)
class MembershipScores:
    """Scores of candidates, in standard deviations of texts outside the round."""

    candidates: Tensor
    """(N,) float64, in the order of the candidates; large for texts of the round."""
    calibration: Tensor
    """(M,) float64: scores of the calibration texts."""

    def threshold(self, false_rate: float) -> float:
        """Return the score above which a text counts as a member.

        It is the quantile of a normal distribution, as which the calibration scores are standardised.

        Args:
            false_rate: share, above 0 and below 1, of texts that were not in the round and still are above the threshold.
        """
        return NormalDist().inv_cdf(1 - false_rate)


def membership_scores(
    seen: Observation, candidates: Sequence[Candidate], calibration: Sequence[Candidate]
) -> MembershipScores:
    """Return how much the update says that each candidate was in the round.

    Each text is compared with all others, so more calibration texts and more candidates make the scores sharper. Of two candidates that
    are nearly the same, each takes a part of the other's score.

    Args:
        seen: model before the round, and update.
        candidates: N texts of which it is not known whether they were in the round (the grant `candidates`).
        calibration: M texts of the same source that were not in the round and are no candidates, at least `FEWEST`.

    Raises:
        AnatomyError, ConfigError: as for `read_texts`; and fewer than `FEWEST` calibration texts, or texts that are in both.
        SnapshotError: the update is zero.
    """
    check_apart(candidates, calibration)
    return scores_of(seen, read_texts(seen, candidates), read_texts(seen, calibration))


def check_apart(candidates: Sequence[Candidate], calibration: Sequence[Candidate]) -> None:
    """Refuse too few calibration texts, and candidates that are among them.

    Raises:
        ConfigError: with the numbers.
    """
    if len(calibration) < FEWEST:
        raise ConfigError(
            f"membership compares candidates with at least {FEWEST} texts that were not in the round; got {len(calibration)}"
        )
    both = {text.token_ids for text in candidates} & {text.token_ids for text in calibration}
    if both:
        raise ConfigError(
            f"{len(both)} of {len(candidates)} candidates are also calibration texts; calibrate with texts that nobody asks about"
        )


def scores_of(seen: Observation, candidates: Readings, calibration: Readings) -> MembershipScores:
    """Return `membership_scores` from texts that have been read.

    Args:
        seen: the round; readings of another round with the same model before it are valid.
        candidates: of N texts.
        calibration: of M texts, read on the same entries.

    Raises:
        SnapshotError: the update is zero.
    """
    return scores_from(entries_of(seen, calibration), candidates, calibration)


def entries_of(seen: Observation, readings: Readings) -> Tensor:
    """Return (P,) float32: the read entries of an update on the CPU.

    They have the form that sums of gradients resemble best: the movement of Adam, or the gradient behind another optimizer's step.
    """
    return readings.of_update(_comparable(seen)).cpu()


def scores_from(update: Tensor, candidates: Readings, calibration: Readings) -> MembershipScores:
    """Return `membership_scores` from the entries of any update.

    The calibration scores are those of texts that their own fit did not see (leave-one-out residuals: Cook and Weisberg 1982, section 2.2), as
    it did not see the candidates.

    Args:
        update: (P,) float32, from `entries_of` or made of gradients.
        candidates: of N texts.
        calibration: of M texts, read on the same entries.

    Raises:
        SnapshotError: the update is zero.
    """
    if not bool(update.any()):
        raise SnapshotError("the update is zero in all layers, so it says nothing about who was in the round")
    gradients = torch.cat([calibration.gradients, candidates.gradients])
    found = align(update, gradients, torch.cat([calibration.text, candidates.text + calibration.texts]))
    known = _covariates(calibration)
    mine = calibration.largest(found[: len(calibration.text)])
    fit = torch.linalg.lstsq(known, mine[:, None], driver="gelsd").solution[:, 0]
    rest = mine - known @ fit
    spread = rest.square().sum().div(max(1, len(rest) - known.shape[1])).sqrt().clamp_min(1e-300)
    leverage = (known @ torch.linalg.pinv(known)).diagonal()  # (M,)
    theirs = candidates.largest(found[len(calibration.text) :]) - _covariates(candidates) @ fit
    return MembershipScores(theirs / spread, rest / (1 - leverage).clamp_min(_LEAST_FREE) / spread)


_LEAST_FREE = 0.05
"""Least part of a calibration text that its fit leaves free. Our choice: one text that fixes the fit alone then has no endless score."""


def _covariates(texts: Readings) -> Tensor:
    """Return (texts, 3) float64: 1, the loss before the round, and log tokens.

    They take out what the model before the round tells by itself.
    """
    loss, length = texts.first(texts.losses), texts.largest(texts.lengths.double()).log()
    return torch.stack([torch.ones_like(loss), loss, length], dim=1)


def _comparable(seen: Observation) -> Update:
    """Return the update in the form that sums of gradients resemble best.

    The gradient behind a first step of Adam is known badly where it is large; its movement is known everywhere.
    """
    estimate, _ = as_gradient(seen)
    bounded = seen.facts.update_kind in ("adam", "adafactor") and not estimate.only_a_direction
    return seen.update if bounded else estimate.update
