"""The layers that read what attention returns are found by running the model."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from leakaudit.errors import AnatomyError
from leakaudit.models.structure.decoder import attention_outputs
from tests.support.tiny import hf

SIZES: dict[str, Any] = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def _gpt2() -> Any:
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=16))


def _llama() -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, intermediate_size=48, num_key_value_heads=2))


def _gpt_neox() -> Any:
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SIZES, intermediate_size=48, max_position_embeddings=16))


def _bert() -> Any:
    return hf.BertForSequenceClassification(hf.BertConfig(**SIZES, intermediate_size=48))


@pytest.mark.parametrize(
    ("make", "name", "input_first"),
    [
        (_gpt2, "transformer.h.{}.attn.c_proj", True),
        (_llama, "model.layers.{}.self_attn.o_proj", False),
        (_gpt_neox, "gpt_neox.layers.{}.attention.dense", False),
        (_bert, "bert.encoder.layer.{}.attention.output.dense", False),
    ],
)
def test_the_attentions_output_layers_are_found(make: Any, name: str, input_first: bool) -> None:
    found = attention_outputs(make())
    assert [layer.module for layer in found] == [name.format(number) for number in range(2)]
    assert {layer.input_first for layer in found} == {input_first}


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(AnatomyError):
        attention_outputs(nn.Linear(3, 3))
