"""Table of `rare-rows` and others on language models beyond the hidden size.

Run: `python -m tests.benchmarks.rare_rows_decoders --model FOLDER [...] --data FILE.jsonl --batch-sizes 16 64 [--short 15 --long 40]`.

A step is the gradient of one batch, dropout off, all parameters trained; nothing is granted. One row is printed for each model, batch size
and attack: tokens over the hidden size, share of sentences that are found exactly, ROUGE of all sentences, each with the guess that is
assigned to it, share of sentences found (ROUGE-L above a quarter), precision of the guesses, seconds a sentence. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from leakaudit.config.audit import PluginSpec
from leakaudit.models.loading import load_tokenizer
from tests.benchmarks.lm_clients import ROUGES, Client, attacked, cells, line, means, tokens_of
from tests.benchmarks.sentences import kept_rows, read_rows, write_rows

NUMBERS = ("exact", *ROUGES, "found", "precision")


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, nargs="+", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--attacks", nargs="+", default=["rare-rows"])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64])
    parser.add_argument("--batches", type=int, default=1)
    parser.add_argument("--short", type=int, default=2, help="fewest tokens of a sentence")
    parser.add_argument("--long", type=int, default=512, help="most tokens of a sentence")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds a batch")
    given = parser.parse_args(arguments)
    print(line(("model", "B", "n", "tokens / D", "attack", *NUMBERS, "seconds a sentence", "remark")))
    print(line(["---"] * (7 + len(NUMBERS))))
    with tempfile.TemporaryDirectory() as folder:
        for model in given.model:
            rows = kept_rows(read_rows(given.data), load_tokenizer(model), given.short, given.long)
            data = write_rows(Path(folder) / f"{model.name}.jsonl", rows)
            for size in given.batch_sizes:
                client = Client(model, data, size, given.batches, given.seed)
                for row in _rows(client, given.attacks, given.budget):
                    print(row, flush=True)


def _rows(client: Client, names: list[str], budget: float) -> Iterator[str]:
    simulator = client.simulator()
    snapshots = list(simulator)
    hidden = int(simulator.model.get_input_embeddings().weight.shape[1])  # type: ignore[operator]  # a method of every model
    load = fmean(tokens_of(snapshots)) / hidden
    for name in names:
        found = [
            attacked(each, simulator, PluginSpec(name=name), PluginSpec(name="none"), budget, {}) for each in snapshots
        ]
        seconds = sum(each.seconds for each in found) / (len(found) * client.batch_size)
        reasons = "; ".join(sorted({each.reason for each in found if each.reason}))
        numbers = cells(means(each.whole for each in found), NUMBERS)
        count = len(found) * client.batch_size
        yield line(
            (client.victim.name, client.batch_size, count, f"{load:.1f}", name, *numbers, f"{seconds:.0f}", reasons)
        )


if __name__ == "__main__":
    main()
