"""Test whether the length of an update is that of the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from leakaudit.client.observation import Observation

AT_THE_BOUND = 0.99
"""Share of the clipping bound from which an update counts as clipped. Our choice: a clipped update has the norm of the bound, up to rounding
(PyTorch divides by norm + 1e-6); an unclipped one is within a hundredth of it by chance only."""


def scale_is_known(seen: Observation) -> bool:
    """Return whether the update has the length of the gradient.

    Clipping multiplies the whole update by one unknown factor. The norm shows it, as long as no declared defence changed the norm
    afterwards; if one did, the factor counts as unknown. A defence that keeps no length at all (signs, clipping of each example) makes it
    unknown without a bound, too.
    """
    if seen.resized:
        return False
    bound = seen.facts.max_grad_norm
    if bound is None:
        return True
    norm = float(torch.stack([tensor.norm() for tensor in seen.update.values()]).norm())
    return not seen.facts.defenses and norm < AT_THE_BOUND * bound


def clipping_factor(gradient: Tensor, probabilities: Tensor) -> float:
    """Return the smallest k up to 1 for which no share is negative.

    The shares are p_c - g_c / k; k is 1 if every k will do.

    Args:
        gradient: (C,) clipped gradient of the logits.
        probabilities: (C,) what the model predicts for neutral inputs.
    """
    factor = float((gradient / probabilities.clamp_min(1e-12)).max())
    return min(1.0, factor) if factor > 0 else 1.0
