"""Classifiers of tables, and how another process makes one of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from leakaudit.models.factories import model_factory, rebuilt_by

CLASSES = 3


@model_factory
def build(width: int) -> nn.Module:
    """Make a classifier of six numbers with batch normalisation and dropout."""
    return nn.Sequential(
        nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, CLASSES)
    )


@model_factory
def without_norm() -> nn.Module:
    """Make one that private training takes: batch normalisation mixes examples."""
    return nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def net(width: int = 16) -> nn.Module:
    """Return one that nobody else can make, with the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build(width).train()


def known(width: int = 16) -> nn.Module:
    """Return one that says how it is made."""
    return rebuilt_by(net(width), "tests.support.array_models:build", width=width)


class TwoArrays(nn.Module):
    """Takes two arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, CLASSES)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Add them up."""
        logits: Tensor = self.head(left + right)
        return logits
