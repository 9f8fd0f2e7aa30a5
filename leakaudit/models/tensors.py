"""A model's parameters, buffers and outputs, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def version_of(tensor: Tensor) -> int:
    """Return torch's count of the writes to a tensor.

    It is 0 for a tensor that was made in inference mode, because torch does not count there.
    """
    return 0 if tensor.is_inference() else tensor._version


def outputs_of(outputs: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield each floating-point tensor of a model's output with its path.

    Examples of paths are `loss` and `hidden_states.3`. If the output is a tensor, its path is `output`.
    """
    if isinstance(outputs, Tensor):
        if outputs.is_floating_point():
            yield path or "output", outputs
        return
    if isinstance(outputs, Mapping):
        items: Any = outputs.items()
    elif isinstance(outputs, tuple | list):
        items = enumerate(outputs)
    else:
        return
    for key, value in items:
        yield from outputs_of(value, f"{path}.{key}" if path else str(key))


def tied_names(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return the names of each parameter that a model uses twice.

    Each pair has the name under which the parameter is listed, then its other name.
    """
    first: dict[int, str] = {}
    pairs = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            pairs.append((first[id(parameter)], name))
        else:
            first[id(parameter)] = name
    return tuple(pairs)


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's first floating-point parameter.

    Without such a parameter, it is the dtype of the first parameter.
    """
    types = [parameter.dtype for parameter in model.parameters()]
    return next((found for found in types if found.is_floating_point), types[0])


def coarsest_dtype(parameters: Iterable[Tensor]) -> torch.dtype | None:
    """Return the least precise floating-point dtype of parameters, or None."""
    types = {parameter.dtype for parameter in parameters if parameter.dtype.is_floating_point}
    return max(types, key=lambda kind: torch.finfo(kind).eps, default=None)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and persistent buffer by name, tied ones once.

    They are references, not copies.
    """
    persistent = set(model.state_dict().keys())
    found = dict(model.named_parameters())
    return {
        **{name: parameter.detach() for name, parameter in found.items()},
        **{name: buffer for name, buffer in model.named_buffers() if name in persistent},
    }
