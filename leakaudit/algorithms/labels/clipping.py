"""Test whether the length of an update is that of the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from leakaudit.algorithms.gradient_estimate import only_bounded
from leakaudit.client.observation import Observation

AT_THE_BOUND = 0.99
"""An update counts as clipped if its norm is at least this share of the clipping bound. Our choice: the norm of a clipped update is the
bound, up to rounding (PyTorch divides by norm + 1e-6). An unclipped update is within a hundredth of the bound by chance only."""


def scale_is_known(seen: Observation) -> bool:
    """Return whether the update has the length of the gradient.

    Clipping multiplies the whole update by one unknown factor. The norm shows whether the update was clipped, unless a declared defence
    may have changed the norm afterwards. So if the client clips and declares a defence, the factor counts as unknown. It also counts as
    unknown after a defence that does not keep the length (signs, clipping of each example), even if the client does not clip. If the
    update is an estimate of a gradient in which some entries are only bounded, its norm is not known either.
    """
    if seen.resized or seen.only_a_direction:
        return False
    bound = seen.facts.max_grad_norm
    if bound is None:
        return True
    if any(bool(only_bounded(seen, name).any()) for name in seen.error):
        return False  # the norm is not known
    norm = float(torch.stack([tensor.norm() for tensor in seen.update.values()]).norm())
    return not seen.facts.defenses and norm < AT_THE_BOUND * bound


def clipping_factor(gradient: Tensor, probabilities: Tensor) -> float:
    """Return the smallest k, at most 1, for which no share is negative.

    The shares are p_c - g_c / k. Return 1 if no share is negative for any k.

    Args:
        gradient: (C,) clipped gradient of the logits.
        probabilities: (C,) mean predicted probabilities for neutral inputs.
    """
    factor = float((gradient / probabilities.clamp_min(1e-12)).max())
    return min(1.0, factor) if factor > 0 else 1.0
