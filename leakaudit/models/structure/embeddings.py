"""Embedding tables: the word embedding, and every other table in use.

Letters: V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

from torch import Tensor, nn

from leakaudit.errors import AnatomyError


def word_embedding(model: nn.Module) -> str | None:
    """Return the parameter name of the table (V, D) of token vectors.

    None if the model has no such table, or the table is not a parameter.
    """
    return _parameter_of(model, "get_input_embeddings")


def output_embedding(model: nn.Module) -> str | None:
    """Return the parameter name of the output embedding (V, D), or None."""
    return _parameter_of(model, "get_output_embeddings")


def require_word_embedding(model: nn.Module) -> str:
    """Return the parameter name of the word embedding.

    peft puts a wrapper around a table that it trains. The name is that of the table inside: the trained copy of one that is trained as a
    whole, and the frozen one beside trained rows or adapters.

    Raises:
        AnatomyError: `get_input_embeddings()` returns no `nn.Embedding`, and no wrapper of one.
    """
    found = _table_from(model, "get_input_embeddings")
    table = _table_inside(found)
    if table is None:
        raise _no_token_table(model, found)
    return next(name for name, parameter in model.named_parameters() if parameter is table.weight)


def vocabulary_size(model: nn.Module) -> int:
    """Return V, the number of rows of the word embedding.

    Raises:
        AnatomyError: `get_input_embeddings()` does not return a module with a weight.
    """
    table = _table_from(model, "get_input_embeddings")
    weight = getattr(table, "weight", None)
    if not isinstance(weight, Tensor):
        raise _no_token_table(model, table)
    return int(weight.shape[0])


def other_tables(model: nn.Module, word: str, used: AbstractSet[int]) -> tuple[str, ...]:
    """Return the parameter names of all other embedding tables in use.

    Args:
        model: the model.
        word: parameter name of its word embedding.
        used: `id` of every module that a forward pass called.
    """
    table = model.get_parameter(word)
    return tuple(
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module.weight is not table and id(module) in used
    )


def _parameter_of(model: nn.Module, getter: str) -> str | None:
    """Return the weight's name of the module that a method of the model returns."""
    weight = getattr(_table_from(model, getter), "weight", None)
    return next((name for name, parameter in model.named_parameters() if parameter is weight), None)


def _table_from(model: nn.Module, getter: str) -> Any:
    find: Any = getattr(model, getter, None)
    return find() if callable(find) else None


def _table_inside(found: Any) -> nn.Embedding | None:
    """Return a table, or the one whose weight a wrapper shows as its own.

    A wrapper that computes its weight anew has one table inside.
    """
    if isinstance(found, nn.Embedding):
        return found
    if not isinstance(found, nn.Module):
        return None
    inside = [module for module in found.modules() if isinstance(module, nn.Embedding)]
    shown = [table for table in inside if table.weight is getattr(found, "weight", None)]
    return next(iter(shown or (inside if len(inside) == 1 else [])), None)


def _no_token_table(model: nn.Module, found: Any) -> AnatomyError:
    return AnatomyError(
        f"{type(model).__name__}: looked for the token table (`get_input_embeddings()` returning an nn.Embedding), "
        f"found {type(found).__name__}"
    )
