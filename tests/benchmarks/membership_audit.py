"""Table of what whole audits say of who was in a step, by seed.

    python -m tests.benchmarks.membership_audit --data dev.jsonl --seeds 1 2 3

The rows of the data are divided: some are held back as texts of no step, the others are the training data of `leakaudit simulate`. The client has the
encoder of the demo as a classifier with a new head, and adapters on query and value of rank 8 after one round of training; it takes ten steps of AdamW
at a learning rate of 5e-4. Granted: what the audit grants. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from click.testing import CliRunner

from leakaudit.cli import main as leakaudit
from leakaudit.results.files import load_results
from leakaudit.results.membership import Membership, broken, too_many_false
from tests.benchmarks.membership import demo_encoder

DIVISION = 7
"""Seed of the division of the rows. Our choice: any."""


def audited(options: argparse.Namespace, seed: int, folder: Path) -> Membership:
    """Return what one audit says."""
    rows = options.data.read_text(encoding="utf-8").splitlines(keepends=True)
    random.Random(DIVISION).shuffle(rows)
    held, inside = folder / "held.jsonl", folder / "in.jsonl"
    held.write_text("".join(rows[: options.held_back]), encoding="utf-8")
    inside.write_text("".join(rows[options.held_back :]), encoding="utf-8")
    client = ["--local-steps", 10, "--optimizer", "adamw", "--learning-rate", 5e-4, "--batch-size", options.batch_size]
    adapters = ["--lora-rank", 8, "--lora-targets", "query,value", "--lora-warmup", 1]
    battery = ["--attacks", "embedding-rows", "--controls", 0, "--text", "hash", "--steps", options.steps]
    source = [
        "--model",
        demo_encoder(),
        "--data",
        inside,
        "--nonmembers",
        held,
        "--seed",
        seed,
        "--out",
        folder / "out",
    ]
    arguments = ["simulate", *map(str, [*source, *client, *adapters, *battery])]
    done = CliRunner().invoke(leakaudit, arguments, catch_exceptions=False)
    found = load_results(folder / "out").membership if done.exit_code == 0 else None
    if found is None:
        raise SystemExit(done.stderr or "no step could be tested")
    return found


def lines(options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the table."""
    yield (
        "| seed | steps | named at 1 % | of no step | model alone | update without them | AUC | base AUC | null AUC | epsilon of one step at least | "
        "decided | CPU s a step |"
    )
    yield "|" + " --- |" * 12
    for seed in options.seeds:
        started = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            found = audited(options, seed, Path(folder))
        seconds = (time.process_time() - started) / len(found.steps)
        point = found.at(0.01)
        if point is None:
            raise SystemExit("too few calibration texts")
        bounds = found.bounds_at(point)
        cells = [
            str(seed),
            str(len(found.steps)),
            f"{point.found} of {found.members} ({bounds.lower:.2f} to {bounds.upper:.2f})",
            f"{point.false} of {found.nonmembers}",
            str(point.base),
            f"{point.null} of {found.null_candidates}",
            f"{found.auc:.2f}",
            f"{found.base_auc:.2f}",
            f"{found.null_auc or 0.0:.2f}",
            f"{found.epsilon_lower():.1f}",
            "no" if broken(found, point) or too_many_false(found, point) else "yes",
            f"{seconds:.0f}",
        ]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--held-back", type=int, default=500)
    options = parser.parse_args()
    for line in lines(options):
        print(line, flush=True)


if __name__ == "__main__":
    main()
