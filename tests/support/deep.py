"""Tiny models with more blocks than are kept of a large step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support import tiny


def bert() -> nn.Module:
    return tiny.bert(
        num_labels=3,
        hidden_size=96,
        num_attention_heads=6,
        intermediate_size=192,
        num_hidden_layers=5,
        initializer_range=0.2,
    )


def gpt2() -> Any:
    torch.manual_seed(0)
    shape = {"n_layer": 5, "n_embd": 96, "n_head": 6, "initializer_range": 0.2}
    return tiny.hf.GPT2LMHeadModel(tiny.hf.GPT2Config(**(tiny.gpt2_config().to_dict() | shape)))


def llama() -> Any:
    torch.manual_seed(0)
    config = tiny.hf.LlamaConfig(
        vocab_size=len(tiny.VOCABULARY), hidden_size=96, num_attention_heads=6, num_key_value_heads=3, intermediate_size=192,
        num_hidden_layers=5, max_position_embeddings=tiny.POSITIONS, initializer_range=0.2,
    )  # fmt: skip
    return tiny.hf.LlamaForCausalLM(config)


MODELS = {"bert": bert, "gpt2": gpt2, "llama": llama}
