"""What an audit costs the training that it watches: all of it.

    python -m tests.benchmarks.capture                   # encoders of 22M and 110M parameters, B = 8, T = 64
    python -m tests.benchmarks.capture --sizes 22M --kept 20     # paired: each kept step with the steps around it
    python -m tests.benchmarks.capture --sizes 22M --device cuda
    python -m tests.benchmarks.capture --sizes 1.1B-lora 1.1B     # a Llama shape in bfloat16, B = 1, T = 16; takes 12 GB of memory

Random weights; the shapes of MiniLM-L6-H384, BERT-base and TinyLlama; AdamW, for the last plain SGD. Every fifth step is kept, and what
counts is how much longer the five of them take than five steps that nobody keeps: the kept step itself, the next, beside which the writer
works, and the others, of which the last three say what a step takes. So each kept step is compared with the steps next to it. A shared
machine makes seconds say little; so the processor's seconds are given as well, of all threads, which say what the audit computes, and those
of the training thread and of the writer's thread, by part. What a step that is not kept costs is below what timing whole steps can show, so
its hooks are timed by themselves. Memory is the peak of the process, above what the same steps take without an audit. Nothing is attacked.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from leakaudit.callbacks.torch_loop import Watch, watch
from leakaudit.capture.recording.kept_step import KeptStep
from leakaudit.capture.recording.step_keeper import StepKeeper
from leakaudit.capture.run import AuditRun
from leakaudit.models.lora import add_lora
from leakaudit.storage import snapshot_files
from leakaudit.storage.digests import Digest
from leakaudit.storage.disk_use import size_of
from tests.support import tiny

SHAPES = {
    "22M": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "110M": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}
LARGE = {
    "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 5632,
    "vocab_size": 32000,
}  # fmt: skip
SIZES = (*SHAPES, "1.1B-lora", "1.1B")
EVERY = 5


@dataclass(frozen=True)
class Step:
    """What one step took."""

    seconds: float
    processor: float
    """Seconds of all threads of the process."""


def setup(size: str, device: str) -> tuple[Any, Any, Any, Any]:
    """Return a model in training mode, its optimizer, a batch and a tokenizer."""
    torch.manual_seed(0)
    if size in SHAPES:
        model = tiny.hf.BertForSequenceClassification(
            tiny.hf.BertConfig(num_labels=4, vocab_size=30522, **SHAPES[size])
        )
        ids = torch.randint(5, 40, (8, 64), device=device)
        labels = torch.arange(8, device=device) % 4
        model = model.train().to(device)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-5)
        tokenizer = tiny.bert_tokenizer()
    else:
        with torch.device(device):
            torch.set_default_dtype(torch.bfloat16)
            model = tiny.hf.LlamaForCausalLM(tiny.hf.LlamaConfig(**LARGE)).train()
            torch.set_default_dtype(torch.float32)
        if size.endswith("lora"):
            add_lora(model, 16, ("q_proj", "k_proj", "v_proj", "o_proj"))
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(".lora_" in name)
                if ".lora_B." in name:
                    torch.nn.init.normal_(parameter, std=0.01)
        model.config._name_or_path = ""
        ids = torch.randint(5, 40, (1, 16), device=device)
        labels = ids
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        tokenizer = tiny.gpt2_tokenizer()
    return model, optimizer, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}, tokenizer


def steps_of(model: Any, optimizer: Any, batch: Any, count: int) -> list[Step]:
    """Train and return what each step took."""
    taken = []
    for _ in range(count):
        _wait(batch)
        start, before = time.perf_counter(), time.process_time()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _wait(batch)
        taken.append(Step(time.perf_counter() - start, time.process_time() - before))
    return taken


def _wait(batch: Any) -> None:
    if batch["input_ids"].is_cuda:
        torch.cuda.synchronize()


def peak() -> float:
    """Return the most memory that this process ever had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


class Written:
    """Measures each snapshot's size, and removes it as a fast worker would."""

    def __init__(self, watched: Watch) -> None:
        run = watched._run
        assert run is not None
        self.seconds: list[float] = []
        self.parts: dict[str, list[float]] = {part: [] for part in ("check", "digest", "disk", "rest")}
        """Part of the writer's work -> its seconds of the processor, for each kept step."""
        self.once, self.each = 0, 0
        real, spool = run.recorder.writer.write_now, run.spool

        def write(kept: Any) -> None:
            start = time.perf_counter()
            with contextlib.ExitStack() as stack:
                spent = {
                    part: stack.enter_context(_timed(owner, name))
                    for part, (owner, name) in {
                        "check": (KeptStep, "check_content"),
                        "digest": (Digest, "update"),
                        "disk": (snapshot_files, "write_all"),
                    }.items()
                }
                processor = time.thread_time()
                real(kept)
                spent["rest"] = [time.thread_time() - processor - sum(sum(found) for found in spent.values())]
            for part, found in spent.items():
                self.parts[part].append(sum(found))
            self.seconds.append(time.perf_counter() - start)
            claimed = spool.queue.claim()
            if claimed is not None:
                self.each, self.once = size_of(claimed), spool.used_bytes() - size_of(claimed)
                spool.queue.discard_or_keep(claimed, keep=False)

        run.recorder.writer.write_now = write  # type: ignore[method-assign] # the rest of the writer stays


@contextlib.contextmanager
def _timed(owner: Any, name: str) -> Iterator[list[float]]:
    """Yield a list of the seconds of the processor that each call takes."""
    real, found = getattr(owner, name), []

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        try:
            return real(*args, **kwargs)
        finally:
            found.append(time.thread_time() - start)

    setattr(owner, name, timed)
    try:
        yield found
    finally:
        setattr(owner, name, real)


def unkept(watched: Watch, times: int = 10_000) -> float:
    """Return the seconds that the hooks of one step take that is not due."""
    run = watched._run
    assert isinstance(run, AuditRun)
    run.plan = replace(run.plan, every=10**9)
    watched._counter.number = 1
    start = time.perf_counter()
    for _ in range(times):
        run.recorder.current.before_step(None, (), {})
        run.recorder.current.after_step(None, (), {})
        watched._stepped()
    return (time.perf_counter() - start) / times


def _median(steps: Sequence[Step]) -> Step:
    return Step(statistics.median(s.seconds for s in steps), statistics.median(s.processor for s in steps))


def measure(size: str, device: str, kept: int) -> str:
    """Return one line of the table."""
    model, optimizer, batch, tokenizer = setup(size, device)
    steps_of(model, optimizer, batch, 2 * EVERY)
    lowest = peak()
    with tempfile.TemporaryDirectory() as folder:
        # Deferred and left to others: no side process is started, so nothing but the capture is measured.
        config = {
            "out_dir": Path(folder) / "audit", "every_n_steps": EVERY, "first_step": 1, "max_snapshots": kept,
            "schedule": "deferred", "at_end": "leave",
        }  # fmt: skip
        watched = watch(model, optimizer, tokenizer=tokenizer, config=config)
        with watched:
            written = Written(watched)
            run: Any = watched._run
            steps_of(model, optimizer, batch, 1)
            cycles: list[Cycle] = []
            for _ in range(kept):
                before, missed = run.recorder.counters.blocked_s + run.blocked_s, run.recorder.counters.kept
                with _timed(StepKeeper, "keep") as copied:
                    steps = steps_of(model, optimizer, batch, EVERY)
                run.recorder.written()
                blocked = run.recorder.counters.blocked_s + run.blocked_s - before
                if run.recorder.counters.kept > missed:
                    cycles.append(Cycle(tuple(steps), blocked, sum(copied)))
            more = peak() - lowest
            idle = unkept(watched) if size in SHAPES else 0.0
    alone = statistics.median(cycle.alone.processor for cycle in cycles)
    parts = {"copy": [cycle.copied for cycle in cycles], **written.parts}
    shares = ", ".join(f"{part} {statistics.median(found) / alone:.2f}" for part, found in parts.items())
    seconds = statistics.median(cycle.alone.seconds for cycle in cycles)
    return (
        f"| {size} | {len(cycles)} | {seconds:.2f} s ({alone:.2f} s) | {_spread([c.blocked / c.alone.seconds for c in cycles])} "
        f"| {_spread([c.more_seconds for c in cycles])} | {_spread([c.more_processor for c in cycles])} | {shares} "
        f"| {idle * 1e6:.1f} us | {more:.0f} MB ({more / lowest:.1%}) | {written.each / 1e6:.0f} MB + {written.once / 1e6:.0f} MB once "
        f"| {statistics.median(written.seconds):.2f} s |"
    )


@dataclass(frozen=True)
class Cycle:
    """A kept step and those that follow it until the next one."""

    steps: tuple[Step, ...]
    blocked: float
    """Seconds of the training thread in the audit."""
    copied: float
    """Seconds of the processor in which the training thread checked and copied the step."""

    @property
    def alone(self) -> Step:
        """What a step takes beside which nothing of the audit runs."""
        return _median(self.steps[2:])

    @property
    def more_seconds(self) -> float:
        """By how many steps the cycle takes longer than as many steps that are not kept."""
        return sum(step.seconds for step in self.steps) / self.alone.seconds - len(self.steps)

    @property
    def more_processor(self) -> float:
        """The same in seconds of the processor."""
        return sum(step.processor for step in self.steps) / self.alone.processor - len(self.steps)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SHAPES), choices=SIZES)
    parser.add_argument("--kept", type=int, default=4, help="number of kept steps")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(
        f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads, {os.cpu_count()} cores, load {load:.1f}"
    )
    print(
        "| parameters | n | a step (processor) | a kept step blocks, in steps | it takes longer, in steps | processor in all, in steps "
        "| by part, medians | a step that is not kept | memory | disk | writer |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for size in options.sizes:
        print(measure(size, options.device, options.kept), flush=True)


if __name__ == "__main__":
    main()
