"""`causal-lm`: a causal language model from a folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from leakaudit.algorithms.language_models.token_scorer import TokenScorer
from leakaudit.models.loading import load_model, load_tokenizer
from leakaudit.models.vocabulary import tokens_digest, vocabulary_of
from leakaudit.plugins import PriorError, Vocabulary, check_same_tokens, prior, words_of


@prior("causal-lm")
@dataclass(frozen=True)
class CausalLM:
    """The likelihood that a causal language model gives to a text.

    A text begins and ends with the tokens that the model's tokenizer puts around it. If it puts no token there, the text begins with the
    begin-of-text token, and its end is not scored.

    A model with another tokenizer reads the text: the victim's tokens are decoded and encoded again. The negative log-likelihood of the
    whole text is divided by the number of the *victim's* tokens. So candidates with equally many tokens of the victim are compared by
    the likelihood of the text, whatever its number of tokens for the model.
    """

    path: Path | None = None
    """Folder with a model and its tokenizer, as `save_pretrained` or `leakaudit prior train` writes it. Nothing is downloaded."""
    tokenizer: Path | None = None
    """Folder of the victim's tokenizer. Only needed if the model has another tokenizer."""

    source: ClassVar[str] = "LAMP (Balunovic et al. 2022), Sec. 3.3 and 4.3: perplexity of an auxiliary language model"
    knows: ClassVar[str] = "A language model, pretrained or trained on text like the client's."

    def load(self, vocabulary: Vocabulary, victim: nn.Module | None = None) -> Scorer:
        """Load the model onto the victim's device.

        Raises:
            PriorError: no folder was named, or the tokens cannot be mapped.
            ModelError: there is no such model or tokenizer.
        """
        if self.path is None:
            raise PriorError("causal-lm: name the folder of a causal language model, such as causal-lm(path=FOLDER)")
        model = load_model(self.path, "causal-lm", device=_device_of(victim), dtype=torch.float32)
        own = load_tokenizer(self.path)
        if tokens_digest(own) == vocabulary.digest or (not vocabulary.digest and len(own) == vocabulary.size):
            return TokenScorer(model, vocabulary, vocabulary_of(own, model))
        if self.tokenizer is None:
            raise PriorError(
                f"{self.path}: its {len(own)} tokens are not the victim's {vocabulary.size}; name the folder of the victim's tokenizer, "
                "such as causal-lm(path=FOLDER,tokenizer=FOLDER), and texts are read in its tokens"
            )
        theirs = load_tokenizer(self.tokenizer)
        cure = "it has to be the victim's own"
        check_same_tokens(f"{self.tokenizer}", tokens_digest(theirs), len(theirs), vocabulary, cure)
        return TextScorer(TokenScorer(model, vocabulary_of(own, model)), own, theirs, vocabulary)


@dataclass(frozen=True)
class TextScorer:
    """A causal language model that reads the victim's tokens as text."""

    model: TokenScorer
    own: Any
    """The model's tokenizer."""
    theirs: Any
    """The victim's tokenizer."""
    vocabulary: Vocabulary
    """The victim's vocabulary."""

    def nll(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return each text's negative log-likelihood, in nats per victim's token."""
        words = [words_of(sequence, self.vocabulary) for sequence in sequences]
        texts = [self.theirs.decode(ids) if ids else "" for ids in words]
        read = [self.own(text, add_special_tokens=False)["input_ids"] for text in texts]
        totals = self.model.totals(read)
        return [
            nats / len(ids) if ids and scored else math.log(self.vocabulary.size)
            for (nats, scored), ids in zip(totals, words, strict=True)
        ]

    def next_token_nll(self, prefixes: Sequence[Sequence[int]]) -> None:
        """Return None: tokens of the victim are not tokens of the model."""


Scorer = TokenScorer | TextScorer


def _device_of(model: nn.Module | None) -> torch.device:
    return torch.device("cpu") if model is None else next(model.parameters()).device
