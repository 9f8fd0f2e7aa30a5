"""Tiny models with random weights, a tokenizer, and client steps on them.

All tests share them; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from leakaudit.client.facts import Granted
from leakaudit.client.observation import Observation
from leakaudit.client.step import ClientStep
from leakaudit.plugins.testing.small_models import (
    HIDDEN,
    POSITIONS,
    TEXT_WORDS,
    VOCABULARY,
    bert,
    bert_tokenizer,
    client_step,
    gpt2_config,
    gpt2_lm,
    gpt2_tokenizer,
    hf,
)

__all__ = [
    "HIDDEN",
    "POSITIONS",
    "TEXT_WORDS",
    "VOCABULARY",
    "WIDE",
    "bert",
    "bert_tokenizer",
    "client_step",
    "cosine",
    "defended",
    "generator",
    "gpt2_classifier",
    "gpt2_config",
    "gpt2_lm",
    "gpt2_tokenizer",
    "hf",
    "ids_of",
    "observe",
    "wide_bert",
    "word_table",
]

WIDE = 96


def wide_bert(dropout: float = 0.0) -> nn.Module:
    """Return a BERT classifier of three classes and hidden size 96, in eval mode.

    It is wide enough for the span of a few sentences.

    Its weights are as far from zero as trained ones, so that attention is not uniform.
    """
    wide = {"hidden_size": WIDE, "num_attention_heads": 6, "intermediate_size": 2 * WIDE}
    return bert(num_labels=3, dropout=dropout, **wide, initializer_range=0.2)


def gpt2_classifier(num_labels: int = 2, seed: int = 0) -> nn.Module:
    """Return a GPT-2 classifier, 2 layers, D = 32; its head has no bias."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = hf.GPT2ForSequenceClassification(gpt2_config(num_labels=num_labels)).eval()
    return model


def generator(seed: int = 0) -> torch.Generator:
    """Return a CPU generator with a seed."""
    return torch.Generator().manual_seed(seed)


def ids_of(text: str) -> tuple[int, ...]:
    """Return the token ids of a text in the tiny BERT's vocabulary.

    Special tokens are included.
    """
    return tuple(bert_tokenizer()(text)["input_ids"])


def observe(
    texts: list[str], labels: list[int] | None = None, *, model: nn.Module | None = None, **more: Any
) -> Observation:
    """Return the observation of one step of the tiny BERT (or `model`)."""
    return client_step(model or bert(), bert_tokenizer(), texts, labels, **more).observe()


def defended(
    defense: Callable[[ClientStep, Observation, torch.Generator], Observation], text: str
) -> tuple[Observation, tuple[int, ...]]:
    """Return the observation of a step on one text behind a defence, and its ids.

    Label and length are granted.
    """
    step = client_step(bert(initializer_range=0.1), bert_tokenizer(), [text], [1])
    ids = step.truth.sequences()[0]
    seen = defense(step, step.observe(), torch.Generator().manual_seed(0))
    return seen.granting(Granted(labels=(1,), lengths=(len(ids),))), ids


def cosine(one: Tensor, other: Tensor) -> float:
    """Return the cosine of two tensors of one shape."""
    return float(functional.cosine_similarity(one.flatten(), other.flatten(), dim=0))


def word_table(model: nn.Module) -> str:
    """Return the name of the word embedding's parameter."""
    table = model.get_input_embeddings().weight  # type: ignore[operator]
    return next(name for name, parameter in model.named_parameters() if parameter is table)
