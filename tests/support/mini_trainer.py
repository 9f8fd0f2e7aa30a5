"""A training loop in its own process, for tests of accidents.

Tests kill it, fill its disk or set its clock back.

    python -m tests.support.mini_trainer FOLDER STEPS '{"at_end": "detach"}'

Every second step is kept: the loop waits before it until the one before is in the worker's hands, as a slow model would. What the
process prints is for the test; the last line is `trained STEPS`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from leakaudit.callbacks.torch_loop import Watch, watch
from leakaudit.config.audit import AuditConfig, PluginSpec
from leakaudit.storage.spool import Spool
from tests.support import tiny

TEXTS = ("the old dog chased a cat .", "a small bird saw the red fish .", "one horse ate .")
PATIENCE_S = 30.0
"""After which a step is simply not kept, so that a test fails instead of hanging."""


def config(folder: Path, **more: Any) -> AuditConfig:
    """Return a configuration with one fast attack; every second step is due."""
    attacks = (PluginSpec(name="embedding-rows"),)
    return AuditConfig(
        **{
            "out_dir": folder / "audit",
            "every_n_steps": 2,
            "max_snapshots": 10_000,
            "attacks": attacks,
            "controls": 0,
            "device": "cpu",
            "nice": 0,
            **more,
        }
    )


def train(
    folder: Path, steps: int, each: Callable[[Watch, int], None] = lambda audit, step: None, **more: Any
) -> Watch:
    """Train a tiny BERT.

    Args:
        folder: the audit goes into `audit` in it.
        steps: of plain SGD.
        each: called before every optimizer step.
        more: of the configuration.

    Returns:
        The audit, which is over.
    """
    tokenizer, model = tiny.bert_tokenizer(), tiny.bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer, tokenizer=tokenizer, config=config(folder, **more), total_steps=steps) as audit:
        for step in range(steps):
            batch = tokenizer([TEXTS[step % len(TEXTS)]], return_tensors="pt")
            model(**batch, labels=torch.tensor([step % 2])).loss.backward()
            each(audit, step)
            if step % 2:
                let_pass(audit)
            optimizer.step()
            optimizer.zero_grad()
    return audit


def let_pass(audit: Watch) -> None:
    """Wait until the next step can be kept, with the checks of every step."""
    deadline = time.monotonic() + PATIENCE_S
    run = audit._run
    beside = run is not None and run.config.schedule == "beside"  # otherwise nobody takes what waits
    while run is not None and (run.recorder.writing() or (beside and waits(run.spool))) and time.monotonic() < deadline:
        if run.side.given_up or run.spool.gone():
            return
        run.after_step()
        time.sleep(0.005)


def waits(spool: Spool) -> bool:
    """Return whether a snapshot waits that no worker has taken."""
    return any(path.suffix == ".ready" for path in spool.entries())


def announce(audit: Watch, step: int) -> None:
    """Print the worker's process id as soon as there is one."""
    run = audit._run
    if run is not None and run.side.pid is not None and not hasattr(audit, "announced"):
        vars(audit)["announced"] = True
        print(run.side.pid, flush=True)


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), announce, **json.loads(sys.argv[3]))
    print(f"trained {sys.argv[2]}", flush=True)
