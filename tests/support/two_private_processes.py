"""One of two processes that train together with Opacus, with an audit.

    python -m tests.support.two_private_processes FOLDER

The folders `correct`, `same seed` and `half` of FOLDER hold what was kept. In the second training every process adds 1 / sqrt(2) of the noise, and
both draw it from the same seed. In the third every process adds half of the noise.
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


def train(folder: Path, share: float | None = None, seeds: tuple[int, int] = (0, 0)) -> None:
    """Train with one private optimizer on each process.

    Args:
        folder: of the audit.
        share: of the noise that each process adds; None leaves it to Opacus, which adds all of it on the first one.
        seeds: of these shares.
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
        if share is not None:
            generator = torch.Generator().manual_seed(seeds[rank])
            optimizer.add_noise = lambda: _add_share(optimizer, generator, share)
        watched = watch(module, optimizer, tokenizer=tokenizer, config=audit_config(folder), observe="update")
        with without_side_process(), watched:
            for batch in loader:
                optimizer.zero_grad()
                module(**batch).loss.backward()
                optimizer.step()


def _add_share(optimizer: Any, generator: torch.Generator, share: float) -> None:
    """Add a share of the noise on this process."""
    std = optimizer.noise_multiplier * optimizer.max_grad_norm * share
    for p in optimizer.params:
        p.grad = (p.summed_grad + std * torch.randn(p.shape, generator=generator)).view_as(p)


def main() -> None:
    """Train three times."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    train(folder / "correct")
    train(folder / "same seed", 2**-0.5, (5, 5))
    train(folder / "half", 0.5, (5, 6))
    torch.save({}, folder / f"updates-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
