"""The gradients that FSDP2 keeps until its processes exchange them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def waiting_gradients(model: nn.Module) -> Iterator[Tensor]:
    """Yield the gradients of a model that FSDP2 has not exchanged yet.

    After `set_requires_gradient_sync(False)`, which Accelerate calls for all micro-batches of a step but the last, FSDP2 sums gradients of
    whole parameters beside the shards, whose `grad` stays None. Torch has no public name for these sums in 2.6 to 2.13; if another version
    keeps them elsewhere, nothing is yielded.

    Args:
        model: with or without modules of FSDP2.

    Returns:
        Gradients of whole parameters, in the type in which they are summed; no copies.
    """
    for module in model.modules():
        read: Any = getattr(module, "_get_fsdp_state", None)
        state = None if read is None else read()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for held in (one for group in groups for one in getattr(group, "fsdp_params", ())):
            summed = getattr(held, "unsharded_accumulated_grad", None)
            latest = getattr(getattr(held, "_unsharded_param", None), "grad", None)
            yield from (gradient for gradient in (summed, latest) if gradient is not None)
