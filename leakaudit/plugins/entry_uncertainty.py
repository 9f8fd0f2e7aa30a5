"""How far a recomputed entry may lie from the client's own, for defences whose outcome jumps from one value to the next."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

CANCELLED = 0.01
"""Share of the tolerance that counts relative to the whole update. Our choice: where a gradient is zero but for rounding (a key's bias),
an error is far above the tensor's own size, and was measured at 1e-8 of the whole update's in float32 and 1e-4 in bf16."""


def uncertainties(recomputed: Mapping[str, Tensor], tolerance: float) -> dict[str, Tensor]:
    """Return how far each entry may be off, in the update's units: parameter name -> tensor of the parameter's shape.

    An entry that is exactly zero is taken to be exact: no token of the batch reached it.

    Args:
        recomputed: parameter name -> update, computed again.
        tolerance: relative error up to which it is right.
    """
    sizes = {name: float(g.double().square().mean().sqrt()) if g.numel() else 0.0 for name, g in recomputed.items()}
    entries = sum(g.numel() for g in recomputed.values())
    whole = (sum(sizes[name] ** 2 * g.numel() for name, g in recomputed.items()) / max(1, entries)) ** 0.5
    return {
        name: torch.where(g == 0, 0.0, tolerance * (sizes[name] + CANCELLED * whole)) for name, g in recomputed.items()
    }
