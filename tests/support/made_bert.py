"""A tiny BERT that says that a function makes it."""

from __future__ import annotations

from torch import nn

from leakaudit.models.factories import model_factory, rebuilt_by
from tests.support import tiny

MAKER = "tests.support.made_bert:build"


@model_factory
def build() -> nn.Module:
    """Make the model."""
    return tiny.bert()


def make() -> nn.Module:
    """Return the model, as a user's code would."""
    return rebuilt_by(build(), MAKER)
