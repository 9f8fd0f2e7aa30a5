"""A model's parameters, buffers and outputs, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

ENTRIES = 32
"""Number of entries of each tensor that are remembered of a step, at equal distances. Our choice: noise and clipping change all of them, and reading
them takes microseconds. They may miss a change of single rows of an embedding table, which the version of the tensor shows."""


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


def in_rows(matrix: Tensor) -> Tensor:
    """Return a matrix (R, C) as a sparse tensor of its rows that are not zero.

    A gradient of a table of embeddings has few such rows. The sparse tensor has one sparse dimension, is coalesced, and owns its values.

    Args:
        matrix: dense; other shapes, and a matrix of which at least half of the rows are not zero, are returned unchanged.
    """
    if matrix.dim() != 2 or matrix.is_sparse or type(matrix) not in (Tensor, nn.Parameter) or not matrix.numel():
        return matrix
    whole = matrix.detach()
    if 2 * int(_filled(whole[:: max(1, len(whole) // SAMPLED_ROWS)]).sum()) >= min(len(whole), SAMPLED_ROWS):
        return matrix  # found out without reading all of it
    index = _filled(whole).nonzero().flatten()
    if 2 * len(index) >= len(whole):
        return matrix
    return torch.sparse_coo_tensor(index[None], whole[index], whole.shape, is_coalesced=True, check_invariants=False)


SAMPLED_ROWS = 64
"""Rows that are looked at before a whole matrix is read. Our choice: a dense matrix is recognised in microseconds."""


def _filled(matrix: Tensor) -> Tensor:
    """Return which rows are not zero (R,).

    Two extremes take 4 ms for 47 MB, where comparing every entry with zero takes 26 ms. Those of a row with NaN are NaN.
    """
    return (matrix.amax(dim=1) != 0) | (matrix.amin(dim=1) != 0)


def entries_of(tensor: Tensor) -> Tensor:
    """Return a tensor that holds every entry of another that is not zero.

    It is the tensor itself if that is dense.
    """
    return tensor.values() if tensor.is_sparse else tensor


def few_entries(tensor: Tensor, most: int = ENTRIES) -> Tensor:
    """Return at most `most` entries of a tensor, at equal distances.

    They are a view if the tensor is contiguous.
    """
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // most)][:most]


def bytes_of(tensor: Tensor) -> int:
    """Return the size of a tensor's memory, in bytes."""
    parts = (tensor.indices(), tensor.values()) if tensor.is_sparse else (tensor,)
    return sum(part.numel() * part.element_size() for part in parts)


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


def persistent_buffers(model: nn.Module) -> set[str]:
    """Return the names of the buffers that a model stores.

    They are read from its modules, because `state_dict` would call the user's hooks.
    """
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._buffers.keys() - module._non_persistent_buffers_set
    }


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and persistent buffer by name, tied ones once.

    They are references, not copies.
    """
    persistent = persistent_buffers(model)
    found = dict(model.named_parameters())
    return {
        **{name: parameter.detach() for name, parameter in found.items()},
        **{name: buffer for name, buffer in model.named_buffers() if name in persistent},
    }
