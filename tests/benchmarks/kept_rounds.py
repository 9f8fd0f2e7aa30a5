"""What a kept round of local steps costs the training that makes it.

    python -m tests.benchmarks.kept_rounds                  # an encoder of 22M parameters, all trained and with LoRA, K = 10
    python -m tests.benchmarks.kept_rounds --local-steps 1 --repeats 5

Random weights, the shape of MiniLM-L6-H384, AdamW, B = 8, T = 64. `new` has an optimizer without moments, `kept` one that goes on with them.
The seconds in which the training thread waits are those inside the recorder: two copies, of what was before the round and of the weights after
it. The difference itself, and the disk, are the writer's. The round beside it is timed without an audit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from leakaudit.callbacks.torch_loop import watch
from leakaudit.models.lora import add_lora
from tests.benchmarks.capture import setup, steps_of


def with_adapters(model: Any) -> Any:
    """Train adapters of rank 16 on all attention matrices, and nothing else."""
    add_lora(model, 16, ("query", "key", "value"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.01)
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)


def measure(kind: str, local_steps: int, repeats: int) -> str:
    """Return one line of the table."""
    model, optimizer, batch, tokenizer = setup("22M", "cpu")
    if kind.startswith("LoRA"):
        optimizer = with_adapters(model)
    steps_of(model, optimizer, batch, 1)
    alone = statistics.median(step.seconds for step in steps_of(model, optimizer, batch, 2 * local_steps)) * local_steps
    config = {
        "every_n_steps": 2,
        "first_step": 0,
        "max_snapshots": repeats + 1,
        "schedule": "deferred",
        "at_end": "leave",
    }
    blocked = []
    with tempfile.TemporaryDirectory() as folder:
        watched = watch(
            model,
            optimizer,
            tokenizer=tokenizer,
            config={**config, "out_dir": Path(folder) / "audit"},
            observe="delta",
            local_steps=local_steps,
        )
        with watched:
            run: Any = watched._run
            for _ in range(2 * repeats + 1):  # every second round is due, so the disk is done with the one before
                if kind.endswith("new"):
                    optimizer.state.clear()
                before = run.recorder.counters.blocked_s + run.blocked_s
                steps_of(model, optimizer, batch, local_steps)
                blocked.append(run.recorder.counters.blocked_s + run.blocked_s - before)
                run.recorder.written()
        waits, size = statistics.median(blocked[2::2]), run.recorder.bytes_held() / 1e6
    return f"| {kind} | {alone:.2f} s | {waits * 1000:.0f} ms | {waits / alone:.2%} | {size:.0f} MB |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local-steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"K = {options.local_steps}, {options.repeats} rounds after a first one"
    )
    print(
        "| 22M | a round alone | a kept round waits | of the round | copies in memory |\n| --- | --- | --- | --- | --- |"
    )
    for kind in ("all trained, new", "all trained, kept", "LoRA, new", "LoRA, kept"):
        print(measure(kind, options.local_steps, options.repeats), flush=True)


if __name__ == "__main__":
    main()
