"""A small text classifier with batch norm, made by a function.

Another process makes it by that function, because transformers does not have it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from leakaudit.models.factories import model_factory, rebuilt_by


class NormClassifier(nn.Module):
    """Mean of word embeddings, batch norm, a linear head; returns bare logits."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.words = nn.Embedding(size, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 2)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.words(input_ids).mean(dim=1)))  # (B, 2)
        return logits


@model_factory
def build(size: int) -> nn.Module:
    """Make the classifier."""
    return NormClassifier(size)


def make(size: int) -> nn.Module:
    """Return a classifier that says how it is made."""
    torch.manual_seed(0)
    return rebuilt_by(NormClassifier(size), "tests.support.norm_model:build", size=size)
