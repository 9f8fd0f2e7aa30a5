"""Table of `update-difference` on clients with adapters, AdamW and ten steps.

Run: `python -m tests.benchmarks.federated_clients --model FOLDER --data FILE.jsonl [...]`; FOLDER holds a causal language model, such as one
that `tests.benchmarks.decoders` trains. Not collected by pytest.

A row is a setting of the client, with the update and without it (`evidence=false`: the same search for texts that the model before the update
finds likely). Words are the distinct tokens of all guesses: precision is the share of them that the client trained on, recall the share of
the client's distinct tokens that were guessed. Best ROUGE-L is that of the best pair of a guess and a text, mean over the rounds. Nothing
is granted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rouge_score.rouge_scorer import RougeScorer

from leakaudit.attacks.update_difference import UpdateDifference
from leakaudit.audit.simulation.texts import Simulator
from leakaudit.client.snapshot import Snapshot
from leakaudit.config.simulation import Simulation
from leakaudit.plugins.budget import Budget

RATES, WARMUPS, RANK, STEPS, BATCH = (5e-4, 5e-5), (0, 3), 32, 10, 16
BUDGET = 60.0
"""Seconds for one guess."""


@dataclass(frozen=True)
class Found:
    """What the guesses of one round share with the client's texts."""

    precision: float
    recall: float
    exact: int
    rouge: float

    @classmethod
    def of(cls, guesses: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], tokenizer: Any) -> Found:
        """Compare token ids without special tokens."""
        named, true = ({token for text in side for token in text} for side in (guesses, texts))
        measure = RougeScorer(["rougeL"])
        shown, own = ([tokenizer.decode(list(text)) for text in side] for side in (guesses, texts))
        best = max((measure.score(text, guess)["rougeL"].fmeasure for guess in shown for text in own), default=0.0)
        exact = len(set(map(tuple, guesses)) & set(map(tuple, texts)))
        return cls(len(named & true) / max(1, len(named)), len(named & true) / len(true), exact, best)


def compared(snapshot: Snapshot, attack: UpdateDifference, tokenizer: Any) -> tuple[Found, int]:
    """Attack one round; return what was found, and the number of guesses."""
    seen = snapshot.observation
    around = seen.facts.vocabulary.wordless_ids
    guess = attack(seen, torch.Generator().manual_seed(0), Budget(BUDGET)).sequences or ()
    guesses = [[token for token in one.token_ids if token not in around] for one in guess]
    texts = [[token for token in ids if token not in around] for ids in snapshot.truth.sequences()]
    return Found.of(guesses, texts, tokenizer), len(guesses)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a causal language model")
    parser.add_argument("--data", type=Path, nargs="+", default=[Path("examples/data/clinic_notes.jsonl")])
    parser.add_argument("--rounds", type=int, default=2, help="rounds a row")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{options.model.name}; AdamW, {STEPS} local steps of {BATCH} texts, adapters of rank {RANK}; seed {options.seed}"
    )
    print(f"nothing granted; n = client rounds of {STEPS * BATCH} texts each\n")
    print(
        "| data | learning rate | warm-up rounds | update used | n | guesses | word precision | word recall | exact | best ROUGE-L | s |"
    )
    print("| --- " * 11 + "|")
    for data, warmup, rate in product(options.data, WARMUPS, options.rates):
        simulator = Simulator(
            Simulation(
                model=options.model,
                data=data,
                task="causal-lm",
                batch_size=BATCH,
                steps=options.rounds,
                seed=options.seed,
                optimizer="adamw",
                learning_rate=rate,
                local_steps=STEPS,
                lora_rank=RANK,
                lora_warmup=warmup,
            )
        )
        rounds = list(simulator)
        for evidence in (True, False):
            start = time.perf_counter()
            results = [compared(each, UpdateDifference(evidence=evidence), simulator.tokenizer) for each in rounds]
            seconds = (time.perf_counter() - start) / len(results)
            found = [one for one, _ in results]
            print(
                f"| {data.parent.name} {data.stem} | {rate:g} | {warmup} | {'yes' if evidence else 'no'} | {len(found)} "
                f"| {sum(count for _, count in results)} | {100 * fmean(f.precision for f in found):.0f} % "
                f"| {100 * fmean(f.recall for f in found):.1f} % | {sum(f.exact for f in found)} "
                f"| {100 * fmean(f.rouge for f in found):.0f} % | {seconds:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
