"""How much longer a training step takes with a defence (`defense`).

    python -m tests.benchmarks.training_defense                  # an encoder of 22M parameters, B = 8, T = 64, AdamW
    python -m tests.benchmarks.training_defense --pairs 20 --defenses "gaussian-noise(scale=0.1)" sign

Random weights in the shape of MiniLM-L6-H384, no audit. Each defended step is compared with the undefended one right before it, because a
shared machine makes seconds say little; the seconds of the processor are given as well.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence

from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.context import OFF_SWITCH
from leakaudit.registry import defenses
from tests.benchmarks.capture import SIZES, setup, steps_of


def ratios(size: str, device: str, defense: str, pairs: int) -> tuple[list[float], list[float]]:
    """Return how many times as long as a plain step each defended step took.

    The first list is by the clock, the second in seconds of the processor.
    """
    model, optimizer, batch, tokenizer = setup(size, device)
    steps_of(model, optimizer, batch, 2)
    clock, processor = [], []
    for _ in range(pairs):
        (plain,) = steps_of(model, optimizer, batch, 1)
        with watch(model, optimizer, tokenizer=tokenizer, defense=defense):
            (defended,) = steps_of(model, optimizer, batch, 1)
        clock.append(defended.seconds / plain.seconds)
        processor.append(defended.processor / plain.processor)
    return clock, processor


def row(size: str, defense: str, found: tuple[list[float], list[float]]) -> str:
    """Return a row of the table: medians, and the range of the clock."""
    clock, processor = found
    spread = f"{min(clock):.2f} to {max(clock):.2f}"
    return f"| {size} | `{defense}` | {len(clock)} | {statistics.median(clock):.2f} ({spread}) | {statistics.median(processor):.2f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one row for each size and defence."""
    every = ["none", *(name for name, kind in defenses if kind().on_update), "freeze-embeddings"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["22M"])
    parser.add_argument("--defenses", nargs="+", default=every)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    os.environ[OFF_SWITCH] = "1"
    print(
        "| parameters | defence | n | a defended step / a step | the same in processor seconds |\n| --- | --- | --- | --- | --- |"
    )
    for size in options.sizes:
        for defense in options.defenses:
            print(row(size, defense, ratios(size, options.device, defense, options.pairs)), flush=True)


if __name__ == "__main__":
    main()
