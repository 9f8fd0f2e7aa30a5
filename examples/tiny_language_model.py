"""Make a small Llama with its tokenizer, and a file of notes to fine-tune it on.

    python examples/tiny_language_model.py leakaudit-demo/tiny

Nothing is downloaded: the weights are random, the tokenizer is trained on the invented notes in `examples/data`. The other examples of
this folder that need a language model make it by themselves.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NOTES = Path(__file__).parent / "data" / "clinic_notes.jsonl"
FOLDER = Path("leakaudit-demo/tiny")
WORDS = 1000
"""Size of the vocabulary."""
HIDDEN = 96
"""Width of the model: more than the tokens of a note, as in real models."""


def notes() -> list[str]:
    """Return the invented notes."""
    return [json.loads(line)["text"] for line in NOTES.read_text(encoding="utf-8").splitlines()]


def make(folder: Path = FOLDER) -> Path:
    """Write model, tokenizer and notes into a folder, unless they are there.

    Returns:
        The folder of the model; the notes lie beside its files, in `notes.jsonl`.
    """
    if (folder / "notes.jsonl").exists():
        return folder
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.train_from_iterator(
        notes(),
        trainers.BpeTrainer(
            vocab_size=WORDS,
            special_tokens=["<pad>", "<s>", "</s>", "<unk>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        initializer_range=0.1,  # as far from zero as the weights of a trained model
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(7)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = "".join(json.dumps({"text": note}) + "\n" for note in notes())
    (folder / "notes.jsonl").write_text(rows, encoding="utf-8")  # last, so that a folder with it is whole
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    print(make(parser.parse_args().folder))


if __name__ == "__main__":
    main()
