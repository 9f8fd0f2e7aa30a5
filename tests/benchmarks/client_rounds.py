"""What an audit of rounds costs a client: the same rounds with and without it.

    python -m tests.benchmarks.client_rounds --rounds 10 --steps 10 --batch 16
    python -m tests.benchmarks.client_rounds --model FOLDER --rounds 10 --steps 10 --batch 16 --schedule deferred

Each round has a new Trainer, model and callback, as in a client of federated learning. It prints the seconds of each `train()` in both
cases, their medians, and what the audit itself counted. Rounds with and without take turns, so that both see the same load.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import AutoModelForSequenceClassification, AutoTokenizer

from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.callbacks.rounds import finish
from leakaudit.capture.rounds.registry import audit_in
from leakaudit.models.loading import NOTHING_FOREIGN
from leakaudit.results.schema import Overhead
from leakaudit.storage.rounds_file import read_rounds
from tests.support import tiny, tiny_trainer


def loaded(folder: str | None) -> tuple[Any, Any]:
    """Return a new model and its tokenizer; the tiny BERT without a folder."""
    if folder is None:
        return tiny.bert(), tiny.bert_tokenizer()
    return (
        AutoModelForSequenceClassification.from_pretrained(folder, **NOTHING_FOREIGN),
        AutoTokenizer.from_pretrained(folder, **NOTHING_FOREIGN),
    )


def seconds_of_round(place: Path, asked: argparse.Namespace, *, audited: bool) -> float:
    """Train one round; return the seconds of `train()`."""
    model, tokenizer = loaded(asked.model)
    rows = tiny_trainer.Rows(tokenizer)
    rows.rows *= 1 + asked.steps * asked.batch // len(rows.rows)
    config = tiny_trainer.audit_config(place, unit="round", schedule=asked.schedule, at_end="leave", nice=10)
    callbacks = [LeakAuditCallback(config)] if audited else []
    trainer = tiny_trainer.make_trainer(
        place, *callbacks, model=model, tokenizer=tokenizer, rows=rows, optim="adamw_torch", learning_rate=5e-5,
        per_device_train_batch_size=asked.batch, max_steps=asked.steps,
    )  # fmt: skip
    for callback in callbacks:
        callback.attach(trainer)
    start = time.perf_counter()
    trainer.train()
    return time.perf_counter() - start


def overhead_so_far(folder: Path) -> Overhead:
    """Return what the rounds so far cost, when they are on the disk."""
    audit = audit_in(folder)
    assert audit is not None and audit.tasks.wait(60)
    return read_rounds(audit.spool.root).totals.overhead


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--schedule", default="beside")
    for name, default in (("rounds", 10), ("steps", 10), ("batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        seconds_of_round(Path(folder) / "first", asked, audited=False)  # imports, caches
        first = Overhead()
        for number in range(asked.rounds):
            for audited in (False, True):
                seconds[audited].append(seconds_of_round(Path(folder), asked, audited=audited))
            if number == 0:
                first = overhead_so_far(Path(folder) / "audit")
        start = time.perf_counter()
        spool = Path(folder) / "audit" / "spool"
        finish()
        print(f"finish: {time.perf_counter() - start:.2f} s")
        for audited, found in seconds.items():
            print("with   " if audited else "without", " ".join(f"{one:.3f}" for one in found))
        plain, watched = statistics.median(seconds[False]), statistics.median(seconds[True])
        print(f"median: {plain:.3f} s without, {watched:.3f} s with, {watched - plain:+.3f} s a round")
        cost = read_rounds(spool).totals.overhead
        held = cost.blocked_s - first.blocked_s
        share = held / ((cost.training_s or 1.0) - (first.training_s or 0.0))
        print(
            f"held up: {first.blocked_s:.2f} s in the first round (imports), then {held / (asked.rounds - 1):.3f} s a round ({share:.1%}); "
            f"{cost.memory_mb:.1f} MB held"
        )


if __name__ == "__main__":
    main()
