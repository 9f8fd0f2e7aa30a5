"""A classifier's pooler: the layer between class token and output layer.

Letters: B sequences, D features into the pooler, F its outputs, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from leakaudit.errors import AnatomyError
from leakaudit.models.structure.trace import Call, is_leaf, trace_tokens


@dataclass(frozen=True)
class Pooler:
    """Module names of a pooler and of the layers after it."""

    dense: str
    """Linear layer (F, D) that reads one row for each sequence."""
    activation: str
    """Module that follows it."""
    head: str
    """Output layer (C, F)."""


class PoolerLayers(NamedTuple):
    """Calls of a traced forward pass around a pooler."""

    dense: Call
    """The pooler's linear layer."""
    head: Call
    """The output layer."""
    calls: Sequence[Call]
    """All calls that return one tensor, in the order in which they ended."""


def find_pooler(model: nn.Module, classes: int) -> Pooler:
    """Find the pooler by a traced forward pass; the model stays unchanged.

    The pooler is the last linear layer before the output layer that reads one row for each sequence. Its activation must be a module.

    Args:
        model: a sequence classifier.
        classes: C.

    Raises:
        AnatomyError: there is no such layer. The message says what was expected and what was found.
    """
    layers = pooler_layers(model, classes)
    follows = follower_of(layers)
    if follows is None:
        raise AnatomyError(
            f"the pooler {layers.dense.name!r} has no activation that is a module of its own, so it cannot be exchanged"
        )
    return Pooler(layers.dense.name, follows, layers.head.name)


def follower_of(layers: PoolerLayers) -> str | None:
    """Return the name of the module that reads the pooler's output.

    None if a function reads it.
    """
    made = layers.dense.made
    name = next((call.name for call in layers.calls if is_leaf(call.module) and call.given is made), None)
    return None if name == layers.head.name else name


def pooler_layers(model: nn.Module, classes: int) -> PoolerLayers:
    """Find pooler and output layer, whatever stands between them.

    They are found by a traced forward pass.

    Args:
        model: a sequence classifier.
        classes: C.

    Raises:
        AnatomyError: there are no such layers. The message says what was expected and what was found.
    """
    calls = [call for call in trace_tokens(model) if call.bare]
    layers = [(place, call, call.module) for place, call in enumerate(calls) if isinstance(call.module, nn.Linear)]
    heads = [entry for entry in layers if entry[2].out_features == classes]
    if not heads:
        raise AnatomyError(
            f"looked for an output layer with {classes} outputs and found none among {len(layers)} linear layers"
        )
    end, head, output = heads[-1]
    before = [call for place, call, layer in layers if place < end and layer.out_features == output.in_features]
    if not before or before[-1].given.dim() != 2:
        raise AnatomyError(
            f"looked for a pooler, a linear layer with {output.in_features} outputs that reads one row a sequence before "
            f"{head.name!r}, and found none"
        )
    return PoolerLayers(before[-1], head, calls)
