"""Embedding tables of a model."""

from __future__ import annotations

from torch import nn


def word_embedding(model: nn.Module) -> str | None:
    """Return the parameter name of the table that turns token ids into vectors.

    None if it is no parameter.
    """
    table = model.get_input_embeddings()  # type: ignore[operator]
    weight = getattr(table, "weight", None)
    return next((name for name, parameter in model.named_parameters() if parameter is weight), None)
