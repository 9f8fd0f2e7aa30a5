"""Stacks of torch's own layers, which another process makes from a description.

A client that trains one part of its model often makes that part in a function, as `nn.Sequential(nn.Conv1d(...), nn.ReLU(), ...)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from leakaudit.models.factories import model_factory

LAYERS: Mapping[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (
        *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm, nn.Dropout, nn.Flatten, nn.Identity),
        *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d),
    )
}
"""Layers that keep the arguments of their constructor. Our choice: those of common heads; a layer with buffers is not among them."""
NESTED = "Sequential"

Described = dict[str, Any]
"""`name` in the stack, `kind` in `LAYERS` or `NESTED`, and `options` of the constructor or `layers`."""


def described_stack(model: nn.Module) -> list[Described] | None:
    """Return the layers of an `nn.Sequential` as plain data.

    None if it is of another class, has a layer of another class than those in `LAYERS`, or has a layer twice.
    """
    modules = [module for _, module in model.named_modules(remove_duplicate=False)]
    if type(model) is not nn.Sequential or len({id(module) for module in modules}) < len(modules):
        return None
    if any(type(module) not in (nn.Sequential, *LAYERS.values()) for module in modules):
        return None
    return _layers(model)


def _layers(model: nn.Module) -> list[Described]:
    return [
        {"name": name, "kind": NESTED, "layers": _layers(layer)}
        if isinstance(layer, nn.Sequential)
        else {"name": name, "kind": type(layer).__name__, "options": _options(layer)}
        for name, layer in model.named_children()
    ]


def _options(layer: nn.Module) -> dict[str, Any]:
    """Return the arguments with which a layer of `LAYERS` was made."""
    names = [name for name in inspect.signature(type(layer)).parameters if hasattr(layer, name)]
    found = {name: getattr(layer, name) for name in names}
    if "bias" in found:
        found["bias"] = found["bias"] is not None
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


@model_factory
def stack(layers: Sequence[Described]) -> nn.Sequential:
    """Make the layers that `described_stack` returned; the caller loads the weights.

    >>> described = described_stack(nn.Sequential(nn.Linear(3, 2, bias=False), nn.ReLU()))
    >>> stack(described)
    Sequential(
      (0): Linear(in_features=3, out_features=2, bias=False)
      (1): ReLU()
    )
    """
    made = nn.Sequential()
    for layer in layers:
        made.add_module(layer["name"], stack(layer["layers"]) if layer["kind"] == NESTED else _made(layer))
    return made


def _made(layer: Described) -> nn.Module:
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in layer["options"].items()}
    return LAYERS[layer["kind"]](**options)
