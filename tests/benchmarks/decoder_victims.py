"""Trains small GPT-2 shapes, the victims of language-model measurements.

Run: `python -m tests.benchmarks.decoder_victims --texts FILE [...] --dev FILE [...] --folder FOLDER [--only STAGE ...]`.

Each victim has D = 384, 6 layers, 6 heads and 256 positions, and a byte-level BPE of 8,000 tokens that is trained on the same texts.
Nothing stands around a text. Stages differ in the number of training steps and in the head: `tied` heads are the token table. A `known`
stage goes on with the sentences of `--known`, as in FILM's experiments, which attack sentences that the client has been trained on for several
passes.
A stage is written into its own folder once it is finished; a run that was cut off goes on from its last checkpoint. Then one table row
is printed for each stage and file of `--dev`: parameters, vocabulary, training steps, perplexity a token. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.benchmarks.sentences import kept_rows, read_rows

hf: Any = transformers

HIDDEN, LAYERS, HEADS, POSITIONS = 384, 6, 6, 256
VOCABULARY = 8000
"""Tokens of the BPE. Our choice: a larger head takes most of a training step on one core."""
ROWS, LENGTH = 16, 64
"""Rows and tokens of one training step."""
LEARNING_RATE = 2e-3
"""Peak of a one-cycle schedule. Our choice: usual for so small a model."""
CHECKPOINT = 50
"""Training steps between two checkpoints, about half a minute on one core."""


@dataclass(frozen=True)
class Stage:
    """One victim."""

    name: str
    tied: bool
    steps: int
    """Training steps; 0 leaves the random weights."""
    start: str = ""
    """Stage from whose weights it starts, to be trained on the texts of `--known` only; empty for random weights."""
    until: float = 0.0
    """Perplexity of a training step at which training ends early."""


STAGES = (
    Stage("gpt2-fresh", True, 0),
    Stage("gpt2-fresh-untied", False, 0),
    Stage("gpt2-tied", True, 300),
    Stage("gpt2-untied", False, 300),
    Stage("gpt2-tied-known", True, 300, "gpt2-tied", until=11.0),
    Stage("gpt2-untied-known", False, 300, "gpt2-untied", until=11.0),
    Stage("gpt2-tied-long", True, 1500),
    Stage("gpt2-untied-long", False, 1500),
)
"""300 steps take about three minutes on one idle core (measured, 0.6 s a step). A perplexity of 11 is that of FILM's victims (Table 5)."""


def read_texts(path: Path) -> list[str]:
    """Return the texts of a JSONL file, or the lines of any other file."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [json.loads(line)["text"] for line in lines] if path.suffix == ".jsonl" else lines


def train_tokenizer(texts: Sequence[str], size: int = VOCABULARY) -> Any:
    """Return a byte-level BPE as GPT-2's, trained on texts."""
    inner = Tokenizer(models.BPE())
    inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|endoftext|>", "<|pad|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    inner.train_from_iterator(texts, trainer)
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<|endoftext|>", eos_token="<|endoftext|>", pad_token="<|pad|>",
        model_max_length=POSITIONS,
    )  # fmt: skip


def fresh_model(tokenizer: Any, *, tied: bool) -> Any:
    """Return a GPT-2 shape with random weights of seed 0."""
    end = tokenizer.eos_token_id
    config = hf.GPT2Config(
        vocab_size=len(tokenizer), n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=POSITIONS,
        bos_token_id=end, eos_token_id=end, pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return hf.GPT2LMHeadModel(config)


def rows_of(texts: Sequence[Sequence[int]], end: int, length: int = LENGTH, seed: int = 0) -> Iterator[list[int]]:
    """Yield rows of tokens without end; every row begins where a text begins.

    Args:
        texts: token ids.
        end: id between two texts.
        length: tokens of a row; the rest of its last text is left out.
        seed: of the order, which is another one in each pass.
    """
    rng, row = random.Random(seed), list[int]()
    while True:
        for number in rng.sample(range(len(texts)), len(texts)):
            row += [*texts[number], end]
            if len(row) >= length:
                yield row[:length]
                row = []


def train(model: Any, rows: Iterator[list[int]], steps: int, checkpoint: Path, until: float = 0.0) -> None:
    """Train a language model, from a checkpoint if there is one.

    The checkpoint is removed at the end.

    Args:
        model: changed in place.
        rows: of tokens.
        steps: at most so many.
        checkpoint: file for weights, moments and schedule.
        until: perplexity at which training ends; 0 for never.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    done = 0
    if checkpoint.is_file():
        saved = torch.load(checkpoint, weights_only=True)
        done = saved.pop("step")
        for name, state in saved.items():
            parts[name].load_state_dict(state)
    started = time.monotonic()
    for step in range(steps):
        ids = torch.tensor([next(rows) for _ in range(ROWS)])  # (B, T)
        if step < done:
            continue
        loss = _step(model, ids, optimizer)
        schedule.step()
        if math.exp(loss) < until:
            break
        if step % CHECKPOINT == CHECKPOINT - 1:
            print(f"step {step + 1} of {steps}: loss {loss:.2f}, {time.monotonic() - started:.0f} s", flush=True)
            _save({name: part.state_dict() for name, part in parts.items()} | {"step": step + 1}, checkpoint)
    checkpoint.unlink(missing_ok=True)


def _step(model: Any, ids: torch.Tensor, optimizer: torch.optim.Optimizer) -> float:
    """Take one step without dropout.

    Dropout slows learning, and the texts are read too few times to be learnt by heart.
    """
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _save(state: dict[str, Any], path: Path) -> None:
    other = path.with_suffix(".new")
    torch.save(state, other)
    other.replace(path)


def build(stage: Stage, folder: Path, texts: Sequence[str], known: Sequence[Path] = ()) -> Path:
    """Return the folder of a victim; train it if it is not there.

    Args:
        stage: what to build.
        folder: of all victims and their tokenizer.
        texts: to train the tokenizer and the victim on.
        known: files whose sentences (`tests.benchmarks.sentences`) a `known` stage is trained on.
    """
    place = folder / stage.name
    if (place / "config.json").is_file():
        return place
    if not (folder / "tokenizer" / "tokenizer.json").is_file():
        train_tokenizer(texts).save_pretrained(folder / "tokenizer")
    tokenizer = hf.AutoTokenizer.from_pretrained(folder / "tokenizer", local_files_only=True, trust_remote_code=False)
    if stage.start:
        texts = [row["text"] for path in known for row in kept_rows(read_rows(path), tokenizer)]
        model = hf.AutoModelForCausalLM.from_pretrained(
            folder / stage.start, local_files_only=True, trust_remote_code=False
        ).eval()
    else:
        model = fresh_model(tokenizer, tied=stage.tied).eval()
    if stage.steps:
        ids = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        train(
            model, rows_of(ids, tokenizer.eos_token_id), stage.steps, folder / f"{stage.name}.checkpoint", stage.until
        )
    unfinished = folder / f"{stage.name}.unfinished"
    tokenizer.save_pretrained(unfinished)
    model.save_pretrained(unfinished)
    unfinished.replace(place)
    return place


@torch.no_grad()
def perplexity(model: Any, tokenizer: Any, texts: Sequence[str], rows: int = 32) -> float:
    """Return the perplexity a token over texts; the first token is given."""
    ids = [torch.tensor(text) for text in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]
    ids = sorted((text[:POSITIONS] for text in ids if len(text) > 1), key=len)
    total, count = 0.0, 0
    for start in range(0, len(ids), rows):
        part = torch.nn.utils.rnn.pad_sequence(
            ids[start : start + rows], batch_first=True, padding_value=-100
        )  # (B, T)
        logits = model(input_ids=part.clamp(min=0)).logits[:, :-1].flatten(0, 1)  # (B (T - 1), V)
        total += float(torch.nn.functional.cross_entropy(logits.float(), part[:, 1:].flatten(), reduction="sum"))
        count += int((part[:, 1:] >= 0).sum())
    return math.exp(total / count)


def described(place: Path, dev: Sequence[Path]) -> str:
    """Return a sentence that says what a victim is, with its perplexity."""
    tokenizer = hf.AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    model = hf.AutoModelForCausalLM.from_pretrained(place, local_files_only=True, trust_remote_code=False).eval()
    stage = next((stage for stage in STAGES if stage.name == place.name), None)
    heads = "tied" if model.config.tie_word_embeddings else "untied"
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    known = ", ".join(f"{path.parent.name} {perplexity(model, tokenizer, read_texts(path)):.0f}" for path in dev)
    trained = "" if stage is None else f", {_training(stage)}"
    return (
        f"{place.name}: {size:.1f} M parameters, D = {model.config.n_embd}, {model.config.n_layer} layers, {heads} head, "
        f"byte-level BPE of {len(tokenizer):,} tokens{trained}; perplexity a token: {known}"
    )


def _training(stage: Stage) -> str:
    if not stage.start:
        return f"{stage.steps} training steps of {ROWS * LENGTH} tokens"
    return f"{stage.start} trained further on the attacked sentences until a step's perplexity was {stage.until:g}"


def main() -> None:
    """Build the victims and print what they are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="JSONL with the field text, or lines")
    parser.add_argument("--dev", type=Path, nargs="+", required=True, help="files for the perplexity")
    parser.add_argument("--known", type=Path, nargs="+", default=[], help="files for the stages `known`")
    parser.add_argument("--folder", type=Path, required=True, help="where victims are kept")
    parser.add_argument("--only", nargs="+", default=[stage.name for stage in STAGES])
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    texts = [text for path in options.texts for text in read_texts(path)]
    for stage in STAGES:
        if stage.name in options.only and (options.known or not stage.start):
            print(described(build(stage, options.folder, texts, options.known), options.dev), flush=True)


if __name__ == "__main__":
    main()
