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
    """Square the L2 distance of each parameter, as DLG does (Zhu et al. 2019); in print, LAMP (L_tag) and GRAB (Eq. 1) have no square."""
    per: Literal["parameter", "layer", "whole"] = "parameter"
    """What one cosine compares before the mean is taken: a parameter tensor, all parameters of a block, or the whole update.
    It does not change the L2 distance."""
    whitened: bool = False
    """Take cosines of matrices in a metric that gives weak tokens more weight (`whitening`)."""
    l1: float = 0.0
    """Weight of the additional L1 distance (TAG)."""
    match_norm: bool = False
    """First scale every candidate's gradient to the norm of the observed gradient. For updates whose length is unknown."""
    masked: bool = False
    """Compare only the entries where the observed update is not zero (GRAB, Sec. 5.5.2). For pruned updates."""
    filled: bool = False
    """Also for pruned updates: first fill in the pruned entries by the low rank (`low_rank_completion`), then compare all
    entries. The more was pruned, the more the weight of a cosine depends on the length of its update, because pruning removes
    most of a short update. Vectors are only compared at entries that are not zero."""
    sigma: float = 0.0
    """Standard deviation of noise on every entry. It is removed from matrices as far as their rank allows
    (`singular_value_shrinkage`). The more of the update is noise, the more the weight of a cosine depends on the expected
    squared cosine between the denoised and the clean update, because equal noise hides small gradients more."""

    def __post_init__(self) -> None:
        """Refuse `whitened` for other distances than cosines of whole updates.

        An L1 distance and a comparison of single entries have no singular values.
        """
        if self.whitened and (self.kind != "cosine" or self.l1 or self.masked):
            raise ValueError(
                f"whitened compares cosines of whole updates; got kind={self.kind!r}, l1={self.l1}, masked={self.masked}"
            )


def with_declared_defenses(
    objective: Objective, seen: Observation, *, aware: bool, fill: bool, denoise: bool, noise_rescales: bool
) -> Objective:
    """Return the objective for declared clipping, noise and pruning.

    Args:
        objective: the distance.
        seen: gives what the protocol declares.
        aware: use these declarations.
        fill: fill in pruned entries instead of masking them.
        denoise: remove declared noise.
        noise_rescales: match norms also under declared noise, not only under clipping.
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
