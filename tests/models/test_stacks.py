"""Stacks of torch's own layers are made again from their description."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from leakaudit.models.array_classifier import ArrayClassifier, array_recipe
from leakaudit.models.rebuilding import build_model
from leakaudit.models.recipe import ModelRecipe
from leakaudit.models.stacks import described_stack


def head() -> nn.Sequential:
    """Return a head as Flower's whisper example has it, with a few more layers."""
    return nn.Sequential(
        nn.Conv1d(6, 4, kernel_size=1, padding="same"),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Conv1d(4, 4, 3, stride=2, padding=1, groups=2, bias=False), nn.GELU("tanh")),
        nn.AvgPool1d(2),
        nn.Flatten(1),
        nn.LayerNorm(8, eps=1e-3),
        nn.Dropout(0.3),
        nn.Linear(8, 3),
    )


def test_a_head_is_made_again_with_its_names_and_its_arithmetic() -> None:
    torch.manual_seed(0)
    model = head().eval()
    recipe = ModelRecipe.model_validate(json.loads(ModelRecipe.of(model).model_dump_json()))
    again = build_model(recipe, model.state_dict())
    assert repr(again) == repr(model)
    inputs = torch.randn(2, 6, 8)
    assert torch.equal(again(inputs.clone()), model(inputs.clone()))


def test_the_names_of_an_ordered_stack_stay() -> None:
    model = nn.Sequential()
    model.add_module("head", nn.Linear(3, 2))
    recipe = ModelRecipe.of(model)
    assert set(build_model(recipe, model.state_dict()).state_dict()) == {"head.weight", "head.bias"}


def test_a_classifier_with_such_a_head_can_be_made_in_another_process() -> None:
    recipe = array_recipe(ArrayClassifier(head(), 3))
    model = ArrayClassifier(head(), 3)
    assert repr(build_model(recipe, model.state_dict())) == repr(model)


class _Own(nn.Linear):
    """A layer with code of the user."""


_SHARED = nn.Linear(2, 2)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(_Own(2, 2)),
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
        nn.Sequential(_SHARED, _SHARED),
        nn.Linear(2, 2),
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))),
    ],
)
def test_what_a_description_would_change_is_not_described(model: nn.Module) -> None:
    assert described_stack(model) is None
