"""A classifier's head whose activation is a module and no function.

RoBERTa's head takes the first token's state and calls `torch.tanh` between two linear layers. A server that exchanges the activation sends
out a head with the same layers and another function between them. This module makes that head.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from leakaudit.errors import AnatomyError
from leakaudit.models.structure.pooler import PoolerLayers, follower_of, pooler_layers
from leakaudit.models.structure.trace import Call

ACTIVATION = "activation"
"""Name of the new module in the head."""

_MODULES: Mapping[Callable[[Tensor], Tensor], type[nn.Module]] = {torch.tanh: nn.Tanh, torch.relu: nn.ReLU}
"""Functions that are recognised -> the same as a module."""


class FirstTokenHead(nn.Module):
    """Layers on the first token's state, with an activation that is a module.

    The layers keep their names, so the parameters do, too.
    """

    def __init__(
        self, layers: Mapping[str, nn.Module], order: Sequence[str], dense: str, activation: nn.Module
    ) -> None:
        """Take over the layers of a head.

        Args:
            layers: name -> layer, without the activation.
            order: names in the order in which they are called; a layer may be called twice.
            dense: the layer whose output goes into the activation.
            activation: the function between the layers.
        """
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.add_module(ACTIVATION, activation)
        self._order, self._dense = tuple(order), dense

    def forward(self, features: Tensor, **_ignored: object) -> Tensor:
        """Return (N, C) logits.

        Args:
            features: (N, T, D) states of the last block.
        """
        x = features[:, 0]  # (N, D)
        for name in self._order:
            x = self.get_submodule(name)(x)
            if name == self._dense:
                x = self.get_submodule(ACTIVATION)(x)
        return x


class _Head(NamedTuple):
    """The module that holds pooler and output layer, and how it calls its layers."""

    whole: Call
    inside: tuple[str, ...]
    """Names of the layers below it, in the order of the calls."""


def with_activation_module(model: nn.Module, classes: int) -> nn.Module:
    """Return the model with a pooler whose activation is a module.

    It is the model itself if that is so, else a copy.

    The copy computes the same and has the same parameters under the same names.

    Args:
        model: a sequence classifier.
        classes: C.

    Raises:
        AnatomyError: there is no pooler; or its activation is a function, and pooler and output layer are not the layers of one module that
            reads the first token's state. The message says what was found.
    """
    layers = pooler_layers(model, classes)
    if follower_of(layers) is not None:
        return model
    head = _head_of(layers)
    function = next(
        (one for one in _MODULES if head and torch.allclose(one(layers.dense.made), layers.head.given)), None
    )
    if head is None or function is None:
        raise AnatomyError(
            f"the pooler {layers.dense.name!r} has no activation that is a module of its own, and no module that holds only it and "
            f"{layers.head.name!r}, reads the first token and calls tanh or ReLU between them; so the activation cannot be exchanged"
        )
    changed = copy.deepcopy(model)
    old, own = changed.get_submodule(head.whole.name), layers.dense.name.rpartition(".")[2]
    new = FirstTokenHead(dict(old.named_children()), head.inside, own, _MODULES[function]())
    parent, _, name = head.whole.name.rpartition(".")
    setattr(changed.get_submodule(parent), name, new.train(old.training))
    return changed


def _head_of(layers: PoolerLayers) -> _Head | None:
    """Return the module that holds only pooler and output layer.

    None if there is none.
    """
    name = layers.dense.name.rpartition(".")[0]
    whole = next((call for call in layers.calls if name and call.name == name), None)
    if whole is None or layers.head.name.rpartition(".")[0] != name or whole.given.dim() != 3:
        return None
    inside = [call for call in layers.calls if call.name.rpartition(".")[0] == name]
    known = {dict(whole.module.named_children())[call.name.rpartition(".")[2]] for call in inside}
    first = torch.equal(whole.given[:, 0], inside[0].given) and torch.equal(whole.made, layers.head.made)
    plain = known == set(whole.module.children()) and not list(whole.module.parameters(recurse=False))
    return _Head(whole, tuple(call.name.rpartition(".")[2] for call in inside)) if first and plain else None
