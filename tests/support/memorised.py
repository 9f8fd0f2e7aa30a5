"""A small GPT-2 that has learned ten sentences by heart, and client steps."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn

from leakaudit.client.step import ClientStep
from leakaudit.plugins.testing.small_models import client_step, hf

SENTENCES = (
    "The ferry leaves the harbour before sunrise.",
    "Martha keeps seven clocks in her kitchen.",
    "Our neighbour paints every door in his street blue.",
    "Nobody answered when Peter rang the bell.",
    "A gardener buried the letters under an old pear tree.",
    "Yesterday the baker sold bread to forty tourists.",
    "Laura forgot her umbrella on the last train.",
    "Two engineers repaired the bridge with borrowed tools.",
    "His sister writes songs about rain and mountains.",
    "When the lights went out we told stories.",
)
"""Written for this project."""


@cache
def tokenizer() -> Any:
    """Return a byte-level BPE of the sentences; it puts nothing around a text."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(SENTENCES, trainer)
    return hf.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>", model_max_length=48)


@cache
def _state(tied: bool) -> dict[str, torch.Tensor]:
    model = _fresh(tied)
    read = tokenizer()(list(SENTENCES), return_tensors="pt", padding=True)
    labels = read["input_ids"].masked_fill(read["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(120):
        optimizer.zero_grad()
        model(**read, labels=labels).loss.backward()
        optimizer.step()
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


def _fresh(tied: bool) -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=len(tokenizer()), n_embd=64, n_layer=2, n_head=4, n_positions=48, tie_word_embeddings=tied,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager", bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = hf.GPT2LMHeadModel(config)
    return model


def language_model(*, tied: bool = False) -> nn.Module:
    """Return the model that knows the sentences; every call makes a new one."""
    model = _fresh(tied)
    model.load_state_dict(_state(tied))
    return model.eval()


def step(*numbers: int, tied: bool = False, **more: Any) -> ClientStep:
    """Return a client's step on sentences, by their numbers."""
    texts = [SENTENCES[number] for number in numbers]
    return client_step(language_model(tied=tied), tokenizer(), texts, task="causal-lm", **more)
