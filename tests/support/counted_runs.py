"""Trainings under a profile hook, in any stack.

As a module, one of two processes that train together, first without the audit and then with it:

    python -m tests.support.counted_runs FOLDER
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from leakaudit.capture.context import OFF_SWITCH
from tests.support import counting, stacks, tiny, user_code
from tests.support.stacks import Case

FILES = (user_code.__file__, stacks.__file__)
"""The code of the training: model, hooks, counters, loop, Lightning module, collator."""
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3}


@dataclass
class Trained:
    """What a training was and what it left."""

    ran: counting.Ran
    seen: list[tuple[int, ...]]
    state: dict[str, Any]
    registries: dict[str, str]
    records: list[tuple[str, int, str]]
    items: list[int]
    kept: int = 0


class Ear(logging.Handler):
    """The user's handler of all logs."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith("leakaudit"):
            self.records.append((record.name, record.levelno, record.getMessage()))


Runner = Callable[[Path, Case], Any]


def counted(folder: Path, run: Runner, make: Callable[[], Any], batches: Any, **more: Any) -> Trained:
    """Train once in some stack, and return what happened."""
    made: list[nn.Module] = []
    counts: list[user_code.Counts] = []

    def model() -> nn.Module:
        made.append(make())
        counts.append(user_code.Counts(folder / "users", made[-1].config))
        user_code.counting(made[-1], counts[-1])
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(5)
        return made[-1]

    def optimizer(module: nn.Module) -> Any:
        return user_code.stepping(torch.optim.AdamW(module.parameters(), lr=1e-3), counts[-1])

    case = Case(model=model, batches=batches, optimizer=optimizer, arguments=ADAMW, clip=0.5, windows=2, **more)
    ear, root = Ear(), logging.getLogger()
    root.addHandler(ear)
    kept = 0
    try:
        with (
            counting.optimizers_seen() as optimizers,
            counting.listing(FILES) as ran,
            contextlib.suppress(AssertionError, FileNotFoundError),  # without the audit there is no folder to look into
        ):
            kept = len(run(folder, case))
    finally:
        root.removeHandler(ear)
        counts[-1].producer.end()
        user_code.Passes.counts = None
    state = counting.state_of(made[-1], optimizers)
    registries = counting.digest(user_code)
    return Trained(ran, counts[-1].seen, state, registries, ear.records, counts[-1].producer.items, kept)


def assert_same(one: Trained, two: Trained) -> None:
    """Compare two trainings in everything that the user could notice."""
    pairs = zip(one.ran.main, two.ran.main, strict=False)
    assert one.ran.main == two.ran.main, next((pair for pair in enumerate(pairs) if pair[1][0] != pair[1][1]), "more")
    assert one.ran.beside == two.ran.beside, (one.ran.beside, two.ran.beside)
    assert one.seen == two.seen, "the counts differ"
    for before, after in ((one.state, two.state), (one.registries, two.registries)):
        assert not (changed := counting.differences(before, after)), changed
    assert one.records == two.records, set(one.records) ^ set(two.records)
    for trained in (one, two):  # what a thread appends, and the forward takes from a queue, at every call
        assert trained.items == list(range(1, len(trained.items) + 1)) and len(trained.items) >= len(trained.seen)


def bert() -> Any:
    """Return a tiny BERT with dropout."""
    return tiny.bert(dropout=0.1, num_hidden_layers=1)


def over_ddp(folder: Path, case: Case) -> Any:
    """Train in plain torch over DDP."""
    return stacks.torch_loop(folder, replace(case, wrap=DistributedDataParallel))


def main() -> None:
    own = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    own /= str(dist.get_rank())
    os.environ[OFF_SWITCH] = "1"
    without = counted(own / "without", over_ddp, bert, stacks.classes())
    del os.environ[OFF_SWITCH]
    audited = counted(own / "with", over_ddp, bert, stacks.classes())
    assert_same(without, audited)
    print(f"the same, {audited.kept} steps kept")
    dist.destroy_process_group()


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
