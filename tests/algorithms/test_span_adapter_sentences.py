"""Several sentences of a decoder with adapters; nothing is granted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from leakaudit.attacks.span import Span
from leakaudit.models.lora import add_lora, is_adapter
from leakaudit.plugins.attack_protocol import Reconstruction
from leakaudit.plugins.budget import Budget
from leakaudit.plugins.testing.small_models import client_step
from tests.support import tiny

TEXTS = (
    "the old dog chased a small cat near the river .",
    "never saw three big horse under blue tree",
    "the old cat saw a river",
)


def _model(shape: str) -> Any:
    """Return a decoder with adapters, as far from zero as after some rounds."""
    pytest.importorskip("peft")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = {"gpt2": _gpt2, "llama": _llama}[shape]().eval()
    add_lora(model, 8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(1))
    return model


def _gpt2() -> Any:
    config = tiny.gpt2_config(initializer_range=0.1)
    config.n_embd, config.n_head = tiny.WIDE, 6
    return tiny.hf.GPT2LMHeadModel(config)


def _llama() -> Any:
    config = tiny.hf.LlamaConfig(
        vocab_size=len(tiny.gpt2_tokenizer()), hidden_size=tiny.WIDE, intermediate_size=2 * tiny.WIDE, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=tiny.POSITIONS, initializer_range=0.1,
    )  # fmt: skip
    return tiny.hf.LlamaForCausalLM(config)


def _step(model: Any, texts: tuple[str, ...]) -> Any:
    frozen = frozenset(name for name, _ in model.named_parameters() if not is_adapter(name))
    return client_step(model, tiny.gpt2_tokenizer(), list(texts), task="causal-lm", frozen=frozen)


def _attack(step: Any) -> Reconstruction:
    return Span()(step.observe(), tiny.generator(), Budget(120))


@pytest.mark.parametrize("shape", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "texts",
    [TEXTS[:1], TEXTS, (TEXTS[0], TEXTS[0], TEXTS[1]), (TEXTS[1], TEXTS[1][:20]), (TEXTS[2], TEXTS[2] + " tree")],
    ids=["one", "three", "an equal pair", "one inside another", "one token more"],
)
def test_every_sentence_is_read_and_proved(shape: str, texts: tuple[str, ...]) -> None:
    """From adapters of two layers and more, with fewer rows than tokens."""
    step = _step(_model(shape), texts)
    found = _attack(step).sequences or ()
    assert sorted(s.token_ids for s in found) == sorted(step.truth.sequences())
    assert all(s.proved for s in found)
