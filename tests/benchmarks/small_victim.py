"""Trains a small GPT-2 shape in float32, in a minute or two of one core.

    python -m tests.benchmarks.small_victim --texts wikitext/dev.jsonl --folder FOLDER --steps 150

As in FILM's experiments, the texts are those that will be attacked. The tokenizer is a byte-level BPE of 8,000 tokens of the same texts. Size and
perplexity on the texts are printed. Larger victims: `tests.benchmarks.decoder_victims`. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.benchmarks.decoder_victims import perplexity, read_texts, rows_of, train_tokenizer

hf: Any = transformers

HIDDEN, LAYERS, HEADS, POSITIONS = 256, 4, 4, 256
ROWS, LENGTH = 8, 64
"""Rows and tokens of one training step."""


def trained(texts: Sequence[str], tokenizer: Any, steps: int) -> Any:
    """Return a model of seed 0 after some steps of AdamW without dropout."""
    end = tokenizer.eos_token_id
    config = hf.GPT2Config(
        vocab_size=len(tokenizer), n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=POSITIONS,
        bos_token_id=end, eos_token_id=end, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(config).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=max(2, steps), pct_start=0.1)
    rows = rows_of(tokenizer(list(texts), add_special_tokens=False)["input_ids"], end, LENGTH)
    started = time.monotonic()
    for step in range(steps):
        ids = torch.tensor([next(rows) for _ in range(ROWS)])  # (B, T)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 25 == 0:
            print(f"step {step} of {steps}: loss {loss.item():.2f}, {time.monotonic() - started:.0f} s", flush=True)
    return model


def main(given: Sequence[str] | None = None) -> None:
    """Train the victim, save it and print what it is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="JSONL with the field text, or lines")
    parser.add_argument("--folder", type=Path, required=True, help="where the victim is kept")
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    texts = [text for path in options.texts for text in read_texts(path)]
    tokenizer = train_tokenizer(texts)
    model = trained(texts, tokenizer, options.steps)
    tokenizer.save_pretrained(options.folder)
    model.save_pretrained(options.folder)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(
        f"{options.folder.name}: {size:.1f} M parameters, D = {HIDDEN}, {LAYERS} layers, tied head, {len(tokenizer):,} tokens, "
        f"{options.steps} steps of {ROWS * LENGTH} tokens; perplexity a token {perplexity(model, tokenizer, texts[:200]):.0f}"
    )


if __name__ == "__main__":
    main()
