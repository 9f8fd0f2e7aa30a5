"""The first blocks of a large model; some attacks read only these.

A step can be kept without the other parts. The kept parts are found by structure, on a model that takes no memory: the word embedding, the
list of blocks, and in each block the first child with matrices. That child is the attention in every architecture that attacks read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.models.rebuilding import blank_model
from leakaudit.models.recipe import ModelRecipe
from leakaudit.models.structure.embeddings import output_embedding, word_embedding
from leakaudit.models.structure.layers import heaviest_block_list
from leakaudit.models.tensors import state_of, tied_names
from leakaudit.models.wrappers import plain_name

BLOCKS = 2
"""Number of blocks that are kept: `span` reads the attention of the first, and orders a decoder's words by the attention of the second."""

KEEP_ALL_BYTES = 10**9
"""Largest size of a step that is kept completely. Our choice: an encoder of 110 million parameters in float32 takes 0.9 GB."""


BOUNDARY = "boundary/"
"""Beginning of the path of a gradient at the output of a module inside the model; the module's name follows. No output's path has a slash."""


@dataclass(frozen=True)
class Parts:
    """Names of the parts of a step that are kept."""

    rows: str | None
    """Word embedding, of whose update the rows that are not zero are kept; None if it is tied to the head, which changes all rows."""
    updates: frozenset[str]
    """Parameters whose update is kept completely."""
    weights: frozenset[str]
    """Parameters and buffers whose values are kept."""
    boundary: tuple[str, ...]
    """Modules at whose output the gradient is kept; see `boundary_of`."""


def first_blocks(recipe: ModelRecipe, blocks: int = BLOCKS) -> ModelRecipe | None:
    """Return the recipe of the same model with only its first blocks.

    None if the configuration does not allow such a recipe.
    """
    import transformers

    kind: Any = getattr(transformers, recipe.class_name, None)
    if kind is None or recipe.made_by or recipe.lora is not None or recipe.config.get("is_encoder_decoder"):
        return None
    key = getattr(kind.config_class, "attribute_map", {}).get("num_hidden_layers", "num_hidden_layers")
    count = recipe.config.get(key)
    if not isinstance(count, int) or count <= blocks:
        return None
    by_layer = {k: v[:blocks] for k, v in recipe.config.items() if isinstance(v, list | tuple) and len(v) == count}
    cut = recipe.model_copy(update={"config": {**recipe.config, **by_layer, key: blocks}})
    return _without_other_modules(cut) if cut.settings or cut.parts or cut.computed_in else cut


def _without_other_modules(recipe: ModelRecipe) -> ModelRecipe:
    """Return a recipe without its entries on modules that its model lacks."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        there = {name for name, _ in blank_model(recipe).named_modules()}
    settings = {name: numbers for name, numbers in recipe.settings.items() if name in there}
    parts = {name: what for name, what in recipe.parts.items() if name in there}
    computed_in = {name: dtype for name, dtype in recipe.computed_in.items() if name in there}
    return recipe.model_copy(update={"settings": settings, "parts": parts, "computed_in": computed_in})


def first_parts(model: nn.Module, recipe: ModelRecipe, beside: frozenset[str] = frozenset()) -> Parts | None:
    """Return the parts of a model that attacks on its first blocks need.

    None means that the parts cannot be found.

    Args:
        model: the live model.
        recipe: recipe of the model.
        beside: names of buffers that are kept although the model does not store them.
    """
    cut = first_blocks(recipe)
    if cut is None:
        return None
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            blank = blank_model(cut)
    except Exception:  # a model that cannot be made without values
        return None
    found = state_of(blank)
    here = {plain_name(name): tensor for name, tensor in state_of(model).items()}
    if any(name not in here or here[name].shape != tensor.shape for name, tensor in found.items()):
        return None
    blocks = heaviest_block_list(blank, lambda found: len(found) == BLOCKS)
    words, head = word_embedding(blank), output_embedding(blank)
    if blocks is None or words is None:
        return None
    prefix, block_list = blocks
    attention = {
        f"{inside}.{below}"
        for number, block in enumerate(block_list)
        if (inside := _attention(block, f"{prefix}.{number}"))
        for below, _ in blank.get_submodule(inside).named_parameters()
    }
    outside = {name for name in found if not name.startswith(f"{prefix}.")} - {words, head}
    last = f"{prefix}.{BLOCKS - 1}."
    unread = {name for name, tensor in found.items() if name.startswith(last) and tensor.dim() > 1} - attention
    tied = head == words or any(words in pair for pair in tied_names(blank))
    return Parts(
        rows=None if tied else words,
        updates=frozenset(attention | outside),
        weights=frozenset(set(found) - unread - ({head} if head and not tied else set()))
        | (beside & {name for name, _ in blank.named_buffers()}),
        boundary=boundary_of(blank),
    )


def boundary_of(model: nn.Module) -> tuple[str, ...]:
    """Return the modules behind which nothing is kept; empty if they are not found.

    They are the next to last block and the attention of the last one. The gradients at their outputs are all that the kept parts get from
    the rest of the model: a block adds what its attention returns to what it got, or passes on only what its attention made of it.

    Args:
        model: with the first blocks alone.
    """
    blocks = heaviest_block_list(model, lambda found: len(found) == BLOCKS)
    if blocks is None:
        return ()
    prefix, block_list = blocks
    attention = _attention(block_list[-1], f"{prefix}.{BLOCKS - 1}")
    return (f"{prefix}.{BLOCKS - 2}", attention) if attention else ()


def _attention(block: nn.Module, prefix: str) -> str:
    """Return the name of a block's first child with matrices; empty if it has none."""
    children = block.named_children()
    return next((f"{prefix}.{n}" for n, child in children if any(p.dim() > 1 for p in child.parameters())), "")


def fill_missing(model: nn.Module, missing: list[str]) -> None:
    """Give small random values to weights that were not kept.

    A forward pass needs values; they are the same in every process. Vectors named `weight` get 1 and other vectors 0.
    """
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    with torch.no_grad():
        for name in missing:
            tensor = tensors.get(name)
            if tensor is not None and tensor.dim() > 1:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.02)
            elif tensor is not None:
                tensor.fill_(1.0 if name.endswith("weight") else 0.0)
