"""What is copied of a forward pass: tensors, and the states of random generators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def copied(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors among some values, copied to the CPU.

    They are copied because user code may change the originals in place later.
    """
    return {k: v.detach().to("cpu", copy=True) for k, v in values.items() if isinstance(v, Tensor)}


def random_states(parameters: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the states of torch's default generators, without drawing from them.

    Args:
        parameters: the device of the first parameter says which generator is read beside that of the CPU.

    Returns:
        Device type -> state: `cpu`, and also `cuda` if the first parameter is on a GPU.
    """
    states = {"cpu": torch.get_rng_state()}
    device = next((p.device for p in parameters), torch.device("cpu"))
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states
