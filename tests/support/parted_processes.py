"""One of two processes, of which one has no audit, leaves it or ends early.

`test_parted.py` starts it.

    python -m tests.support.parted_processes FOLDER

Every training runs without an audit first. The weights that both left, and how long each took, stand in FOLDER afterwards.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.callbacks.torch_loop import Watch, watch
from leakaudit.capture.context import OFF_SWITCH
from leakaudit.capture.processes import distributed
from leakaudit.errors import SnapshotError
from leakaudit.models.wrappers import unwrapped
from tests.support import matrix, stacks, tiny
from tests.support.tiny_trainer import audit_config, make_trainer, without_side_process

LIMIT = 3.0
"""Seconds for an answer here; twenty are enough for real runs and too many for a test."""
STEPS = 6


def fresh() -> nn.Module:
    """Return the same model at each call."""
    return tiny.bert(dropout=0.1, num_hidden_layers=1).train()


def loop(
    folder: Path, audited: bool, *, steps: int = STEPS, join: bool = False, leaves_at: int | None = None,
    shard: bool = False, make: Callable[[], nn.Module] = fresh,
) -> nn.Module:  # fmt: skip
    """Train with DDP, or FSDP2; the audit may end before the training does."""
    model = make().train()
    called: Any = fully_shard(model) if shard else DistributedDataParallel(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    batches = stacks.classes(count=2 * STEPS)[dist.get_rank() :: 2][:steps]
    with contextlib.ExitStack() as inside, contextlib.ExitStack() as audit:
        if audited:
            audit.enter_context(without_side_process())
            config = audit_config(folder, max_snapshots=50)
            audit.enter_context(watch(called, optimizer, tokenizer=tiny.bert_tokenizer(), config=config))
        if join:
            inside.enter_context(called.join())
        for step, batch in enumerate(batches):
            if step == leaves_at:
                audit.close()
            called(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        inside.close()  # a process without data answers for DDP here until the others are through
    return model


def hf(folder: Path, audited: bool) -> nn.Module:
    """Train with the Hugging Face Trainer."""
    model, callbacks = fresh(), [LeakAuditCallback(audit_config(folder))] if audited else []
    trainer = make_trainer(
        folder, *callbacks, model=model, per_device_train_batch_size=1, max_steps=3, ddp_backend="gloo"
    )
    with without_side_process():
        trainer.train()
    return model


@contextlib.contextmanager
def late(rank: int) -> Any:
    """Let a process be late for one due step."""
    real = Watch._next

    def lagging(self: Watch) -> None:
        if dist.get_rank() == rank and self._counter.number == 2:
            time.sleep(1.5 * LIMIT)
        real(self)

    Watch._next = lagging  # type: ignore[method-assign]
    try:
        yield
    finally:
        Watch._next = real  # type: ignore[method-assign]


@contextlib.contextmanager
def broken(rank: int) -> Any:
    """Let a process's audit fail in the middle."""
    real = Watch._step_context

    def fail(self: Watch) -> Any:
        if dist.get_rank() == rank and self._counter.number == 2:
            raise MemoryError
        return real(self)

    Watch._step_context = fail  # type: ignore[method-assign]
    try:
        yield
    finally:
        Watch._step_context = real  # type: ignore[method-assign]


@contextlib.contextmanager
def disabled(rank: int) -> Any:
    """Switch the audit of one process off."""
    if dist.get_rank() == rank:
        os.environ[OFF_SWITCH] = "1"
    try:
        yield
    finally:
        os.environ.pop(OFF_SWITCH, None)


def scenarios(rank: int) -> dict[str, Callable[[Path, bool], nn.Module]]:
    """Return the trainings of both processes: folder, with an audit? -> model."""

    def within(hindrance: Callable[[int], Any], who: int) -> Callable[[Path, bool], nn.Module]:
        def run(folder: Path, audited: bool) -> nn.Module:
            with hindrance(who) if audited else contextlib.nullcontext():
                return loop(folder, audited)

        return run

    return {
        "callback on rank 0": lambda folder, audited: hf(folder, audited and rank == 0),
        "callback on rank 1": lambda folder, audited: hf(folder, audited and rank == 1),
        "watch on rank 0": lambda folder, audited: loop(folder, audited and rank == 0),
        "join": lambda folder, audited: loop(folder, audited, join=True, steps=STEPS if rank == 0 else 2),
        "join, rank 0 first": lambda folder, audited: loop(folder, audited, join=True, steps=STEPS if rank == 1 else 2),
        "left": lambda folder, audited: loop(folder, audited, leaves_at=2 if rank == 1 else None),
        "late": within(late, 0),
        "broken on rank 1": within(broken, 1),
        "broken on rank 0": within(broken, 0),
        "disabled on rank 1": within(disabled, 1),
        "right": loop,
        "sharded": lambda folder, audited: loop(folder, audited, shard=True),
        "sharded adapters": lambda folder, audited: loop(folder, audited, shard=True, make=matrix.lora),
        "two at once": twice,
    }


def twice(folder: Path, audited: bool) -> nn.Module:
    """Train with two audits of one model, one inside the other."""
    model = fresh()
    called = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with contextlib.ExitStack() as audits:
        if audited:
            audits.enter_context(without_side_process())
            for home in (folder, folder / "second"):
                config = audit_config(home, max_snapshots=50)
                audits.enter_context(watch(called, optimizer, tokenizer=tiny.bert_tokenizer(), config=config))
        for batch in stacks.classes(count=2 * STEPS)[dist.get_rank() :: 2]:
            called(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


LAYOUTS = {
    "two dimensions": "lies on a device mesh of shape (2, 1), and 2 processes train",
    "tensor parallel": "is split by tensor parallelism",
    "a part of the processes": "gradients are averaged over 1 of 2 processes",
    "a part of the processes, its own share": "",
    "FSDP2": "",
    "FSDP1": "",
    "FSDP1, a parameter left out": "FSDP1 leaves '0.bias' out (`ignored_states`)",
    "FSDP1, a part of the processes": "gradients are averaged over 1 of 2 processes",
    "DDP": "",
}
"""Way of sharing out a model -> what its refusal says; empty where it is audited."""


def layouts() -> dict[str, str]:
    """Return what is said of models that are shared out in several ways."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4))

    def flat(whole: nn.Module, **options: Any) -> nn.Module:
        return FullyShardedDataParallel(whole, use_orig_params=True, device_id=torch.device("cpu"), **options)

    part: Any = model()
    made: dict[str, Any] = {
        "two dimensions": fully_shard(model(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))),
        "tensor parallel": parallelize_module(model(), init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()}),
        "a part of the processes": DistributedDataParallel(model(), process_group=alone),
        "a part of the processes, its own share": DistributedDataParallel(model(), process_group=alone),
        "FSDP2": fully_shard(model()),
        "FSDP1": flat(model()),
        "FSDP1, a parameter left out": flat(part, ignored_states=[part[0].bias]),
        "FSDP1, a part of the processes": flat(model(), process_group=alone),
        "DDP": DistributedDataParallel(model()),
    }
    said = {}
    for name, called in made.items():
        try:
            distributed.check_layout(unwrapped(called), called, reduced="own share" not in name)
            said[name] = ""
        except SnapshotError as error:
            said[name] = str(error)
    return said


def collectives_so_far() -> int:
    """Return how many collectives the user's process group has had."""
    group: Any = dist.group.WORLD
    return int(group._get_sequence_number_for_group())


def main() -> None:
    folder = Path(sys.argv[1])
    chosen = sys.argv[2:]
    distributed.ANSWER_SECONDS = LIMIT
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    got: dict[str, Any] = {}
    for name, train in scenarios(rank).items():
        if chosen and name not in chosen:
            continue
        left: list[dict[str, Tensor]] = []
        seconds, collectives = [], []
        for audited in (False, True):
            torch.manual_seed(rank)  # every process draws masks of its own
            dist.barrier()
            print(f"== {name}, {'audited' if audited else 'alone'}", file=sys.stderr, flush=True)
            began, before = time.monotonic(), collectives_so_far()
            model = train(folder / name.replace(" ", "-"), audited)
            seconds.append(time.monotonic() - began)
            collectives.append(collectives_so_far() - before)
            parts = {n: getattr(p, "_local_tensor", p).detach().clone() for n, p in model.named_parameters()}
            left.append(parts | {"random": torch.get_rng_state()})
        got[name] = {"alone": left[0], "audited": left[1], "seconds": seconds, "collectives": collectives}
    if not chosen:
        got["layouts"] = layouts()
    torch.save(got, folder / f"left-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
