"""One of two processes that train together on gloo, with an audit.

`test_distributed.py` starts it.

    python -m tests.support.two_processes FOLDER

The process's rank and the others' address come from the environment, as a launcher sets them. What both were given and what both
got stands in FOLDER afterwards, for the test to compare.
"""

from __future__ import annotations

import contextlib
import datetime
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.callbacks.torch_loop import Watch, watch
from leakaudit.capture.processes.distributed import TorchProcessGroup
from leakaudit.capture.recording import pass_recorder
from tests.support import stacks, tiny
from tests.support.tiny_trainer import Probe, audit_config, make_trainer, without_side_process

STEPS = 3


def batches(rank: int) -> list[stacks.Batch]:
    """Return six micro-batches of two for a rank; ranks share none."""
    return stacks.classes(count=12)[rank::2][: 2 * STEPS]


def train(
    folder: Path, called: nn.Module, model: nn.Module, *, windows: int = 1, **options: Any
) -> list[dict[str, Tensor]]:
    """Train with an audit; return the full gradients of this process.

    They are those that its optimizer got.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = batches(dist.get_rank())
    updates = []
    watched = watch(called, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(folder), **options)
    with without_side_process(), watched:
        for start in range(0, STEPS * windows, windows):
            for number, batch in enumerate(mine[start : start + windows]):
                waits = isinstance(called, DistributedDataParallel) and number < windows - 1
                quiet: Any = called.no_sync() if waits else contextlib.nullcontext()  # type: ignore[operator]
                with quiet:
                    (called(**batch).loss / windows).backward()
            updates.append({n: _whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
    return updates


def train_hf(folder: Path) -> list[dict[str, Tensor]]:
    """Train with the Hugging Face Trainer; return its optimizer's gradients.

    The Trainer distributes the batches itself.
    """
    probe, audit = Probe(), LeakAuditCallback(audit_config(folder))
    trainer = make_trainer(
        folder, probe, audit, model=tiny.bert(dropout=0.1), per_device_train_batch_size=1, max_steps=STEPS,
        gradient_accumulation_steps=2, ddp_backend="gloo", max_grad_norm=0.001,
    )  # fmt: skip
    audit.attach(trainer)
    with without_side_process():
        trainer.train()
    return probe.updates


def train_accelerate(folder: Path) -> list[dict[str, Tensor]]:
    """Train in a loop around `Accelerator`; return its optimizer's gradients."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain = tiny.bert(dropout=0.1).train()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    updates: list[dict[str, Tensor]] = []
    watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(folder))
    with without_side_process(), watched:
        for batch in batches(dist.get_rank())[: 2 * STEPS]:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    named = plain.named_parameters()
                    updates.append({n: p.grad.detach().clone() for n, p in named if p.grad is not None})
                optimizer.step()
                optimizer.zero_grad()
    return updates


def train_lightning(folder: Path) -> list[dict[str, Tensor]]:
    """Train with Lightning over DDP; return its optimizer's gradients.

    Every rank has its own batches.
    """
    import lightning.pytorch as pl
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

    from leakaudit.callbacks.lightning_trainer import LeakAuditCallback as LightningAudit

    updates: list[dict[str, Tensor]] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny.bert(dropout=0.1).train()

        def training_step(self, batch: stacks.Batch, index: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            named = self.model.named_parameters()
            updates.append({n: p.grad.detach().clone() for n, p in named if p.grad is not None})

    mine: Any = batches(dist.get_rank())[:STEPS]
    loader: Any = torch.utils.data.DataLoader(mine, batch_size=1, collate_fn=lambda rows: dict(rows[0]))
    audit = LightningAudit(audit_config(folder), tokenizer=tiny.bert_tokenizer())
    with without_side_process():
        pl.Trainer(
            max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", plugins=[TorchElasticEnvironment()], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
            default_root_dir=folder, callbacks=[audit],
        ).fit(Module(), loader)  # fmt: skip
    return updates


def _whole(gradient: Tensor) -> Tensor:
    full: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return full.detach().clone()


@contextlib.contextmanager
def busy(rank: int) -> Iterator[None]:
    """Let one process refuse a step at its end that it accepted at its beginning."""
    real = TorchProcessGroup.agree

    def agree(self: TorchProcessGroup, topic: str, yes: bool, limit_s: float | None = None) -> bool:
        at_the_end = topic.startswith("the end of")
        return real(self, topic, yes and not (at_the_end and dist.get_rank() == rank), limit_s)

    TorchProcessGroup.agree = agree  # type: ignore[method-assign]
    try:
        yield
    finally:
        TorchProcessGroup.agree = real  # type: ignore[method-assign]


@contextlib.contextmanager
def stumbling(rank: int) -> Iterator[None]:
    """Let one process fail in the middle of recording a step."""
    module: Any = pass_recorder
    real = module.random_states

    def fail(like: Any) -> Any:
        if dist.get_rank() == rank:
            raise MemoryError
        return real(like)

    module.random_states = fail
    try:
        yield
    finally:
        module.random_states = real


@contextlib.contextmanager
def removing(spool: Path, rank: int) -> Iterator[None]:
    """Let somebody remove the spool after a step was kept, which one process notices."""
    real = Watch._stepped

    def stepped(self: Watch, *args: Any) -> None:
        if dist.get_rank() == rank and self._counter.number == 1 and self._run is not None:
            self._run.recorder.writing()  # waits for the writer here, which would fill the folder again
            shutil.rmtree(spool)
        real(self, *args)

    Watch._stepped = stepped  # type: ignore[method-assign]
    try:
        yield
    finally:
        Watch._stepped = real  # type: ignore[method-assign]


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    torch.manual_seed(rank)  # every process draws masks of its own
    got: dict[str, Any] = {}

    model = tiny.bert(dropout=0.1).train()
    got["ddp"] = train(folder / "ddp", DistributedDataParallel(model), model)
    model = tiny.bert(dropout=0.1).train()
    got["windows"] = train(
        folder / "windows", DistributedDataParallel(model, gradient_as_bucket_view=True), model, windows=2
    )
    model = tiny.bert(dropout=0.1).train()
    got["local"] = train(folder / "local", DistributedDataParallel(model), model, windows=2, observe="local")
    model = tiny.bert(dropout=0.1).train()
    for layer in model.bert.encoder.layer:  # type: ignore[union-attr]
        fully_shard(layer)
    fully_shard(model)
    got["fsdp2"] = train(folder / "fsdp2", model, model)
    gone = removing(folder / "removed" / "audit" / "spool", 0)
    for name, hindrance in (("busy", busy(1)), ("stumbling", stumbling(1)), ("removed", gone)):
        model = tiny.bert().train()
        with hindrance:
            got[name] = train(folder / name, DistributedDataParallel(model), model)
    got["trainer"] = train_hf(folder / "trainer")
    got["accelerate"] = train_accelerate(folder / "accelerate")
    got["lightning"] = train_lightning(folder / "lightning")
    # One process alone cannot begin: there is no tokenizer, and the other must not wait for it.
    model = tiny.bert().train()
    watched = watch(
        DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1),
        tokenizer=None if rank == 1 else tiny.bert_tokenizer(), config=audit_config(folder / "alone"),
    )  # fmt: skip
    with watched:
        pass
    torch.save(got, folder / f"updates-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
