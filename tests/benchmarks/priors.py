"""How well priors know texts.

Run `python -m tests.benchmarks.priors --tokenizer FOLDER --prior ngram [--prior FILE ...] --data FILE.jsonl [...]`.

Prints one table row for each prior and file: perplexity a token, the share of texts that the prior likes better than the same text
with two of its words exchanged and with all of them shuffled (texts of which that leaves something else), and milliseconds for 200
candidates of one text, the lowest of three. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path

from leakaudit.algorithms.language_models.training import perplexity
from leakaudit.models.loading import load_tokenizer
from leakaudit.plugins.prior_loading import load_prior, read_texts
from leakaudit.plugins.prior_protocol import Scorer, tokenizer_vocabulary

CANDIDATES = 200
"""Of one text in one round of LAMP, Algorithm 1."""


def exchanged(ids: Sequence[int], rng: random.Random) -> list[int]:
    """Return a text with two of its tokens in each other's place."""
    one, other = rng.sample(range(len(ids)), 2)
    changed = list(ids)
    changed[one], changed[other] = ids[other], ids[one]
    return changed


def preferred(scorer: Scorer, texts: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> tuple[float, int]:
    """Return the share of texts that score better than their alternatives.

    And the number of texts whose alternatives differ.
    """
    pairs = [(text, other) for text, other in zip(texts, others, strict=True) if list(text) != list(other)]
    right, wrong = (scorer.nll([pair[side] for pair in pairs]) for side in (0, 1))
    return sum(a < b for a, b in zip(right, wrong, strict=True)) / len(pairs), len(pairs)


def milliseconds(scorer: Scorer, ids: Sequence[int]) -> float:
    """Return how long 200 candidates of one text take."""
    rng = random.Random(0)
    candidates = [exchanged(ids, rng) for _ in range(CANDIDATES)]
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        scorer.nll(candidates)
        taken.append(time.perf_counter() - began)
    return 1000 * min(taken)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--prior", action="append", required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    given = parser.parse_args()
    tokenizer = load_tokenizer(given.tokenizer)
    print(
        "| prior | texts | n | perplexity | prefers it to two words exchanged % | to all shuffled % | ms for 200 candidates |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for what in given.prior:
        scorer = load_prior(what, vocabulary=tokenizer_vocabulary(tokenizer))
        for path in given.data:
            texts = [ids for ids in tokenizer(read_texts(path), add_special_tokens=False)["input_ids"] if len(ids) > 1]
            rng = random.Random(0)
            over_all = perplexity(scorer.nll(texts), [len(ids) + 1 for ids in texts])
            swap, _ = preferred(scorer, texts, [exchanged(ids, rng) for ids in texts])
            shuffle, _ = preferred(scorer, texts, [rng.sample(ids, len(ids)) for ids in texts])
            longest = max(texts, key=lambda ids: (len(ids) <= 16, len(ids)))
            name = f"{path.parent.name}/{path.stem}"
            cells = (Path(what).name, name, len(texts), f"{over_all:.0f}", f"{100 * swap:.1f}", f"{100 * shuffle:.1f}")
            print("|", " | ".join(map(str, cells)), f"| {milliseconds(scorer, longest):.0f} |", flush=True)


if __name__ == "__main__":
    main()
