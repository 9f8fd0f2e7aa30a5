"""The parameters of the first blocks and of everything before them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.errors import AnatomyError
from leakaudit.models.structure.layers import heaviest_block_list
from leakaudit.models.structure.trace import evaluating, hooked, probe_ids, trace_tokens
from leakaudit.models.versions import call_with


def parameters_up_to_block(model: nn.Module, first: int) -> frozenset[str]:
    """Return the parameters on which the output of block number `first` depends.

    Autograd finds them on one forward pass: embeddings, what is between them and the blocks, and the first blocks. A head that is tied to the
    embedding is among them.

    Args:
        model: a text model, which stays unchanged.
        first: number of blocks, counted from 1. If the model has fewer, its last block is taken.

    Raises:
        AnatomyError: the model has no list of blocks that its forward pass runs.
    """
    called = {id(call.module) for call in trace_tokens(model)}
    found = heaviest_block_list(model, lambda blocks: len(blocks) > 0 and id(blocks[0]) in called)
    if found is None:
        raise AnatomyError(f"{type(model).__name__}: looked for a list of blocks (nn.ModuleList), found none")
    _, blocks = found
    leaves = {name: p.detach().requires_grad_() for name, p in model.named_parameters() if p.is_floating_point()}
    made = _output_of(model, blocks[min(first, len(blocks)) - 1], leaves)
    gradients = torch.autograd.grad(made.float().sum(), list(leaves.values()), allow_unused=True)
    return frozenset(name for name, gradient in zip(leaves, gradients, strict=True) if gradient is not None)


def _output_of(model: nn.Module, block: nn.Module, weights: Mapping[str, Tensor]) -> Tensor:
    """Return what a block makes of the probe with given weights, with its graph."""
    made: list[Tensor] = []

    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        made.append(output[0] if isinstance(output, tuple) else output)

    ids = probe_ids(model)
    with hooked([block.register_forward_hook(keep)]), evaluating(model), torch.enable_grad():
        call_with(model, weights, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return made[0]
