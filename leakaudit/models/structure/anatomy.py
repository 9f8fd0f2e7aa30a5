"""The parts of a transformer, found by structure.

One traced forward pass and a few probes find them; there is no list of model names.

Span attacks need three things of a model:

- the *attention input* of the first block, and the linear layers that read it (separate or fused, any layout);
- how that input is computed from a token and its position (`InputStage`);
- which output feature of those layers is query, key or value of which head (`Head`).

Letters: V vocabulary, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn

from leakaudit.models.structure.adapters import Adapter, split_adapters
from leakaudit.models.structure.attention import Head, probe_attention
from leakaudit.models.structure.dropout import input_dropout
from leakaudit.models.structure.embeddings import other_tables, require_word_embedding
from leakaudit.models.structure.layers import Projection, attention_readers, first_block, projection_of
from leakaudit.models.structure.trace import trace_tokens


@dataclass(frozen=True)
class Anatomy:
    """The parts of a transformer that attacks use."""

    word_embedding: str
    """Parameter name of the (V, ...) token table."""
    projections: tuple[Projection, ...]
    """Linear layers of the first block that read its attention input, in call order."""
    output: str
    """Module name of the linear layer that reads the attention's output."""
    hidden: int
    """Width D of the attention input."""
    causal: bool
    heads: tuple[Head, ...]
    """Empty if the probes could not separate the heads."""
    tables: tuple[str, ...]
    """Parameter names of all other embedding tables in use (positions, token types)."""
    dropout_before: tuple[str, ...] = ()
    """Dropout modules that an attention input passes before a normalisation or a linear layer (GPT-2, T5, ELECTRA)."""
    dropout_after: tuple[str, ...] = ()
    """Dropout modules that it passes after all normalisations and linear layers, so that masked coordinates are exactly zero (BERT)."""
    adapters: tuple[Adapter, ...] = ()
    """Low-rank maps beside the projections."""


def find_anatomy(model: nn.Module) -> Anatomy:
    """Find the parts of a model, which stays unchanged.

    Raises:
        AnatomyError: a part is missing. The message says what was expected and what was found.
    """
    word = require_word_embedding(model)
    calls = trace_tokens(model)
    block, block_calls = first_block(model, calls)
    readers, adapters = split_adapters(attention_readers(block, block_calls), block_calls)
    extra = {id(call.module) for adapter in adapters for call in (adapter.down, adapter.up, adapter.wrapper)}
    own_calls = [call for call in block_calls if id(call.module) not in extra]
    attention = probe_attention(model, readers, calls, own_calls)
    before, after = input_dropout(calls, readers[0])
    return Anatomy(
        word_embedding=word,
        projections=tuple(projection_of(model, call) for call in readers),
        output=attention.output,
        hidden=int(readers[0].given.shape[-1]),
        causal=attention.causal,
        heads=attention.heads,
        tables=other_tables(model, word, {id(call.module) for call in calls}),
        dropout_before=before,
        dropout_after=after,
        adapters=tuple(adapter.describe(model, readers) for adapter in adapters),
    )


_ANATOMIES: WeakKeyDictionary[nn.Module, Anatomy] = WeakKeyDictionary()


def anatomy_of(model: nn.Module) -> Anatomy:
    """Return `find_anatomy(model)`, computed once per model object.

    The parts stay the same when weights change.
    """
    if model not in _ANATOMIES:
        _ANATOMIES[model] = find_anatomy(model)
    return _ANATOMIES[model]
