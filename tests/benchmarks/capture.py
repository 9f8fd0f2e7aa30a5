"""What an audit costs the training that it watches.

    python -m tests.benchmarks.capture                   # encoders of 22M and 110M parameters, B = 8, T = 64
    python -m tests.benchmarks.capture --sizes 22M --device cuda

Encoders with random weights and the shapes of MiniLM-L6-H384 and BERT-base, AdamW, float32. Steps without an audit are
timed first; then every fifth step is kept, and what its training thread spent in the audit is counted where it is spent. What a
step that is not kept costs is far below what timing whole steps can show, so its hooks are timed by themselves, ten thousand times.
Nothing is attacked.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from leakaudit.callbacks.torch_loop import Watch, watch
from tests import tiny

SHAPES = {
    "22M": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "110M": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}
BATCH, TOKENS = 8, 64
EVERY, KEPT = 5, 4


def encoder(size: str, device: str) -> Any:
    """Return a classifier of that size in training mode."""
    config = tiny.hf.BertConfig(num_labels=4, vocab_size=30522, **SHAPES[size])
    torch.manual_seed(0)
    return tiny.hf.BertForSequenceClassification(config).train().to(device)


def seconds_per_step(model: Any, optimizer: Any, batch: Any, steps: int) -> list[float]:
    """Train and return how long each step took."""
    taken = []
    for _ in range(steps):
        _wait(batch)
        start = time.perf_counter()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _wait(batch)
        taken.append(time.perf_counter() - start)
    return taken


def _wait(batch: Any) -> None:
    if batch["input_ids"].is_cuda:
        torch.cuda.synchronize()


class Timed:
    """Counts the seconds of the writer and takes what it wrote out of the spool, as a fast worker would."""

    def __init__(self, watched: Watch) -> None:
        run = watched._run
        assert run is not None
        self.seconds: list[float] = []
        real, spool = run.recorder._write, run.spool

        def write(kept: Any) -> None:
            start = time.perf_counter()
            real(kept)
            self.seconds.append(time.perf_counter() - start)
            claimed = spool.claim()
            if claimed is not None:
                spool.release(claimed, keep=False)

        run.recorder._write = write


def unkept(watched: Watch, times: int = 10_000) -> float:
    """Return the seconds that the hooks of one step take that is not due."""
    run = watched._run
    assert run is not None
    run.plan = replace(run.plan, every=10**9)
    watched._steps = 1
    start = time.perf_counter()
    for _ in range(times):
        run.recorder._before_step(None, (), {})
        run.recorder._after_step(None, (), {})
        watched._stepped()
    return (time.perf_counter() - start) / times


def measure(size: str, device: str) -> str:
    """Return one line of the table."""
    model = encoder(size, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(5, 40, (BATCH, TOKENS), device=device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(BATCH, device=device) % 4}
    seconds_per_step(model, optimizer, batch, 2)
    alone = statistics.median(seconds_per_step(model, optimizer, batch, EVERY * 2))
    with tempfile.TemporaryDirectory() as folder:
        # Deferred and left to others: no side process is started, so nothing but the capture is measured.
        config = {
            "out_dir": Path(folder) / "audit", "every_n_steps": EVERY, "first_step": 1, "max_snapshots": KEPT,
            "schedule": "deferred", "at_end": "leave",
        }  # fmt: skip
        watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=config)
        with watched:
            timed = Timed(watched)
            run: Any = watched._run
            blocked = []
            for _ in range(KEPT):
                before = run.recorder.counters.blocked_s + run.blocked_s
                seconds_per_step(model, optimizer, batch, EVERY)
                blocked.append(run.recorder.counters.blocked_s + run.blocked_s - before)
            run.recorder._writer.join()
            held = sum(b.numel() * b.element_size() for b in run.recorder._buffers.values())
            idle = unkept(watched)
    once = statistics.median(blocked)
    return (
        f"| {size} | {alone * 1e3:.0f} ms | {once * 1e3:.0f} ms ({min(blocked) * 1e3:.0f}-{max(blocked) * 1e3:.0f}) | {once / alone:.1%} "
        f"| {idle * 1e6:.1f} us ({idle / alone:.4%}) | {held / 1e6:.0f} MB | {statistics.median(timed.seconds):.2f} s |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    print(
        f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads, {os.cpu_count()} cores, B={BATCH}, T={TOKENS}"
    )
    print("| parameters | a step | a kept step blocks | of that step | a step that is not kept | buffers | to disk |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for size in options.sizes:
        print(measure(size, options.device), flush=True)


if __name__ == "__main__":
    main()
