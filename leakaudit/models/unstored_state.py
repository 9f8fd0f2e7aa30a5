"""The state of a model that neither its class nor its weights determine.

It consists of plain numbers on modules, dtypes of tensors, and buffers that are not stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.errors import ModelError
from leakaudit.models.tensors import persistent_buffers

Settings = dict[str, dict[str, bool | int | float]]
"""Module name -> attribute -> number."""

WITHOUT_EFFECT = frozenset({"training", "gradient_checkpointing"})
"""Attributes that are left out: each step stores the mode, and checkpointing does not change results."""


def settings_of(model: nn.Module) -> Settings:
    """Return plain numbers on a model's modules, such as dropout rates.

    They are keyed by plain module name.
    """
    return {name: dict(_numbers(module)) for name, module in model.named_modules()}


def _numbers(module: nn.Module) -> list[tuple[str, bool | int | float]]:
    found = vars(module).items()
    return [(key, value) for key, value in found if isinstance(value, bool | int | float) and _counts(key, value)]


def _counts(key: str, value: float) -> bool:
    return key not in WITHOUT_EFFECT and not key.startswith("_") and math.isfinite(value)


def changed_settings(live: Settings, made: Settings) -> Settings:
    """Return the numbers of a live model that differ from those of its class.

    Numbers that the class does not set are left out.

    Args:
        live: numbers of the model that is trained.
        made: numbers of the model that its recipe makes.
    """
    different = {
        name: {key: value for key, value in numbers.items() if made[name].get(key, value) != value}
        for name, numbers in live.items()
        if name in made
    }
    return {name: numbers for name, numbers in different.items() if numbers}


def apply_settings(model: nn.Module, settings: Settings) -> None:
    """Set numbers on a rebuilt model.

    Raises:
        ModelError: a module or attribute does not exist or is not a number, so the recipe belongs to another model.
    """
    modules = dict(model.named_modules())
    for name, numbers in settings.items():
        known = dict(_numbers(modules[name])) if name in modules else {}
        for key, value in numbers.items():
            if key not in known:
                raise ModelError(f"the recipe sets {key!r} of {name!r}, and the model that it makes has no such number")
            setattr(modules[name], key, value)


def with_dense_gradients(model: nn.Module) -> None:
    """Let tables of embeddings have dense gradients.

    Those of the client may be sparse.

    The numbers are the same. Sparse ones cannot be differentiated again, nor added to what comes through a tied head.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False


def match_dtypes(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give each parameter and buffer its stored dtype, so that loading is exact.

    On a model in bfloat16, adapters are float32, and normalisations often are.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        stored = weights.get(name)
        if stored is not None and stored.dtype != tensor.dtype and stored.is_floating_point():
            tensor.data = tensor.data.to(stored.dtype)


def unstored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a model does not store, by name.

    Tables of rotary embeddings are such buffers.
    """
    stored = persistent_buffers(model)
    return {name: buffer for name, buffer in model.named_buffers() if name not in stored}


def changed_buffers(live: Mapping[str, Tensor], made: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the names of unstored buffers whose values differ from the class's.

    Args:
        live: unstored buffers of the model that is trained, by plain name.
        made: unstored buffers of the model that its recipe makes. Buffers that it does not have are left out, because they cannot be set.
    """
    return frozenset(name for name, buffer in live.items() if name in made and not _equal(buffer, made[name]))


def _equal(one: Tensor, other: Tensor) -> bool:
    if other.is_meta or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.detach().cpu(), other.cpu())


def set_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put values into a rebuilt model's unstored buffers.

    A value may have another type and shape than the buffer.
    """
    for name, value in values.items():
        owner, _, leaf = name.rpartition(".")
        module: Any = model.get_submodule(owner)
        module._buffers[leaf] = value.clone()
