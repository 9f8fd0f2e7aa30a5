"""Make small models with their tokenizer, and a file of notes to train them on.

    python examples/tiny_models.py leakaudit-demo/tiny

makes a Llama in `leakaudit-demo/tiny/llama` and a BERT classifier in `leakaudit-demo/tiny/bert`. Nothing is downloaded: the weights are random,
the tokenizer is trained on the invented notes in `examples/data`. The examples that need one of them make it by themselves.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

NOTES = Path(__file__).parent / "data" / "clinic_notes.jsonl"
FOLDER = Path("leakaudit-demo/tiny")
WORDS = 1000
"""Size of the vocabulary."""
SHAPE: dict[str, Any] = {
    "hidden_size": 96,  # more than the tokens of a note, as in real models
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}


def rows() -> list[dict[str, Any]]:
    """Return the invented notes: `text`, and the ward as `label`, 0 to 3."""
    return [json.loads(line) for line in NOTES.read_text(encoding="utf-8").splitlines()]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer trained on the notes; a text begins with <s> and ends with </s>."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    words.train_from_iterator([row["text"] for row in rows()], trainer)
    words.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, cls_token="<s>", sep_token="</s>", **names)


def _save(model: PreTrainedModel, words: PreTrainedTokenizerFast, folder: Path) -> Path:
    words.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def llama(folder: Path = FOLDER) -> Path:
    """Make a language model, unless it is there; return its folder, which also holds the texts as `notes.jsonl`."""
    place = folder / "llama"
    if not (place / "model.safetensors").exists():
        words = tokenizer()
        place.mkdir(parents=True, exist_ok=True)
        notes = "".join(json.dumps({"text": row["text"]}) + "\n" for row in rows())
        (place / "notes.jsonl").write_text(notes, encoding="utf-8")
        torch.manual_seed(7)
        # Weights as far from zero as those of a trained model.
        config = LlamaConfig(
            vocab_size=len(words), bos_token_id=1, eos_token_id=2, num_key_value_heads=4, initializer_range=0.1, **SHAPE
        )
        _save(LlamaForCausalLM(config), words, place)
    return place


def bert(folder: Path = FOLDER) -> Path:
    """Make a classifier of the four wards, unless it is there; return its folder."""
    place = folder / "bert"
    if not (place / "model.safetensors").exists():
        words = tokenizer()
        torch.manual_seed(7)
        config = BertConfig(vocab_size=len(words), num_labels=4, initializer_range=0.2, **SHAPE)
        _save(BertForSequenceClassification(config), words, place)
    return place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    folder = parser.parse_args().folder
    print(llama(folder), bert(folder))


if __name__ == "__main__":
    main()
