"""The protocol of a prior: it says how likely a text is.

A prior is a frozen dataclass; its fields are its knobs. It gets the victim's vocabulary and at most the public model. It never gets an
update or the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor, nn

from leakaudit.errors import PriorError
from leakaudit.models.vocabulary import Vocabulary, vocabulary_of

AROUND = ("cls", "sep", "pad", "bos", "eos")
"""Roles of tokens that are not words of a text. The unknown token is not listed, because it stands for a word."""


@runtime_checkable
class Scorer(Protocol):
    """A loaded prior for the victim's tokens.

    The same question gets the same answer.
    """

    def nll(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return the mean negative log-likelihood per token of each sequence.

        The unit is nats; the exponential is the perplexity. The prior removes special tokens (`AROUND`) at any position, and adds the
        tokens that begin and end a text itself. The value of a sequence without a word is that of a word drawn at random.

        Args:
            sequences: N sequences of the victim's token ids, of any lengths.
        """
        ...

    def next_token_nll(self, prefixes: Sequence[Sequence[int]]) -> Tensor | None:
        """Return (N, V) the negative log-likelihood of every token after each prefix.

        In nats, float32, on the CPU. None if the prior cannot compute it.

        Args:
            prefixes: N beginnings of texts, as the victim's token ids.
        """
        ...


@runtime_checkable
class Prior(Protocol):
    """Registered with `@prior("name")`; its fields are its knobs."""

    name: ClassVar[str]
    source: ClassVar[str]
    """Paper, section."""
    knows: ClassVar[str]
    """One sentence: what an attacker needs for this prior, beyond what every eavesdropper has."""

    def load(self, vocabulary: Vocabulary, victim: nn.Module | None = None) -> Scorer:
        """Return a scorer for the tokens of `vocabulary`.

        Args:
            vocabulary: the victim's.
            victim: the public model, for priors that use it, and for its device.

        Raises:
            PriorError: a file is missing or wrong, or the tokens cannot be mapped.
        """
        ...


def words_of(sequence: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    """Return a sequence without the special tokens that are not words."""
    around = vocabulary.surrounding_ids | {vocabulary.special[role] for role in AROUND if role in vocabulary.special}
    return [token for token in sequence if token not in around]


def frame_of(vocabulary: Vocabulary) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens before and after a text for a causal language model."""
    start = vocabulary.starts_with or tuple(vocabulary.special[role] for role in ("bos",) if role in vocabulary.special)
    return start, vocabulary.ends_with


def check_same_tokens(what: str, digest: str, size: int, vocabulary: Vocabulary, cure: str) -> None:
    """Refuse a prior whose tokens are not the victim's.

    Vocabularies of old snapshots have no digest; they are compared by size.

    Args:
        what: the prior, for the message.
        digest: digest of its tokens (`tokens_digest`).
        size: number of its tokens.
        vocabulary: the victim's.
        cure: what the user can do, as the end of a sentence.

    Raises:
        PriorError: the tokens differ.
    """
    same = digest == vocabulary.digest if vocabulary.digest else size == vocabulary.size
    if not same:
        raise PriorError(
            f"{what} knows the {size} tokens of another tokenizer, the victim has {vocabulary.size} of its own: {cure}"
        )


def tokenizer_vocabulary(tokenizer: Any) -> Vocabulary:
    """Return the public facts of a tokenizer without a model."""
    return vocabulary_of(tokenizer, nn.Embedding(len(tokenizer), 1))
