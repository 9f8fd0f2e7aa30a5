"""Table of bags of words: precision and recall, beside FILM's Table 4.

Run: `python -m tests.benchmarks.bags --model FOLDER --data FILE.jsonl`.

Each row is a defence on the same client steps of a causal language model: pruning as in FILM (Gupta et al. 2022, Table 4a), DP-SGD at noise
multipliers that Opacus' accountant gives for FILM's epsilons (Table 4b), and Laplace noise. Precision and recall are those of FILM
(Sec. 6.3): distinct tokens of a batch, mean over batches; precision over the batches where a token was named. Under noise, the last columns
apply FILM's own rule to the same updates: the largest entry of a row is above sigma sqrt(2 ln D). Nothing is granted. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from opacus.accountants.utils import get_noise_multiplier

from leakaudit.algorithms.bag.word_bag import can_read_bag, word_bag
from leakaudit.audit.simulation.texts import Simulator
from leakaudit.client.observation import Observation
from leakaudit.client.snapshot import Snapshot
from leakaudit.client.step import ClientStep
from leakaudit.config.simulation import Simulation
from leakaudit.defenses.dp_sgd import DpSgd
from leakaudit.defenses.laplace_noise import LaplaceNoise
from leakaudit.defenses.prune import Prune
from leakaudit.metrics.token_precision import bag_precision
from leakaudit.metrics.token_recall import bag_recall
from leakaudit.models.structure import word_embedding

SENTENCES, STEPS, DELTA = 203_456, 90_000, 1e-5
"""FILM's WikiText set and its iterations (Sec. 6.1). It does not state delta: our choice, below one over the number of sentences."""

PRUNED = {0.9: (1.0, 1.0), 0.99: (1.0, 1.0), 0.999: (1.0, 0.98), 0.9999: (1.0, 0.90)}
PRIVATE = {1: (0.0, 0.0), 5: (0.29, 0.01), 10: (0.88, 0.17), 15: (0.97, 0.49)}
"""Share, or epsilon -> precision and recall of FILM, Table 4."""

WEAK = (0.003, 0.01, 0.03, 0.1)
"""Noise multipliers far below those of the epsilons, where words begin to show."""

LAPLACE = (0.1, 1.0)


@dataclass(frozen=True)
class Row:
    """One defence of the table."""

    label: str
    defense: Any
    paper: str = "-"


def defences(batch_size: int) -> Iterator[Row]:
    """Yield the rows of the table."""
    yield Row("none", None, "1.00 / 1.00")
    for share, paper in PRUNED.items():
        yield Row(f"pruning {share}", Prune(share=share), _both(*paper))
    for epsilon, paper in PRIVATE.items():
        z = get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=DELTA,
            sample_rate=batch_size / SENTENCES,
            steps=STEPS,
            accountant="rdp",
        )
        yield Row(f"DP-SGD, epsilon {epsilon}, z = {z:.2f}", DpSgd(noise_multiplier=z), _both(*paper))
    for z in WEAK:
        yield Row(f"DP-SGD, z = {z}", DpSgd(noise_multiplier=z))
    for scale in LAPLACE:
        yield Row(f"Laplace noise, scale {scale}", LaplaceNoise(scale=scale))


def _both(precision: float, recall: float) -> str:
    return f"{precision:.2f} / {recall:.2f}"


def _film_rule(seen: Observation) -> list[int]:
    """Return the tokens that FILM's threshold names under noise."""
    rows = seen.update[str(word_embedding(seen.model))]
    return (
        (rows.abs().amax(dim=1) > seen.noise_sigma * math.sqrt(2 * math.log(rows.shape[1])))
        .nonzero()
        .flatten()
        .tolist()
    )


def _named(seen: Observation) -> list[int]:
    return word_bag(seen).tokens.tolist() if can_read_bag(seen) else []


def _scores(snapshots: list[Snapshot], bags: list[list[int]]) -> str:
    """Return the mean precision and recall of bags as a cell."""
    truths = [_words(snapshot) for snapshot in snapshots]
    recalls = [bag_recall(truth, bag) or 0.0 for truth, bag in zip(truths, bags, strict=True)]
    found = [bag_precision(truth, bag) for truth, bag in zip(truths, bags, strict=True)]
    known = [value for value in found if value is not None]
    return f"{f'{fmean(known):.2f}' if known else 'none named'} / {fmean(recalls):.2f}"


def _words(snapshot: Snapshot) -> list[int]:
    around = snapshot.observation.facts.vocabulary.wordless_ids
    return [token for ids in snapshot.truth.sequences() for token in ids if token not in around]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    what = Simulation(
        model=options.model,
        data=options.data,
        task="causal-lm",
        batch_size=options.batch_size,
        steps=options.steps,
        seed=options.seed,
    )
    snapshots = list(Simulator(what))
    print("| defence | precision / recall | FILM, Table 4 | FILM's rule on these updates |\n| --- | --- | --- | --- |")
    for row in defences(options.batch_size):
        rng = torch.Generator().manual_seed(options.seed)
        seen = [
            snapshot.observation
            if row.defense is None
            else row.defense(ClientStep.of(snapshot), snapshot.observation, rng)
            for snapshot in snapshots
        ]
        ours = _scores(snapshots, [_named(each) for each in seen])
        theirs = _scores(snapshots, [_film_rule(each) for each in seen]) if seen[0].noise_sigma else "-"
        print(f"| {row.label} | {ours} | {row.paper} | {theirs} |", flush=True)


if __name__ == "__main__":
    main()
