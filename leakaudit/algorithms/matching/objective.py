"""The distance between gradients that a search minimises, and how it is taken."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from leakaudit.algorithms.labels.clipping import scale_is_known
from leakaudit.algorithms.matching.guessed_labels import NextTokenLabels
from leakaudit.algorithms.matching.learned_masks import MaskPlaces
from leakaudit.client.noise_level import NoiseLevel
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
    """Standard deviation of noise on every entry; the largest one if `noise` is given. It is removed from matrices as far as their rank allows
    (`singular_value_shrinkage`). The more of the update is noise, the more the weight of a cosine depends on the expected
    squared cosine between the denoised and the clean update, because equal noise hides small gradients more."""
    noise: NoiseLevel | None = field(default=None, hash=False)
    """Standard deviation of the noise on each parameter; None if `sigma` is that of all."""

    def sigma_of(self, name: str) -> float:
        """Return the standard deviation of the noise on a parameter."""
        return self.sigma if self.noise is None else self.noise.of(name)

    def __post_init__(self) -> None:
        """Refuse `whitened` for other distances than cosines of whole updates.

        An L1 distance and a comparison of single entries have no singular values.
        """
        if self.whitened and (self.kind != "cosine" or self.l1 or self.masked):
            raise ValueError(
                f"whitened compares cosines of whole updates; got kind={self.kind!r}, l1={self.l1}, masked={self.masked}"
            )


@dataclass(frozen=True, kw_only=True)
class Matching:
    """What candidates are made of, and which gradients of theirs are compared."""

    length_weight: float = 0.0
    """alpha_reg, weight of the embedding-length regulariser (LAMP, Sec. 4.2)."""
    exposure: str = "*"
    """Patterns of the names of parameters that are matched, joined by `+`; the word embedding never is."""
    dropout: bool = False
    """Give candidates dropout masks of their own and learn them (GRAB, Sec. 4.3)."""
    mask_weight: float = 0.0
    """Weight of the learned masks' penalty: their mean squared distance from their mean, divided by the variance of a drawn mask.
    Not in GRAB."""
    mask_places: MaskPlaces = "all"
    """Learn all masks, as GRAB does, or only those of opening tokens, such as `[CLS]`, and those that belong to no token."""
    aware: bool = True
    """If the protocol declares clipping, noise or pruning: match norms, remove noise, fill in or mask entries, and weigh
    parameters."""
    fill: bool = True
    """Fill in the pruned entries (`low_rank_completion`) instead of masking them."""
    denoise: bool = True
    """Remove declared noise (`singular_value_shrinkage`), and weigh parameters by the remaining signal."""
    noise_rescales: bool = False
    """Match norms also if noise is declared, as GRAB does (Sec. 5.5.1), not only after clipping."""
    relative: bool = True
    """Take steps in units of the root mean square of the word embedding's entries."""
    start_scale: float = 0.0
    """Standard deviation of the entries of random candidates: 1 for N(0, I), as in LAMP (Algorithm 1); 0 makes rows as long as the
    word embedding's on average."""
    start_norm: float = 0.0
    """Norm to which the regulariser pulls the rows of candidates; 0 for the mean norm of the word embedding's rows."""
    lowest_id: int = 0
    """Lowest token id that may stand in a text, special tokens aside (`WordTable`)."""
    next_tokens: NextTokenLabels = "similar"
    """Labels of embeddings under a causal language model's loss (`guessed_labels`)."""
    bag: bool = False
    """Take only tokens whose rows of the word embedding were updated, if these rows tell them."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of `exposure`."""
        return tuple(pattern.strip() for pattern in self.exposure.split("+"))


def with_declared_defenses(objective: Objective, seen: Observation, how: Matching) -> Objective:
    """Return the objective for declared clipping, noise and pruning."""
    pruned = how.aware and seen.zeroed
    level = seen.noise_level
    sigma = level.largest if how.aware else 0.0
    rescaled = not scale_is_known(seen) or (how.noise_rescales and sigma > 0)
    known = not how.aware or objective.kind == "cosine" or not rescaled
    masked = objective.masked or (pruned and not how.fill)
    return replace(
        objective,
        match_norm=objective.match_norm or not known,
        whitened=objective.whitened and not masked,
        masked=masked,
        filled=objective.filled or (pruned and how.fill),
        sigma=objective.sigma or (sigma if how.denoise else 0.0),
        noise=objective.noise if objective.sigma or not (sigma and how.denoise) or level.is_even else level,
    )
