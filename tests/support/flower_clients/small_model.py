"""Writes a small language model with random weights, and its tokenizer.

    python small_model.py FOLDER KIND

KIND is `classifier`, `bloom`, `words` (Whisper) or another word for a Mistral.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from invented import QUESTIONS, TEXTS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BloomConfig,
    BloomForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperForConditionalGeneration,
    set_seed,
)

PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n"
    "### Instruction:\n\n### Response: "
)
"""What the examples put around a row, so that the vocabulary has its words."""
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def save_model(folder: Path, kind: str) -> None:
    """Write a small model with random weights, and its tokenizer."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([PROMPT, *TEXTS, *QUESTIONS] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=256
    )
    set_seed(5)
    if kind == "classifier":
        sizes = {
            **SIZES,
            "hidden_size": 128,
            "num_attention_heads": 2,
        }  # those of the published one, prajjwal1/bert-tiny
        model: Any = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **sizes))
    elif kind == "words":
        model = WhisperForConditionalGeneration(WhisperConfig(decoder_layers=1))  # the rest as in whisper-tiny
    elif kind == "bloom":
        special_ids: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        model = BloomForCausalLM(
            BloomConfig(vocab_size=len(tokenizer), hidden_size=512, n_layer=2, n_head=4, **special_ids)
        )
    else:
        model = MistralForCausalLM(MistralConfig(vocab_size=len(tokenizer), num_key_value_heads=4, **SIZES))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    save_model(Path(sys.argv[1]), sys.argv[2])
