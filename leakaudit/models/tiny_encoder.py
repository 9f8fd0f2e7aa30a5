"""A tiny encoder with random weights, for a self-test and for a first example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def tiny_encoder(texts: Sequence[str]) -> tuple[Any, Any]:
    """Return an untrained two-layer encoder and a word-level tokenizer.

    Both are made in memory; the weights are the same for the same texts.

    Args:
        texts: every word of them gets a token.
    """
    splitter = Whitespace()
    words = sorted({word for text in texts for word, _ in splitter.pre_tokenize_str(text)})
    vocabulary = {word: index for index, word in enumerate((*_SPECIAL, *words))}
    plain = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    plain.pre_tokenizer = splitter
    plain.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BertForSequenceClassification._from_config(config, attn_implementation="eager")
    return model.eval(), tokenizer
