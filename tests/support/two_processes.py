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
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.callbacks.torch_loop import Watch, watch
from leakaudit.capture.processes.distributed import TorchProcessGroup
from leakaudit.capture.recording import pass_recorder
from tests.support import stacks, tiny
from tests.support.fsdp_on_cpu import fsdp_on_cpu
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
                with _quiet(called, waits=number < windows - 1):
                    (called(**batch).loss / windows).backward()
            updates.append({n: _whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
    return updates


def _quiet(called: Any, *, waits: bool) -> Any:
    """Return a context in which a backward pass exchanges gradients, or waits with it."""
    if isinstance(called, DistributedDataParallel):
        return called.no_sync() if waits else contextlib.nullcontext()
    called.set_requires_gradient_sync(not waits)
    return contextlib.nullcontext()


def train_hf(folder: Path, **options: Any) -> list[dict[str, Tensor]]:
    """Train with the Hugging Face Trainer; return its optimizer's gradients.

    The Trainer distributes the batches itself.
    """
    probe, audit = Probe(), LeakAuditCallback(audit_config(folder))
    trainer = make_trainer(
        folder, probe, audit, model=tiny.bert(dropout=0.1), per_device_train_batch_size=1, max_steps=STEPS,
        gradient_accumulation_steps=2, ddp_backend="gloo", max_grad_norm=0.001, **options,
    )  # fmt: skip
    audit.attach(trainer)
    with without_side_process():
        trainer.train()
    return [{name: _whole(gradient) for name, gradient in update.items()} for update in probe.updates]


def train_hf_fsdp2(folder: Path) -> list[dict[str, Tensor]]:
    """Train with the Trainer, which shards model and optimizer with FSDP2."""
    wrapped = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["BertLayer"]}
    with fsdp_on_cpu():
        updates = train_hf(folder, fsdp="full_shard auto_wrap", fsdp_config={"version": 2, **wrapped})
        assert AcceleratorState().distributed_type == DistributedType.FSDP
    return updates


def train_accelerate_fsdp2(folder: Path) -> list[dict[str, Tensor]]:
    """Train in a loop around an `Accelerator` that shards with FSDP2."""
    from accelerate import FullyShardedDataParallelPlugin

    wrapped = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["BertLayer"]}
    with fsdp_on_cpu():
        plugin: Any = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False, **wrapped)
        updates = train_accelerate(folder, fsdp_plugin=plugin)
        assert AcceleratorState().distributed_type == DistributedType.FSDP
    return updates


def train_accelerate(folder: Path, **options: Any) -> list[dict[str, Tensor]]:
    """Train in a loop around `Accelerator`; return its optimizer's gradients."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
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
                    updates.append({n: _whole(p.grad) for n, p in named if p.grad is not None})
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
    for name, windows in (("fsdp2", 1), ("fsdp2-windows", 2)):
        model = tiny.bert(dropout=0.1).train()
        for layer in model.bert.encoder.layer:  # type: ignore[union-attr]
            fully_shard(layer)
        fully_shard(model)
        got[name] = train(folder / name, model, model, windows=windows)
    gone = removing(folder / "removed" / "audit" / "spool", 0)
    for name, hindrance in (("busy", busy(1)), ("stumbling", stumbling(1)), ("removed", gone)):
        model = tiny.bert().train()
        with hindrance:
            got[name] = train(folder / name, DistributedDataParallel(model), model)
    got["trainer"] = train_hf(folder / "trainer")
    got["accelerate"] = train_accelerate(folder / "accelerate")
    got["lightning"] = train_lightning(folder / "lightning")
    got["trainer-fsdp2"] = train_hf_fsdp2(folder / "trainer-fsdp2")
    got["accelerate-fsdp2"] = train_accelerate_fsdp2(folder / "accelerate-fsdp2")
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
