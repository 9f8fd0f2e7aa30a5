"""The other processes of a distributed run, over `torch.distributed`: DDP and FSDP2.

Reading a sharded tensor, and collecting the batches of all processes, are collectives: every process enters, or all hang. So no
process decides for itself. The first one knows whether there is room; the others learn it from `agree`, which is also how one
process that cannot go on keeps all of them from going on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from leakaudit.snapshot import MicroBatch, Truth


@dataclass(frozen=True)
class TorchPeers:
    """The processes of the default group."""

    mean_over: int
    """Processes over whose gradients the update is the mean, as DDP and FSDP2 reduce them."""

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes."""
        return dist.get_rank() == 0

    def agree(self, yes: bool) -> bool:
        """Return whether all processes say yes."""
        answer = torch.tensor([int(yes)], device=_device())
        dist.all_reduce(answer, op=dist.ReduceOp.MIN)
        return bool(answer.item())

    def gather(self, truth: Truth) -> Truth:
        """Return the micro-batches of all processes, in the order of their ranks."""
        everything: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everything, [_plain(batch) for batch in truth.micro_batches])
        return replace(truth, micro_batches=tuple(MicroBatch(**batch) for mine in everything for batch in mine))


def peers_of(processes: int | None = None) -> TorchPeers | None:
    """Return the other processes of this run, or None where it has none.

    Args:
        processes: how many the framework says there are; None asks `torch.distributed`.
    """
    if processes is not None and processes < 2:
        return None
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return None
    return TorchPeers(mean_over=dist.get_world_size())


def _plain(batch: MicroBatch) -> dict[str, Any]:
    """Return a micro-batch as plain data, which is all that travels between processes."""
    return {name: getattr(replace(batch), name) for name in MicroBatch.__dataclass_fields__}


def _device() -> torch.device:
    """Return where the group's collectives take tensors: gloo from the CPU, NCCL from the GPU of this process."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
