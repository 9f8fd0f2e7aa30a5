"""Small models and invented texts for the users of the pasted lines.

They need no leakaudit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)

TEXTS = (
    "the nurse called the family of the old man before noon",
    "a young woman came back with pain in her left knee today",
    "the doctor wrote a short letter to the school near the river",
    "two children with fever slept in the blue room last night",
    "the patient asked for water and read a long book alone",
    "after the storm the village sent food to the small clinic",
)
STEPS = 4


def tokenizer() -> Any:
    """Return a tokenizer of whole words."""
    words = sorted({word for text in TEXTS for word in text.split()})
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", eos_token="[SEP]", model_max_length=32
    )


def classifier() -> Any:
    """Return a BERT with hidden size 48 and two classes."""
    set_seed(5)
    config = BertConfig(
        vocab_size=len(tokenizer()),
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=32,
    )
    return BertForSequenceClassification(config)


def language_model() -> Any:
    """Return a Llama with hidden size 48."""
    set_seed(5)
    config = LlamaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


def labelled() -> list[dict[str, Any]]:
    """Return the texts as token ids with a label each."""
    return [{**tokenizer()(text), "labels": number % 2} for number, text in enumerate(TEXTS)]


def save(folder: Path) -> Path:
    """Write language model and tokenizer into a folder."""
    language_model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
