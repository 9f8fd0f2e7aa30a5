"""`ngram`: an n-gram model of some text, in the victim's tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor, nn

from leakaudit.algorithms.language_models.kneser_ney import KneserNey, NgramOrder
from leakaudit.models.vocabulary import tokens_digest
from leakaudit.plugins import PriorError, Vocabulary, check_same_tokens, prior, words_of

SCHEMA = "leakaudit.ngram/1"

DEFAULT = Path(__file__).parent / "default.safetensors"
"""Trigrams of `default.txt`, sentences written for this project, in the tokens of bert-base-uncased. Written by
`leakaudit prior train --kind ngram --text leakaudit/priors/default.txt --tokenizer DIR --order 3 --out
leakaudit/priors/default.safetensors`."""


@prior("ngram")
@dataclass(frozen=True)
class NGram:
    """An n-gram model over the victim's tokens, built from any text in seconds.

    The smoothing is interpolated modified Kneser-Ney. The end of a sentence is scored like a token. The built-in model comes from a few
    hundred plain sentences in the tokens of bert-base-uncased, which MiniLM and many other models share. It clearly prefers a sentence
    to the same words in random order, but hardly to the same sentence with two words exchanged.
    """

    path: Path | None = None
    """File that `leakaudit prior train --kind ngram` wrote. With None, the built-in model is taken."""

    source: ClassVar[str] = "Chen and Goodman 1998, Sec. 3, interpolated modified Kneser-Ney"
    knows: ClassVar[str] = "Text in the language of the victim's, however much; the built-in one needs nothing."

    def load(self, vocabulary: Vocabulary, victim: nn.Module | None = None) -> NGramScorer:
        """Read the file.

        Raises:
            PriorError: the file is missing, is not an n-gram model, or was built with other tokens.
        """
        path = self.path or DEFAULT
        model, digest = read_ngram(path)
        check_same_tokens(
            f"the n-gram model {path.name}",
            digest,
            model.size,
            vocabulary,
            "build one with `leakaudit prior train --kind ngram --text FILE --tokenizer FOLDER` and the victim's tokenizer",
        )
        return NGramScorer(model, vocabulary)


@dataclass(frozen=True)
class NGramScorer:
    """An n-gram model and the victim's vocabulary."""

    model: KneserNey
    vocabulary: Vocabulary

    def nll(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return the mean nats per token of each sequence; its end counts as a token."""
        return self.model.nll([words_of(sequence, self.vocabulary) for sequence in sequences])

    def next_token_nll(self, prefixes: Sequence[Sequence[int]]) -> Tensor:
        """Return (N, V) nats of every token after each prefix.

        The first token that the tokenizer puts after a text stands for the end of the text.
        """
        p = self.model.next_token([words_of(prefix, self.vocabulary) for prefix in prefixes])
        found = np.full((len(prefixes), self.vocabulary.size), 1.0 / (self.model.size + 1))
        size = min(self.model.size, self.vocabulary.size)
        found[:, :size] = p[:, :size]
        for token in self.vocabulary.ends_with[:1]:
            found[:, token] = p[:, -1]
        return torch.from_numpy(-np.log(found)).float()


def build_ngram(texts: Sequence[str], tokenizer: Any, order: int) -> KneserNey:
    """Count the texts in a tokenizer's tokens.

    Raises:
        PriorError: there is no text, or the order is below 1.
    """
    if order < 1:
        raise PriorError(f"the order of an n-gram model is at least 1, got {order}")
    sentences = [ids for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"] if ids] if texts else []
    if not sentences:
        raise PriorError("an n-gram model needs at least one text with a token in it")
    return KneserNey.count(sentences, order, len(tokenizer))


def write_ngram(path: Path, model: KneserNey, tokenizer: Any) -> None:
    """Write a model with the digest of its tokenizer.

    Raises:
        PriorError: the file cannot be written.
    """
    arrays: dict[str, NDArray[Any]] = {}
    for n, order in enumerate(model.orders, start=1):
        arrays |= {f"{n}/keys": order.keys, f"{n}/counts": order.counts.astype(np.int32)}
    facts = {"schema": SCHEMA, "size": model.size, "orders": len(model.orders), "digest": tokens_digest(tokenizer)}
    try:
        save_file(arrays, path, metadata={"leakaudit": json.dumps(facts)})
    except (OSError, SafetensorError) as error:
        raise PriorError(f"{path}: cannot be written ({type(error).__name__})") from None


def read_ngram(path: Path) -> tuple[KneserNey, str]:
    """Read a model and the digest of its tokenizer.

    Raises:
        PriorError: the file is missing or is not an n-gram model of this project.
    """
    if not path.is_file():
        raise PriorError(f"{path}: no such file; `leakaudit prior train --kind ngram` writes one")
    try:
        with safe_open(path, framework="numpy") as file:
            facts: Any = json.loads((file.metadata() or {})["leakaudit"])
            if facts["schema"] != SCHEMA:
                raise PriorError(f"{path}: is of schema {facts['schema']!r}, this version reads {SCHEMA!r}")
            orders: list[NgramOrder] = []
            for n in range(1, facts["orders"] + 1):
                counts = file.get_tensor(f"{n}/counts").astype(np.int64)
                shorter = len(orders[-1].keys) if orders else 1
                orders.append(NgramOrder(file.get_tensor(f"{n}/keys"), counts, shorter))
            return KneserNey(tuple(orders), int(facts["size"])), str(facts["digest"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise PriorError(f"{path}: is not an n-gram model of leakaudit ({type(error).__name__})") from None
