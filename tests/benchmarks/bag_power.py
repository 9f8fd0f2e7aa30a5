"""Recall and precision of `embedding-rows` under small noise.

    python -m tests.benchmarks.bag_power --victim FOLDER --data dev.jsonl --batches 6

The same steps of a causal language model behind each noise; `scale` is the noise's standard deviation in units of the update's root mean square. The
column "wrong" counts words of no text of the batch. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean

import torch

from leakaudit.models.loading import NOTHING_FOREIGN, load_tokenizer
from leakaudit.plugins import Budget
from leakaudit.registry import attacks, defenses
from tests.benchmarks.pure_noise_words import line
from tests.support import tiny


def main() -> None:
    """Print one row for each noise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--victim", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="JSONL with text")
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--noises", nargs="+", default=["gaussian-noise", "laplace-noise"])
    parser.add_argument("--scales", type=float, nargs="+", default=[0.0, 0.03, 0.1, 0.3, 1.0])
    parser.add_argument("--tokens", type=int, default=40, help="tokens of a text at most")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    model = tiny.hf.AutoModelForCausalLM.from_pretrained(options.victim, **NOTHING_FOREIGN).eval()
    tokenizer = load_tokenizer(options.victim)
    with options.data.open(encoding="utf-8") as lines:
        texts = [
            json.loads(row)["text"] for _, row in zip(range(options.batches * options.batch_size), lines, strict=False)
        ]
    texts = [tokenizer.decode(tokenizer(text)["input_ids"][: options.tokens]) for text in texts]
    found: dict[tuple[str, float], list[tuple[int, int, int]]] = {}
    for start in range(0, len(texts), options.batch_size):
        step = tiny.client_step(model, tokenizer, texts[start : start + options.batch_size], task="causal-lm")
        seen = step.observe()
        true = {token for ids in step.truth.sequences() for token in ids}
        for noise in options.noises:
            for scale in options.scales:
                rng = torch.Generator().manual_seed(options.seed)
                sent = defenses[noise](scale=scale)(step, seen, rng)
                sent.memo.update(seen.memo)
                named = set(attacks["embedding-rows"]()(sent, rng, Budget(600)).tokens or ())
                seen.memo.update({key: made for key, made in sent.memo.items() if key == "features"})
                found.setdefault((noise, scale), []).append((len(named & true), len(true), len(named - true)))
    heads = ["noise", "scale", "batches n", "recall", "words named", "wrong"]
    print(
        f"seeds [{options.seed}]; {options.batch_size} texts a batch.\n",
        line(heads),
        line(["---"] * len(heads)),
        sep="\n",
    )
    for (noise, scale), counts in found.items():
        recall, words = fmean(right / of for right, of, _ in counts), sum(right + wrong for right, _, wrong in counts)
        print(line([noise, scale, len(counts), f"{recall:.3f}", words, sum(wrong for *_, wrong in counts)]))


if __name__ == "__main__":
    main()
