"""What sentences add to the word tables' update of a causal language model.

The loss of a batch is the mean over its N targets. The head's row of token v is, times -N,

    sum over places i followed by v of h_i  -  sum over all places i of p_i(v) h_i,

with h_i the head's input at place i and p_i the predicted distribution there. So a row is a sum of the states of exactly those
prefixes that v follows, minus a background that is small for rare words. Where the head shares the word embedding's table, the row also
holds the gradient at every place where v itself stands. Own derivation from the cross-entropy's gradient.

Letters: S sentences, N targets, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from leakaudit.algorithms.padding import padded_batch
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.models.structure.embeddings import output_embedding, word_embedding
from leakaudit.models.structure.trace import inputs_of

CHUNK_TARGETS = 512
"""Targets of one forward and backward pass. Our choice: their predicted distributions take 0.1 GB at 50,000 tokens."""


@dataclass(frozen=True)
class WordTables:
    """The names of the tables of a causal language model."""

    head: str
    """Parameter of the head (V, D)."""
    words: str
    """Parameter of the word embedding (V, D); the same as `head` if they are tied."""

    @property
    def tied(self) -> bool:
        """Return whether one table has both roles."""
        return self.head == self.words


def find_tables(seen: Observation) -> WordTables:
    """Return the tables of a causal language model.

    Raises:
        AnatomyError: the model has no output embedding or no word embedding, as `get_output_embeddings()` and
            `get_input_embeddings()` return them.
    """
    head, words = output_embedding(seen.model), word_embedding(seen.model)
    if head is None or words is None:
        missing = "output embedding" if head is None else "word embedding"
        raise AnatomyError(f"{type(seen.model).__name__}: looked for its {missing} and found none")
    return WordTables(head, words)


@dataclass(frozen=True)
class SentenceRows:
    """What sentences add to the tables; sums over sentences, not means."""

    head: Tensor
    """(V, D) -dL/dW of the head's table, with L the summed loss; if the tables are tied, the part of the inputs is in it."""
    states: Tensor
    """(N, D) inputs of the head at all places with a target."""
    inputs: tuple[Tensor, ...]
    """One (T, D) tensor for each sentence: -dL/dx at each place's word vector; the last row is zero."""

    @property
    def targets(self) -> int:
        """Return N, the number of targets."""
        return len(self.states)


def rows_of(seen: Observation, sentences: Sequence[Sequence[int]], tables: WordTables) -> SentenceRows:
    """Simulate sentences, each alone, and return what they add to the tables.

    Args:
        seen: its model is left as it was.
        sentences: token ids; a sentence of fewer than two tokens adds nothing.
        tables: which tables to follow.
    """
    shape = seen.model.get_parameter(tables.head).shape
    device = next(seen.model.parameters()).device
    head = torch.zeros(shape, device=device)
    states: list[Tensor] = []
    inputs: list[Tensor] = []
    for chunk in _chunks(sentences):
        ids, mask = padded_batch(seen, chunk)
        given, made, slopes = simulated(seen.model, ids, mask)
        kept = mask[:, 1:].bool()  # (S, T - 1) places with a target
        h, logits, targets = given[:, :-1][kept], made[:, :-1][kept], ids[:, 1:][kept]
        head.index_add_(0, targets, h).sub_(logits.softmax(dim=1).T @ h)
        if tables.tied:
            head.index_add_(0, ids[mask.bool()], -slopes[mask.bool()])
        states.append(h)
        inputs.extend(-slopes[row, : len(sentence)] for row, sentence in enumerate(chunk))
    return SentenceRows(head, torch.cat(states) if states else head[:0], tuple(inputs))


def _chunks(sentences: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Split sentences so that one pass over the padded chunk has `CHUNK_TARGETS`."""
    chunks: list[list[Sequence[int]]] = []
    for sentence in sentences:
        longest = max([len(sentence), *map(len, chunks[-1])]) if chunks else 0
        if chunks and longest * (len(chunks[-1]) + 1) <= CHUNK_TARGETS:
            chunks[-1].append(sentence)
        else:
            chunks.append([sentence])
    return chunks


def simulated(model: nn.Module, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return head inputs (S, T, D), logits (S, T, V) and slopes at the inputs.

    The slopes (S, T, D) are the gradient of the summed loss with respect to each place's word vector.

    Args:
        model: a causal language model; it is left as it was.
        ids: (S, T) token ids, padded.
        mask: (S, T) 1 at tokens, 0 at padding.
    """
    table: Any = model.get_input_embeddings()  # type: ignore[operator]  # a method of every transformers model
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    vectors: list[Tensor] = []

    def keep_vectors(_module: nn.Module, _args: Any, made: Tensor) -> Tensor:
        vectors.append(made.detach().requires_grad_())
        return vectors[-1]

    with (
        table.register_forward_hook(keep_vectors),
        inputs_of(head) as given,
        torch.enable_grad(),
    ):
        logits = model(input_ids=ids, attention_mask=mask).logits
        slopes = torch.autograd.grad(_summed(logits, ids, mask), vectors[-1])[0]
    return given[-1].detach().float(), logits.detach().float(), slopes.float()


def summed_loss(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the loss (scalar) of all next tokens, summed.

    Args:
        model: a causal language model; it is left as it was.
        ids: (S, T) token ids, padded.
        mask: (S, T) 1 at tokens, 0 at padding.
    """
    return _summed(model(input_ids=ids, attention_mask=mask).logits, ids, mask)


def _summed(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    targets = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets.flatten(), reduction="sum")
