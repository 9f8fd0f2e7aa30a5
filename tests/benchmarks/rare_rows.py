"""Table of `rare-rows` on an encoder with more tokens than its hidden size.

Run: `python -m tests.benchmarks.rare_rows --data FILE.jsonl --sizes 64 [--modes eval train]`.

Prints one table row per batch size and mode: tokens of a batch over the hidden size, sentences proved and exact, mean ROUGE-L,
words that occur once, and seconds a sentence, with n and seeds. Everything is trained and nothing is granted. Not collected by
pytest.
"""

from __future__ import annotations

import time
from statistics import fmean
from typing import NamedTuple

import torch
from transformers import AutoConfig

from leakaudit.attacks.rare_rows import RareRows
from leakaudit.audit.scoring.score import score
from leakaudit.audit.simulation.texts import Simulator
from leakaudit.client.snapshot import Snapshot
from leakaudit.config.simulation import Simulation
from leakaudit.plugins.budget import Budget
from tests.benchmarks.span import arguments

MIN_TOKENS = 6
"""Tokens of a sentence event, as audits have it; the figures here do not depend on it."""


class Row(NamedTuple):
    """Figures of one batch."""

    tokens: int
    sentences: int
    exact: float
    rouge: float
    proved: int
    wrong_proofs: int
    once: float
    seconds: float


def measure(simulator: Simulator, snapshot: Snapshot, seconds: float) -> Row:
    """Attack one step and score it.

    Args:
        simulator: made the step.
        snapshot: the step.
        seconds: time for each sentence.
    """
    truth = [tuple(ids) for ids in snapshot.truth.sequences()]
    begun = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    guess = RareRows()(snapshot.observation, generator, Budget(seconds * len(truth)))
    took = time.perf_counter() - begun
    special = snapshot.observation.facts.vocabulary.special_ids
    scores = score(guess, truth, None, None, simulator.tokenizer, special, MIN_TOKENS).scores
    found = [one.token_ids for one in guess.sequences or () if one.proved]
    return Row(
        tokens=sum(map(len, truth)),
        sentences=len(truth),
        exact=_value(scores["exact"]),
        rouge=_value(scores["rougeL"]),
        proved=len(found),
        wrong_proofs=sum(ids not in truth for ids in found),
        once=guess.diagnostics["rare_words"] / guess.diagnostics["words"],
        seconds=took / len(truth),
    )


def _value(measured: object) -> float:
    value = getattr(measured, "value", measured)
    return float(value) if isinstance(value, int | float) else float("nan")


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__.splitlines()[0], sentences=None)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128], help="batch sizes")
    parser.add_argument("--modes", nargs="+", default=["eval"], help="train: dropout on")
    parser.add_argument("--seconds", type=float, default=60.0, help="budget of a sentence")
    options = parser.parse_args()
    hidden = AutoConfig.from_pretrained(options.model, local_files_only=True, trust_remote_code=False).hidden_size
    print(f"{options.data.name}, one batch a seed, seeds {options.seeds}, everything trained, nothing granted")
    print("| mode | B | n | tokens / D | exact | R-L | proved | wrong proofs | words that occur once | s a sentence |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for mode in options.modes:
        for size in options.sizes:
            rows = []
            for seed in options.seeds:
                what = Simulation(
                    model=options.model, data=options.data, batch_size=size, steps=1, seed=seed, mode=mode
                )
                simulator = Simulator(what)
                rows.append(measure(simulator, simulator.snapshot(0), options.seconds))
            print(
                f"| {mode} | {size} | {sum(row.sentences for row in rows)} "
                f"| {fmean(row.tokens for row in rows) / hidden:.2f} | {100 * fmean(row.exact for row in rows):.1f} "
                f"| {100 * fmean(row.rouge for row in rows):.1f} | {sum(row.proved for row in rows)} "
                f"| {sum(row.wrong_proofs for row in rows)} | {100 * fmean(row.once for row in rows):.0f} % "
                f"| {fmean(row.seconds for row in rows):.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
