"""A small Gemma 3 with a picture tower, its processor, and invented pictures.

It needs no leakaudit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import small
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    PreTrainedTokenizerFast,
    set_seed,
)

SIDE = 56
"""Pixels of a side of a picture."""

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<boi> {% else %}{{ c['text'] }} {% endif %}{% endfor %}{% endfor %}"
)


def tokenizer() -> Any:
    """Return a tokenizer of whole words, with the marks of pictures."""
    words = {word for text in small.TEXTS for word in text.split()}
    marks = ["[PAD]", "[UNK]", "<bos>", "<eos>", "<boi>", "<eoi>", "<img>", "user", "assistant", *"ABCDEFGHI"]
    vocabulary = {word: number for number, word in enumerate([*marks, *sorted(words - set(marks))])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens={"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<img>"},
        model_max_length=256,
    )


def save(folder: Path) -> None:
    """Write model and processor into a folder."""
    words = tokenizer()
    numbers = words.get_vocab()
    pictures: Any = getattr(transformers, "Gemma3ImageProcessorPil", None) or transformers.Gemma3ImageProcessor
    Gemma3Processor(
        image_processor=pictures(size={"height": SIDE, "width": SIDE}, do_pan_and_scan=False),
        tokenizer=words,
        chat_template=TEMPLATE,
        image_seq_length=4,
    ).save_pretrained(folder)
    set_seed(5)
    text = {"vocab_size": len(words), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Gemma3Config(
        text_config=text,
        vision_config={**tower, "image_size": SIDE, "patch_size": 14},
        mm_tokens_per_image=4,
        boi_token_index=numbers["<boi>"],
        eoi_token_index=numbers["<eoi>"],
        image_token_index=numbers["<img>"],
    )
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)


def pictures(folder: Path, site: Path) -> None:
    """Write pictures of one colour, and a list of them with an invented text each."""
    from PIL import Image

    folder.mkdir(parents=True)
    site.mkdir(parents=True)
    rows = []
    for number, text in enumerate(small.TEXTS):
        name = f"{number}.png"
        Image.new("RGB", (SIDE, SIDE), (40 * number, 200 - 30 * number, 90)).save(folder / name)
        rows.append({"image": name, "label": number, "label_name": text})
    (site / "train.json").write_text(json.dumps(rows), encoding="utf-8")
