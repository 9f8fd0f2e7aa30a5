"""The distance between gradients that a search minimises."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from leakaudit.algorithms.labels.clipping import scale_is_known
from leakaudit.client.observation import Observation


@dataclass(frozen=True)
class Objective:
    """The distance between gradients that a search minimises."""

    kind: Literal["l2", "cosine"] = "l2"
    """L2 distance, or one minus the cosine (LAMP, Sec. 4.2, L_cos)."""
    squared: bool = True
    """Square the L2 distance of each parameter, as DLG does (Zhu et al. 2019); LAMP (L_tag) and GRAB (Eq. 1) print it without the square."""
    per: Literal["parameter", "layer", "whole"] = "parameter"
    """The unit of a cosine, before the mean: each parameter tensor, all parameters of a block, or the whole update. The
    L2 distance is the same for all."""
    whitened: bool = False
    """Take cosines of matrices in a metric in which weak tokens count (`whitening`)."""
    l1: float = 0.0
    """Weight of the additional L1 distance (TAG)."""
    match_norm: bool = False
    """Scale every candidate's gradient to the norm of the observed one first: for updates whose length is unknown."""
    masked: bool = False
    """Compare only where the observed update is not zero (GRAB, Sec. 5.5.2): for pruned updates."""
    filled: bool = False
    """For pruned updates, too: fill in removed entries by the low rank first (`low_rank_completion`), and compare
    everywhere. The more was pruned, the more a cosine counts by the length of its update, because pruning removes most
    of the short ones. Vectors are compared where they are not zero."""
    sigma: float = 0.0
    """Standard deviation of noise on every entry. It is removed from matrices as far as their rank allows
    (`singular_value_shrinkage`). The more of the update is noise, the more a cosine counts by its expected square
    between the denoised and the clean update: noise of one size hides small gradients."""

    def __post_init__(self) -> None:
        """Refuse a metric for an L1 distance or for single entries.

        These have no singular values.
        """
        if self.whitened and (self.kind != "cosine" or self.l1 or self.masked):
            raise ValueError(
                f"whitened compares cosines of whole updates; got kind={self.kind!r}, l1={self.l1}, masked={self.masked}"
            )


def with_declared_defenses(
    objective: Objective, seen: Observation, *, aware: bool, fill: bool, denoise: bool, noise_rescales: bool
) -> Objective:
    """Return the objective with what the protocol declares: clipping, noise, pruning.

    Args:
        objective: the distance.
        seen: its protocol.
        aware: use what is declared.
        fill: fill in pruned entries instead of masking them.
        denoise: remove declared noise.
        noise_rescales: match norms under declared noise, too, not only under clipping.
    """
    pruned = aware and seen.zeroed
    sigma = seen.noise_sigma if aware else 0.0
    rescaled = not scale_is_known(seen) or (noise_rescales and sigma > 0)
    known = not aware or objective.kind == "cosine" or not rescaled
    masked = objective.masked or (pruned and not fill)
    return replace(
        objective,
        match_norm=objective.match_norm or not known,
        whitened=objective.whitened and not masked,
        masked=masked,
        filled=objective.filled or (pruned and fill),
        sigma=objective.sigma or (sigma if denoise else 0.0),
    )
