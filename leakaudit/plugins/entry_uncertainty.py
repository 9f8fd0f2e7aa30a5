"""The error of each entry of a recomputed update.

The outcome of some defences jumps, such as rounding and signs. They need the error to say which outcomes are possible.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

CANCELLED = 0.01
"""Share of the tolerance that is relative to the whole update. Our choice: if a gradient is zero up to rounding (the bias of a key), its
error is far larger than the tensor itself. Measured: 1e-8 of the size of the whole update in float32, and 1e-4 in bf16."""


def uncertainties(recomputed: Mapping[str, Tensor], tolerance: float) -> dict[str, Tensor]:
    """Return the error of each entry, in the units of the update.

    An entry that is exactly zero counts as exact, because no token of the batch reached it.

    Args:
        recomputed: parameter name -> update, computed again.
        tolerance: largest relative error of the recomputed update.

    Returns:
        Parameter name -> tensor of the parameter's shape.
    """
    sizes = {name: float(g.double().square().mean().sqrt()) if g.numel() else 0.0 for name, g in recomputed.items()}
    entries = sum(g.numel() for g in recomputed.values())
    whole = (sum(sizes[name] ** 2 * g.numel() for name, g in recomputed.items()) / max(1, entries)) ** 0.5
    return {
        name: torch.where(g == 0, 0.0, tolerance * (sizes[name] + CANCELLED * whole)) for name, g in recomputed.items()
    }
