"""A user's script with a loop of its own."""

from __future__ import annotations

from typing import Any

import small
import torch

tokenizer, model = small.tokenizer(), small.classifier().train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: Any, optimizer: Any) -> None:
    """Train on one text a step."""
    for row in small.labelled()[: small.STEPS]:
        batch = {name: torch.tensor([value]) for name, value in row.items()}
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# paste: train(model, optimizer)
