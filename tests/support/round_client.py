"""A federated client in its own process, for tests of rounds in several processes.

    python -m tests.support.round_client FOLDER ROUNDS '{"rounds": 3}'

Each round has a new model, optimizer and `watch`. The process prints the folder and number of each round, and waits for a line on its
standard input before each round but the first. `--crash` at the end lets it end with an exception.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from leakaudit.callbacks.rounds import open_round
from leakaudit.callbacks.torch_loop import Watch, watch
from leakaudit.config.audit import AuditConfig
from tests.support import tiny
from tests.support.mini_trainer import TEXTS, config


def round_config(folder: Path, **more: Any) -> AuditConfig:
    """Return a configuration of rounds with one fast attack."""
    return config(folder, unit="round", every_n_steps=1, **more)


def train_round(folder: Path, number: int = 0, *, steps: int = 2, **more: Any) -> Watch:
    """Train one round of a new tiny BERT; return its audit, which is over."""
    tokenizer, model = tiny.bert_tokenizer(), tiny.bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, tokenizer=tokenizer, config=round_config(folder, **more)) as audit:
        for step in range(steps):
            batch = tokenizer([TEXTS[(number + step) % len(TEXTS)]], return_tensors="pt")
            model(**batch, labels=torch.tensor([step % 2])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return audit


if __name__ == "__main__":
    for turn in range(int(sys.argv[2])):
        if turn:
            sys.stdin.readline()
        done = train_round(Path(sys.argv[1]), turn, **json.loads(sys.argv[3]))
        kept = open_round()
        print(done.folder, None if kept is None else kept.number, flush=True)
    if "--crash" in sys.argv:
        raise RuntimeError("the client failed")
