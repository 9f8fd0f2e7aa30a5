"""What differs between versions of torch and transformers.

Nothing else asks for a version. Each function asks for the thing itself and not for a number, and says which versions have it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn


def no_init_weights() -> AbstractContextManager[None]:
    """Return a context in which a new model's weights are not drawn at random."""
    # transformers 5.0 moved it out of `modeling_utils`.
    home = "transformers.initialization" if find_spec("transformers.initialization") else "transformers.modeling_utils"
    found: AbstractContextManager[None] = import_module(home).no_init_weights()
    return found


def bert_tokenizer(vocabulary: Mapping[str, int], **options: Any) -> Any:
    """Return BERT's tokenizer over a vocabulary.

    Args:
        vocabulary: token -> id, with BERT's special tokens.
        options: of the tokenizer, such as `model_max_length`.
    """
    from transformers import BertTokenizerFast  # type: ignore[attr-defined]  # made at run time

    # Before transformers 5.0 a vocabulary came from a file, or as a tokenizer of the package tokenizers.
    if "vocab" in inspect.signature(BertTokenizerFast).parameters:
        return BertTokenizerFast(vocab=dict(vocabulary), **options)
    from tokenizers import BertWordPieceTokenizer

    inner = BertWordPieceTokenizer(dict(vocabulary))._tokenizer
    return BertTokenizerFast(tokenizer_object=inner, **options)


def call_with(model: nn.Module, weights: Mapping[str, Tensor], inputs: Mapping[str, Any]) -> Any:
    """Return what a model computes with other weights; the model is left as it was.

    Args:
        model: the model.
        weights: name of a parameter or buffer -> tensor in its place; tied ones change together.
        inputs: keyword arguments of the model.
    """
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    replaced = {id(tensor): weights[name] for name, tensor in named if name in weights}
    # torch 2.4 to 2.5 leave a module that has two names, such as T5's table, with the other weights. So each module is named once.
    own = {
        f"{path}.{name}" if path else name: replaced[id(tensor)]
        for path, module in model.named_modules()
        for name, tensor in chain(module._parameters.items(), module._buffers.items())
        if tensor is not None and id(tensor) in replaced
    }
    return torch.func.functional_call(model, own, (), dict(inputs), tie_weights=False)


def dtype_option(dtype: str | torch.dtype) -> dict[str, Any]:
    """Return the option of `from_pretrained` for the type of the weights."""
    # transformers 4.56 renamed `torch_dtype`, and warns of the old name.
    return {"dtype" if _at_least("transformers", (4, 56)) else "torch_dtype": dtype}


def _at_least(library: str, release: tuple[int, ...]) -> bool:
    """Return whether a library has a version or a newer one.

    It is for differences where the thing itself cannot be asked for.
    """
    found = re.match(r"\d+(?:\.\d+)*", import_module(library).__version__)
    return found is not None and tuple(map(int, found[0].split("."))) >= release


def empty_cache(model: nn.Module) -> Any:
    """Return a cache of keys and values for prefixes, with nothing in it."""
    from transformers import DynamicCache

    # transformers 4.56 gave it the layers of a configuration, such as sliding windows.
    if "config" in inspect.signature(DynamicCache).parameters:
        return DynamicCache(config=model.config)  # type: ignore[arg-type]
    return DynamicCache()
