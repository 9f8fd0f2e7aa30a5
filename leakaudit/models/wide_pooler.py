"""A classifier's pooler: the layer between the encoder's class token and the output layer; and what a server can make of it.

Letters: B sequences, D features going into the pooler, F its outputs, C classes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from leakaudit.errors import AnatomyError
from leakaudit.models.recipe import ModelRecipe, blank_model, model_factory, rebuilt_by

Activation = Literal["selu", "cube+square"]


@dataclass(frozen=True)
class Pooler:
    """Where a model's pooler stands, by module name."""

    dense: str
    """Linear layer (F, D) that reads one row a sequence."""
    activation: str
    """Module that follows it."""
    head: str
    """Output layer (C, F)."""


class CubePlusSquare(nn.Module):
    """x^3 + x^2 (paper 002, Sec. 4.2): its third derivative is a constant, 6."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x^3 + x^2."""
        return x.pow(3) + x.square()


ACTIVATIONS: dict[str, type[nn.Module]] = {"selu": nn.SELU, "cube+square": CubePlusSquare}


def find_pooler(model: nn.Module, classes: int) -> Pooler:
    """Find the pooler by a traced forward pass; the model is left as it was.

    It is the last linear layer before the output layer that reads one row a sequence, with an activation of its own as a module.

    Args:
        model: a sequence classifier in eval mode.
        classes: C.

    Raises:
        AnatomyError: there is no such layer; says what was looked for and what was found.
    """
    calls = _calls(model)
    layers = [
        (place, name, module) for place, (name, module, _, _) in enumerate(calls) if isinstance(module, nn.Linear)
    ]
    heads = [entry for entry in layers if entry[2].out_features == classes]
    if not heads:
        raise AnatomyError(
            f"looked for an output layer with {classes} outputs and found none among {len(layers)} linear layers"
        )
    place, head, layer = heads[-1]
    before = [(n, name) for n, name, module in layers if n < place and module.out_features == layer.in_features]
    if not before or calls[before[-1][0]][2].dim() != 2:
        raise AnatomyError(
            f"looked for a pooler, a linear layer with {layer.in_features} outputs that reads one row a sequence before {head!r}, "
            "and found none"
        )
    at, dense = before[-1]
    made = calls[at][3]
    follows = next((name for name, module, given, _ in calls[at + 1 :] if given is made), None)
    if follows is None or follows == head:
        raise AnatomyError(
            f"the pooler {dense!r} has no activation that is a module of its own, so it cannot be exchanged"
        )
    return Pooler(dense, follows, head)


def widened(
    model: nn.Module,
    classes: int,
    *,
    width: int,
    dimension: int,
    activation: Activation,
    deviation: float = 1.0,
    seed: int = 0,
) -> nn.Module:
    """Return a copy of a classifier with the pooler of paper 002, Sec. 4.2.

    The pooler gets `width` outputs. The first F of them and what the output layer does with them stay as they were, but for the
    activation. The weights of the m = width - F others are normal in the first `dimension` features and zero in the rest
    ("Flexibility of the Recovered Dimension"), their biases zero; class c's output takes c / m of each of them.

    Args:
        model: a classifier with a pooler.
        classes: C.
        width: F of the new pooler; the paper takes the vocabulary's size.
        dimension: d', at most D.
        activation: in the place of the pooler's own.
        deviation: of the normal weights; 1 in the paper.
        seed: of these weights.

    Raises:
        AnatomyError: there is no pooler, or the sizes leave it no further outputs or features.
    """
    pooler = find_pooler(model, classes)
    changed = copy.deepcopy(model)
    dense, head = (_linear(changed, name) for name in (pooler.dense, pooler.head))
    more = width - dense.out_features
    if more < 1 or not 1 <= dimension <= dense.in_features:
        raise AnatomyError(
            f"a wide pooler has more than its {dense.out_features} outputs and looks at 1 to {dense.in_features} features; "
            f"asked were {width} outputs and {dimension} features"
        )
    rows = torch.zeros(more, dense.in_features)
    rows[:, :dimension] = deviation * torch.randn(more, dimension, generator=torch.Generator().manual_seed(seed))
    columns = (torch.arange(classes) / more)[:, None].expand(-1, more)
    bias = None if dense.bias is None else torch.cat([dense.bias.detach(), dense.bias.new_zeros(more)])
    _place(changed, pooler.dense, _linear_of(torch.cat([dense.weight.detach(), rows.to(dense.weight)]), bias))
    weight = torch.cat([head.weight.detach(), columns.to(head.weight)], dim=1)
    _place(changed, pooler.head, _linear_of(weight, None if head.bias is None else head.bias.detach()))
    _place(changed, pooler.activation, ACTIVATIONS[activation]())
    own = {"width": width, "dimension": dimension, "activation": activation, "deviation": deviation, "seed": seed}
    arguments = {"recipe": ModelRecipe.of(model).model_dump(mode="json"), "classes": classes, **own}
    return rebuilt_by(changed.train(model.training), "leakaudit.models.wide_pooler:wide_pooler", **arguments)


@model_factory
def wide_pooler(recipe: dict[str, Any], classes: int, **own: Any) -> nn.Module:
    """Make a model with a wide pooler again, from the recipe of the one without; weights are loaded afterwards."""
    return widened(blank_model(ModelRecipe.model_validate(recipe)).eval(), classes, **own)


def _linear(model: nn.Module, name: str) -> nn.Linear:
    found = model.get_submodule(name)
    assert isinstance(found, nn.Linear)
    return found


def _linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight)
    if bias is not None:
        layer.bias = nn.Parameter(bias.clone())
    return layer


def _place(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def _calls(model: nn.Module) -> list[tuple[str, nn.Module, Tensor, Tensor]]:
    """Return (name, module, what it was given, what it made) of every leaf module in the order of a small forward pass."""
    calls: list[tuple[str, nn.Module, Tensor, Tensor]] = []
    names = {module: name for name, module in model.named_modules() if not list(module.children())}

    def note(module: nn.Module, given: tuple[Any, ...], made: Any) -> None:
        if given and isinstance(given[0], Tensor) and isinstance(made, Tensor):
            calls.append((names[module], module, given[0], made))

    hooks = [module.register_forward_hook(note) for module in names]
    try:
        ids = torch.arange(4, device=next(model.parameters()).device)[None]
        with torch.no_grad():
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        raise AnatomyError(f"{type(model).__name__} cannot be run on four tokens ({type(error).__name__})") from None
    finally:
        for hook in hooks:
            hook.remove()
    return calls
