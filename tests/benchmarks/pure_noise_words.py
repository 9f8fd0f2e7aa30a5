"""Words that `embedding-rows` names in pure noise, by what was done to the noise.

    python -m tests.benchmarks.pure_noise_words --draws 15

A draw replaces the update of a word embedding (V = 30,522 rows, D = 384 entries; those of MiniLM) by declared noise, which is then quantised,
pruned, reduced to signs or rounded as declared. Every word that is named is wrong. The attack states that it names a word in one table of 100.
Prints a Markdown table; not collected by pytest.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from transformers import BertConfig, BertForSequenceClassification

from leakaudit.attacks.embedding_rows import EmbeddingRows
from leakaudit.plugins import Budget, Defense
from leakaudit.registry import defenses
from leakaudit.results import bounds
from tests.house import test_pure_noise as noise
from tests.support import tiny

ROWS, ENTRIES = 30_522, 384

AFTERWARDS: dict[str, Defense | None] = {
    "nothing": None,
    **{f"quantize(bits={bits})": defenses["quantize"](bits=bits) for bits in (2, 3, 4, 8)},
    **{f"prune(share={share})": defenses["prune"](share=share) for share in (0.9, 0.99, 0.999)},
    "prune(share=0.9,choose=random)": defenses["prune"](share=0.9, choose="random"),
    "sign": defenses["sign"](),
    "round(dtype=bf16)": defenses["round"](dtype="bf16"),
}
"""What is done to the noise -> the defence that does it."""


def main() -> None:
    """Print one row for each kind of noise and each defence after it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=15)
    parser.add_argument("--noises", nargs="+", choices=list(noise.NOISES), default=list(noise.NOISES))
    parser.add_argument("--after", nargs="+", choices=list(AFTERWARDS), default=list(AFTERWARDS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    config = BertConfig(vocab_size=ROWS, hidden_size=ENTRIES, num_hidden_layers=1, num_attention_heads=1)
    model = BertForSequenceClassification(config)
    step = tiny.client_step(model, tiny.bert_tokenizer(), ["a dog"], [1])
    name = tiny.word_table(model)
    seen = step.observe()
    seen = replace(seen, update={name: seen.update[name]})
    print("| noise | then | draws n | draws with a word | words | share of draws at most (95 %) |")
    print("| --- | --- | --- | --- | --- | --- |")
    for kind in options.noises:
        for then in options.after:
            rng, words = torch.Generator().manual_seed(options.seed), []
            for _ in range(options.draws):
                noisy, after = noise.pure_noise(seen, kind, 1.0, rng), AFTERWARDS[then]
                sent = noisy if after is None else after(step, noisy, rng)
                words.append(len(EmbeddingRows()(sent, rng, Budget(600)).tokens or ()))
            wrong = sum(number > 0 for number in words)
            most = bounds.upper_bound(wrong, options.draws)
            print(f"| {kind} | {then} | {options.draws} | {wrong} | {sum(words)} | {most:.3f} |", flush=True)


if __name__ == "__main__":
    main()
