"""Words that attacks name in pure noise, by what was done to the noise.

    python -m tests.benchmarks.pure_noise_words --draws 15

A draw replaces the updates of the word embedding and of the head over the vocabulary by declared noise, which is then quantised, pruned, reduced to
signs or rounded as declared. So every word that is named is wrong. The attacks state that they name a word in one update of 100. The models are a
GPT-2 whose head is tied to the word embedding, one whose head is not, and a BERT classifier. Their weights are random; a few features are
large and predictions are peaked, as in trained models.

A cell that looks high is measured again with more draws: `--only CLIENT/NOISE/THEN/ATTACK ... --draws 600`. The last column is the probability of so many
draws with a word, or more, if the stated rate is right (exact binomial test). Prints a Markdown table; not collected by pytest.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from scipy.stats import binom
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from leakaudit.client.observation import Observation
from leakaudit.client.step import ClientStep
from leakaudit.models.structure import word_embedding
from leakaudit.plugins import Budget, Defense
from leakaudit.registry import attacks, defenses
from leakaudit.results import bounds
from tests.house import test_pure_noise as noise
from tests.support import tiny

PEAKED, LARGE = 0.2, 10.0
"""Standard deviation of the models' weights, and the factor of the three largest features."""

PRUNES = {share: defenses["prune"](share=share) for share in (0.9, 0.99, 0.999)}
QUANTIZES = {bits: defenses["quantize"](bits=bits) for bits in (2, 3, 4, 8)}

STACKS: dict[str, tuple[Defense, ...]] = {
    "nothing": (),
    **{f"quantize {bits}": (made,) for bits, made in QUANTIZES.items()},
    **{f"prune {share}": (made,) for share, made in PRUNES.items()},
    "prune 0.9 random": (defenses["prune"](share=0.9, choose="random"),),
    "sign": (defenses["sign"](),),
    "round bf16": (defenses["round"](dtype="bf16"),),
    "prune 0.99, quantize 2": (PRUNES[0.99], QUANTIZES[2]),
    "prune 0.9, sign": (PRUNES[0.9], defenses["sign"]()),
    "quantize 2, prune 0.9 random": (QUANTIZES[2], defenses["prune"](share=0.9, choose="random")),
    "quantize 3, prune 0.9": (QUANTIZES[3], PRUNES[0.9]),
}
"""What is done to the noise -> the defences that do it, in order."""

CLIENTS: dict[str, tuple[str, ...]] = {
    "tied": ("embedding-rows", "target-tokens"),
    "untied": ("embedding-rows", "target-tokens"),
    "encoder": ("embedding-rows",),
}
"""Kind of client -> the attacks that name words of it."""


def client(kind: str, rows: int, entries: int) -> tuple[ClientStep, Observation]:
    """Return the step of a client, and what is seen of its tables' updates (V, D)."""
    torch.manual_seed(0)
    size: dict[str, Any] = {
        "vocab_size": rows,
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": PEAKED / (entries / 64) ** 0.5,
    }
    model: nn.Module
    if kind == "encoder":
        size |= {"hidden_size": entries, "num_hidden_layers": 1, "num_attention_heads": 1}
        model = BertForSequenceClassification(BertConfig(**size, intermediate_size=2 * entries)).eval()
        step = tiny.client_step(model, tiny.bert_tokenizer(), ["a dog"], [1])
    else:
        size |= {"n_embd": entries, "n_layer": 1, "n_head": 1, "n_positions": 24, "tie_word_embeddings": kind == "tied"}
        decoder = GPT2LMHeadModel(GPT2Config(**size)).eval()
        with torch.no_grad():
            decoder.transformer.ln_f.weight[:3] *= LARGE
            decoder.transformer.ln_f.bias += 0.1
        model = decoder
        step = tiny.client_step(model, tiny.gpt2_tokenizer(), ["a dog"], task="causal-lm")
    seen = step.observe()
    vocabulary = seen.facts.vocabulary.model_copy(update={"size": rows})
    tables = {name: update for name, update in seen.update.items() if update.shape == (rows, entries)}
    assert word_embedding(model) in tables
    return step, replace(seen, update=tables, facts=seen.facts.model_copy(update={"vocabulary": vocabulary}))


def draws_of(
    step: ClientStep, seen: Observation, kind: str, then: str, rng: torch.Generator, strength: float = 1.0
) -> Iterator[Observation]:
    """Yield what is seen of pure noise under a stack, without end."""
    while True:
        sent = noise.pure_noise(seen, kind, strength, rng)
        for defense in STACKS[then]:
            sent = defense(step, sent, rng)
        sent.memo.update(seen.memo)  # the public model's own texts are the same in each draw
        yield sent


def line(cells: Iterable[object]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Print one row for each client, kind of noise, stack and attack."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=15)
    parser.add_argument("--clients", nargs="+", choices=list(CLIENTS), default=list(CLIENTS))
    parser.add_argument("--noises", nargs="+", choices=list(noise.NOISES), default=list(noise.NOISES))
    parser.add_argument("--then", nargs="+", choices=list(STACKS), default=list(STACKS))
    parser.add_argument("--only", nargs="+", default=[], help="cells, each CLIENT/NOISE/THEN/ATTACK")
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--entries", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"Tables of {options.rows:,} rows of {options.entries} entries; seed {options.seed}.\n")
    heads = [
        "client",
        "noise",
        "then",
        "attack",
        "n",
        "draws with a word",
        "words",
        "rate at most (95 %)",
        "p if stated",
        "s",
    ]
    print(line(heads), line(["---"] * len(heads)), sep="\n")
    for what in options.clients:
        step, seen = client(what, options.rows, options.entries)
        for kind in options.noises:
            for then in options.then:
                for name in CLIENTS[what]:
                    cell = f"{what}/{kind}/{then}/{name}"
                    if options.only and cell not in options.only:
                        continue
                    rng = torch.Generator().manual_seed(100 * options.seed + list(noise.NOISES).index(kind))
                    start, words = time.perf_counter(), []
                    drawn = draws_of(step, seen, kind, then, rng)
                    for _ in range(options.draws):
                        sent = next(drawn)
                        if not attacks[name]().applies(sent):
                            continue
                        words.append(len(attacks[name]()(sent, rng, Budget(600)).tokens or ()))
                        seen.memo.update(sent.memo)
                    n, wrong, rate = len(words), sum(number > 0 for number in words), attacks[name].false_event_rate
                    tail = f"{binom.sf(wrong - 1, n, rate):.3g}" if n else "-"
                    most = f"{bounds.upper_bound(wrong, n):.3f}" if n else "not applicable"
                    took = f"{time.perf_counter() - start:.0f}"
                    print(line([what, kind, then, name, n, wrong, sum(words), most, tail, took]), flush=True)


if __name__ == "__main__":
    main()
