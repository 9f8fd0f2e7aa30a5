"""A float32 copy of the public model for searches by gradients."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn

from leakaudit.client.observation import Observation


def in_single_precision(seen: Observation) -> Observation:
    """Return the observation with a float32 copy of its model.

    A float32 model is returned as it is. Updates are stored in float32, and a search needs derivatives of gradients:
    half precision loses them, and some of its operations have no second derivative on a CPU. Double precision takes
    twice the time and adds nothing to an update in float32.

    Args:
        seen: not changed. Weights that two modules share are shared in the copy.
    """
    if all(parameter.dtype == torch.float32 for parameter in seen.model.parameters()):
        return seen
    weights = {
        id(each): nn.Parameter(each.detach().float(), requires_grad=each.requires_grad)
        for each in seen.model.parameters()
    }
    model: nn.Module = copy.deepcopy(seen.model, weights).float()  # buffers, too
    return replace(seen, model=model)
