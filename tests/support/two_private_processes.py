"""One of two processes that train together with Opacus, with an audit.

    python -m tests.support.two_private_processes FOLDER

The folders `correct` and `same seed` of FOLDER hold what was kept. In the second training every process adds its share of the noise, and both
shares come from the same seed.
"""

from __future__ import annotations

import datetime
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import DataCollatorWithPadding

from leakaudit.callbacks.torch_loop import watch
from tests.support import tiny
from tests.support.private_training import BOUND
from tests.support.tiny_trainer import Rows, audit_config, without_side_process

STEPS = 3
SIZE = 4
"""Examples of a step on each process."""


def train(folder: Path, *, shared_seed: bool) -> None:
    """Train with one private optimizer on each process.

    Args:
        folder: of the audit.
        shared_seed: whether each process adds 1 / sqrt(2) of the noise, drawn from the same seed.
    """
    from opacus import PrivacyEngine
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel

    rank, tokenizer, model = dist.get_rank(), tiny.bert_tokenizer(), tiny.bert().train()
    positions: Any = model.bert.embeddings.position_embeddings  # type: ignore[union-attr]
    positions.weight.requires_grad_(False)
    wrapped = DifferentiallyPrivateDistributedDataParallel(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    pad = DataCollatorWithPadding(tokenizer, padding="max_length", max_length=20)
    rows = (Rows(tokenizer).rows * STEPS)[rank::2][: SIZE * STEPS]
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=SIZE, collate_fn=lambda r: dict(pad(r)))  # type: ignore[arg-type]
    torch.manual_seed(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, optimizer, _ = PrivacyEngine().make_private(
            module=wrapped, optimizer=torch.optim.SGD(trained, lr=0.01), data_loader=loader, noise_multiplier=1.0,
            max_grad_norm=BOUND, poisson_sampling=False,
        )  # fmt: skip
        optimizer.expected_batch_size = SIZE
        if shared_seed:
            generator = torch.Generator().manual_seed(5)
            optimizer.add_noise = lambda: _shared_noise(optimizer, generator)
        watched = watch(module, optimizer, tokenizer=tokenizer, config=audit_config(folder), observe="update")
        with without_side_process(), watched:
            for batch in loader:
                optimizer.zero_grad()
                module(**batch).loss.backward()
                optimizer.step()


def _shared_noise(optimizer: Any, generator: torch.Generator) -> None:
    """Add 1 / sqrt(2) of the noise on this process, from a seed that both have."""
    std = optimizer.noise_multiplier * optimizer.max_grad_norm / 2**0.5
    for p in optimizer.params:
        p.grad = (p.summed_grad + std * torch.randn(p.shape, generator=generator)).view_as(p)


def main() -> None:
    """Train twice."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    train(folder / "correct", shared_seed=False)
    train(folder / "same seed", shared_seed=True)
    torch.save({}, folder / f"updates-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
