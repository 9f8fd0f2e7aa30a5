"""A classifier's output layer: its module, its inputs and its outputs.

Letters: N examples, T tokens, H features into the output layer, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from leakaudit.errors import AnatomyError
from leakaudit.models.structure.trace import inputs_of


def find_output_head(model: nn.Module, classes: int) -> nn.Linear:
    """Return the last `nn.Linear` that has one output for each class.

    Raises:
        AnatomyError: there is no such layer.
    """
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == classes]
    if not layers:
        raise AnatomyError(
            f"looked for a linear layer with {classes} outputs, one for each class, and found none; "
            "give the model's number of labels as it was trained"
        )
    return layers[-1]


def head_outputs(model: nn.Module, head: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the inputs (N, H) of a model's output layer and its logits (N, C).

    Args:
        model: the public model, in eval mode.
        head: its output layer.
        inputs: keyword arguments of its forward, N examples.
    """
    with inputs_of(head) as taken, torch.no_grad():
        logits: Tensor = model(**inputs).logits  # (N, C)
        features = taken[-1]
        if (
            features.dim() == 3
        ):  # a decoder's head runs on every token, and the model then chooses the logits of one token
            every = head(features)  # (N, T, C)
            picked = (every - logits[:, None]).abs().sum(dim=2).argmin(dim=1)  # (N,)
            features = features[torch.arange(len(logits), device=logits.device), picked]
    return features, logits
