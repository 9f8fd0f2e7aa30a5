"""Dropout modules: their rates, and which of them an attention input passes."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from leakaudit.models.structure.trace import Call, is_linear, is_normalisation


def is_dropout(module: nn.Module) -> bool:
    """Return whether a module is one of torch's dropout modules."""
    return isinstance(module, nn.modules.dropout._DropoutNd)


def dropout_rates(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, float]:
    """Return module name -> rate for every dropout module whose rate is above 0."""
    return {name: float(m.p) for name, m in modules if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0}


def input_dropout(calls: list[Call], reader: Call) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the dropout modules that `reader`'s input passes, in two groups.

    The first group is before the last normalisation or linear layer, the second group after it.
    """
    before: list[str] = []
    after: list[str] = []
    for call in calls[: next(index for index, call in enumerate(calls) if call is reader)]:
        if is_dropout(call.module):
            after.append(call.name)
        elif is_normalisation(call) or is_linear(call):  # ELECTRA and ALBERT project the embedding after its dropout
            before, after = before + after, []
    return tuple(before), tuple(after)
