"""What a prior is: a frozen dataclass of knobs that, held against the victim's vocabulary, scores sequences of its tokens.

It is handed a vocabulary and at most the public model; never an update, and never the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor, nn

from leakaudit.errors import PriorError
from leakaudit.models.vocabulary import Vocabulary, vocabulary_of

AROUND = ("cls", "sep", "pad", "bos", "eos")
"""Roles of tokens that are no part of a text's wording. An unknown word is: it stands where a word stood."""


@runtime_checkable
class Scorer(Protocol):
    """A prior that speaks the victim's tokens; the same question always gets the same answer."""

    def nll(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return each sequence's mean negative log-likelihood per token, in nats; its exponential is the perplexity.

        Special tokens (`AROUND`) may be in the sequences or not: they are taken out, wherever they stand, and what begins and
        ends a text is put back by the prior itself. A sequence without a word is as unlikely as a word drawn at random.

        Args:
            sequences: N sequences of the victim's token ids, of any lengths.
        """
        ...

    def next_token_nll(self, prefixes: Sequence[Sequence[int]]) -> Tensor | None:
        """Return (N, V) nats of every token after each prefix, float32 on the CPU; None where the prior cannot say.

        Args:
            prefixes: N beginnings of texts, in the victim's token ids.
        """
        ...


@runtime_checkable
class Prior(Protocol):
    """Registered with `@prior("name")`; its fields are its knobs."""

    name: ClassVar[str]
    source: ClassVar[str]
    """Paper, section."""
    knows: ClassVar[str]
    """One sentence: what an attacker must have for it, beyond what every eavesdropper has."""

    def load(self, vocabulary: Vocabulary, victim: nn.Module | None = None) -> Scorer:
        """Get ready to score tokens of `vocabulary`.

        Args:
            vocabulary: the victim's.
            victim: the public model, for priors that ask it, and for its device.

        Raises:
            PriorError: a file is missing or wrong, or the tokens cannot be mapped.
        """
        ...


def words_of(sequence: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    """Return a sequence without the tokens that are no part of its wording."""
    around = vocabulary.surrounding_ids | {vocabulary.special[role] for role in AROUND if role in vocabulary.special}
    return [token for token in sequence if token not in around]


def frame_of(vocabulary: Vocabulary) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what a causal language model of these tokens sees before and after a text's words."""
    start = vocabulary.starts_with or tuple(vocabulary.special[role] for role in ("bos",) if role in vocabulary.special)
    return start, vocabulary.ends_with


def check_same_tokens(what: str, digest: str, size: int, vocabulary: Vocabulary, cure: str) -> None:
    """Hold a prior's tokens against the victim's.

    Vocabularies without a digest, of snapshots kept before there was one, are compared by size.

    Args:
        what: the prior, for the message.
        digest: of its tokens (`tokens_digest`).
        size: number of its tokens.
        vocabulary: the victim's.
        cure: what to do about it, as the end of a sentence.

    Raises:
        PriorError: they differ.
    """
    same = digest == vocabulary.digest if vocabulary.digest else size == vocabulary.size
    if not same:
        raise PriorError(
            f"{what} knows the {size} tokens of another tokenizer, the victim has {vocabulary.size} of its own: {cure}"
        )


def tokenizer_vocabulary(tokenizer: Any) -> Vocabulary:
    """Return a tokenizer's public facts where there is no model with it."""
    return vocabulary_of(tokenizer, nn.Embedding(len(tokenizer), 1))
