"""A wide pooler, as an active server makes it.

Source: Beyond Gradient and Priors (2023), Sec. 4.2.

Letters: B sequences, D features into the pooler, F its outputs, C classes.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn

from leakaudit.errors import AnatomyError
from leakaudit.models.factories import model_factory, rebuilt_by
from leakaudit.models.rebuilding import blank_model
from leakaudit.models.recipe import ModelRecipe
from leakaudit.models.structure import find_pooler
from leakaudit.models.structure.first_token_head import with_activation_module

Activation = Literal["selu", "cube+square"]


DRAWN = 0.02
"""Standard deviation of the weights with which a rebuilt model is traced. Our choice: BERT's `initializer_range`."""


class CubePlusSquare(nn.Module):
    """x^3 + x^2: its third derivative is a constant, 6.

    Source: Beyond Gradient and Priors (2023), Sec. 4.2.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return x^3 + x^2."""
        return x.pow(3) + x.square()


ACTIVATIONS: dict[str, type[nn.Module]] = {"selu": nn.SELU, "cube+square": CubePlusSquare}


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
    """Return a copy of a classifier with a wide pooler.

    Source: Beyond Gradient and Priors (2023), Sec. 4.2. A head that calls its activation as a function, as RoBERTa's does, becomes one of the
    same layers with a module (`with_activation_module`).

    The pooler gets `width` outputs. For the first F of them, the weights of pooler and output layer do not change, but the activation
    does. The weights of the m = width - F other outputs are normal in the first `dimension` features and zero in the other features
    ("Flexibility of the Recovered Dimension"); their biases are zero. The output of class c has the weight c / m for each of them.

    Args:
        model: a classifier with a pooler.
        classes: C.
        width: number of outputs of the new pooler; in the paper the vocabulary's size.
        dimension: d', at most D.
        activation: activation that replaces the pooler's own.
        deviation: standard deviation of the normal weights; 1 in the paper.
        seed: seed of these weights.

    Raises:
        AnatomyError: there is no pooler whose activation can be exchanged, `width` adds no output, or `dimension` is not between 1 and D.
    """
    changed = copy.deepcopy(with_activation_module(model, classes))
    pooler = find_pooler(changed, classes)
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
    """Make a model with a wide pooler from the recipe of the model without it.

    The caller loads the weights afterwards.
    """
    blank = blank_model(ModelRecipe.model_validate(recipe)).eval()
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in blank.parameters():  # else its memory holds anything, and the traced pass compares numbers
            parameter.normal_(0, DRAWN, generator=drawn)
    return widened(blank, classes, **own)


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
