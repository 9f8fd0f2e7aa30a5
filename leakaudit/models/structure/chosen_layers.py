"""Parameters of layers that a user names: embeddings, first or last blocks, head."""

from __future__ import annotations

import re

from torch import nn

from leakaudit.models.structure.first_layers import parameters_up_to_block
from leakaudit.models.structure.layers import heaviest_block_list

NAMED_LAYERS = "embeddings, first-N, last-N or head"
"""What a user may write, with N a number of blocks from 1 on."""

_BLOCKS = re.compile(r"(first|last)-([1-9][0-9]*)")


def is_layer_choice(layers: str) -> bool:
    """Return whether a text names layers, as in `NAMED_LAYERS`.

    >>> is_layer_choice("first-2"), is_layer_choice("head"), is_layer_choice("first-0"), is_layer_choice("blocks")
    (True, True, False, False)
    """
    return layers in ("embeddings", "head") or _BLOCKS.fullmatch(layers) is not None


def parameters_of_layers(model: nn.Module, layers: str) -> frozenset[str]:
    """Return the names of the parameters of some layers.

    Args:
        model: a text model, which stays unchanged.
        layers: `embeddings` are all embedding tables. `first-N` are the first N blocks and everything before them; `last-N` are the last N
            blocks and everything behind them; `head` is what is behind the last block. A head that is tied to an embedding counts as embedding.
            If the model has fewer than N blocks, all of them are taken.

    Raises:
        AnatomyError: the model has no list of blocks that its forward pass runs.
        ValueError: the text does not name layers.
    """
    if layers == "embeddings":
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in tables)
    every = frozenset(name for name, _ in model.named_parameters())
    if layers == "head":
        return every - parameters_up_to_block(model, _MOST)
    found = _BLOCKS.fullmatch(layers)
    if found is None:
        raise ValueError(f"layers must be {NAMED_LAYERS}, got {layers!r}")
    number = int(found[2])
    if found[1] == "first":
        return parameters_up_to_block(model, number)
    before = _number_of_blocks(model) - number
    return every - (parameters_up_to_block(model, before) if before > 0 else _before_blocks(model))


_MOST = 10**9
"""More blocks than a model has: `parameters_up_to_block` then goes up to the last one."""


def _number_of_blocks(model: nn.Module) -> int:
    parameters_up_to_block(model, 1)  # says why, if there are no blocks
    found = heaviest_block_list(model, lambda blocks: len(blocks) > 0)
    return 0 if found is None else len(found[1])


def _before_blocks(model: nn.Module) -> frozenset[str]:
    """Return the parameters before the first block."""
    found = heaviest_block_list(model, lambda blocks: len(blocks) > 0)
    prefix = "" if found is None else f"{found[0]}.0."
    return frozenset(name for name in parameters_up_to_block(model, 1) if not name.startswith(prefix))
