"""Training of a small causal language model for any tokenizer, on a CPU.

Letters: T tokens of a text, ROWS texts of a batch.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from leakaudit.errors import PriorError

hf: Any = transformers
"""The library builds its classes by name at run time, which a type checker cannot follow."""

LAYERS, HIDDEN, HEADS = 2, 256, 4
"""Our choice, for a CPU. With a vocabulary of 30,000 tokens the output layer takes nearly all of the time."""
LONGEST = 64
"""Most tokens of a text that training reads, and number of positions of the model. Our choice: several times a usual sentence."""
ROWS = 32
LEARNING_RATE = 2e-3
"""Highest learning rate of AdamW. Our choice, not tuned. The rate falls linearly until the training time ends."""
WARMUP = 20
"""Steps in which the learning rate rises to the highest."""


class Progress(NamedTuple):
    """The progress of training."""

    step: int
    share: float
    """Share of the training time that has passed."""
    nats: float
    """Mean negative log-likelihood per token of the latest batch."""


def train_causal_lm(
    texts: Sequence[str],
    tokenizer: Any,
    minutes: float,
    *,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
    report: Callable[[Progress], None] = lambda _: None,
) -> nn.Module:
    """Train a GPT-2 of two layers for some minutes.

    Each text stands between a start and an end token. The number of steps depends on the machine, so two machines give two models.

    Args:
        texts: texts to learn from.
        tokenizer: the model's.
        minutes: training time by `clock`, above 0; at least one step is taken.
        seed: seed of the first weights and of the order of the texts.
        clock: returns seconds.
        report: called after every step.

    Raises:
        PriorError: there is no text, or the tokenizer has no start or end token.
    """
    if minutes <= 0:
        raise PriorError(f"training takes time: give a number of minutes above 0, got {minutes:g}")
    start, end = frame(tokenizer)
    read = tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
    rows = [[start, *ids[: LONGEST - 2], end] for ids in read if ids]
    if not rows:
        raise PriorError("a language model needs at least one text with a token in it")
    began, seconds = clock(), 60 * minutes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = hf.GPT2LMHeadModel(_config(tokenizer, start, end))
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
        for step, ids in enumerate(_batches(rows, random.Random(seed)), start=1):
            share = min(1.0, (clock() - began) / seconds)
            if share >= 1 and step > 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min(1.0, step / WARMUP) * max(1 - share, 0.02)
            logits: Tensor = model(input_ids=ids.clamp_min(0)).logits[:, :-1]
            loss = functional.cross_entropy(
                logits.flatten(end_dim=1), ids[:, 1:].flatten()
            )  # padding is -100: left out
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            report(Progress(step, share, loss.item()))
    return model.eval()


def save_causal_lm(folder: Path, model: nn.Module, tokenizer: Any) -> None:
    """Write the model and its tokenizer for the prior `causal-lm`.

    Raises:
        PriorError: the folder cannot be written.
    """
    try:
        model.save_pretrained(folder)  # type: ignore[operator]
        tokenizer.save_pretrained(folder)
    except OSError as error:
        raise PriorError(f"{folder}: cannot be written ({error.strerror})") from None


def held_out(texts: Sequence[str], share: float, seed: int = 0) -> tuple[list[str], list[str]]:
    """Split distinct texts into training texts and held-out texts.

    The held-out texts are a random share. If the share is above 0 and there are two texts or more, each part gets at least one.
    """
    distinct = list(dict.fromkeys(texts))
    random.Random(seed).shuffle(distinct)
    kept = min(len(distinct) - 1, max(1, round(share * len(distinct)))) if share > 0 else 0
    return distinct[kept:], distinct[:kept]


def perplexity(nll: Sequence[float], tokens: Sequence[int]) -> float:
    """Return exp of the mean nats per token over whole texts.

    Args:
        nll: mean nats per token of each text.
        tokens: number of tokens in each mean.
    """
    return math.exp(sum(n * t for n, t in zip(nll, tokens, strict=True)) / sum(tokens))


def frame(tokenizer: Any) -> tuple[int, int]:
    """Return the tokens that begin and end a text.

    Raises:
        PriorError: the tokenizer has no special token at all.
    """
    around = [getattr(tokenizer, f"{role}_token_id", None) for role in ("cls", "bos", "eos", "sep", "pad")]
    known = [int(token) for token in around if token is not None]
    if not known:
        raise PriorError("the tokenizer has no special token that could begin and end a text")
    start = next(int(token) for token in (*around[:2], *known) if token is not None)
    end = next(int(token) for token in (around[3] if around[0] is not None else around[2], *known) if token is not None)
    return start, end


def _config(tokenizer: Any, start: int, end: int) -> Any:
    return hf.GPT2Config(
        vocab_size=len(tokenizer), n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=LONGEST,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=start, eos_token_id=end,
    )  # fmt: skip


def _batches(rows: Sequence[list[int]], rng: random.Random) -> Iterator[Tensor]:
    """Yield batches (ROWS, T) of ids without end.

    Rows are padded on the right with -100. Texts of similar length share a batch.
    """
    order = list(range(len(rows)))
    while True:
        rng.shuffle(order)
        for some in range(0, len(order), 32 * ROWS):
            near = sorted(order[some : some + 32 * ROWS], key=lambda row: len(rows[row]))
            chunks = [near[at : at + ROWS] for at in range(0, len(near), ROWS)]
            rng.shuffle(chunks)
            for chunk in chunks:
                batch = [rows[row] for row in chunk]
                longest = max(map(len, batch))
                yield torch.tensor([row + [-100] * (longest - len(row)) for row in batch])
