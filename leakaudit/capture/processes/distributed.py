"""The processes of a distributed run (DDP, FSDP1 and FSDP2).

The audit enters no collective of the user's process group: the others would wait there for a process without an audit, or without
data. Processes agree over the store of the group with a time limit (`agreement.py`). Batches and shards are sent to the first process
over connections of our own, which have a time limit too and are not registered with torch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch leaves it out of `__all__`

from leakaudit.capture.processes.agreement import MEETING, Agreement, Settled
from leakaudit.capture.processes.flat_shards import FlatPiece, flat_refusal, fsdp1_modules, unflattened
from leakaudit.capture.processes.process_group import END_OF
from leakaudit.client.truth import MicroBatch, Truth
from leakaudit.errors import PeersError, SnapshotError
from leakaudit.storage.truth_tensors import tensors_of, truth_of

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 20.0
"""Seconds that a process waits for the others at the beginning and at a due step. Our choice: processes of one run arrive within
seconds of each other, and default time limits of collectives are 10 to 30 minutes."""

BEGIN_SECONDS = 120.0
"""Seconds that the first process may take to make the spool and its buffers. Our choice: 14 GB of pinned memory take about a minute."""

SENDING_SECONDS = 60.0
"""Time limit of one transfer to the first process, in seconds. Our choice: an embedding table of 2 GB takes 16 s at 1 Gbit/s."""

SHARE_OF_TIMEOUT = 1 / 4
"""Part of the user's own time limit that bounds each of ours. Our choice: the others may wait in a collective meanwhile, and at the
beginning three limits may follow each other."""

MOST_MISSED = 2
"""Number of due steps in a row without an answer of some process, after which the audit ends. Our choice: a single one may be a long
checkpoint."""

PIECE = 2**28
"""Bytes of one message. Our choice, far below what gloo counts in 32 bits."""

PREFIX = "leakaudit"
"""Prefix of our keys in the store of the process group."""


@dataclass
class TorchProcessGroup:
    """The processes of the default group of torch; call `meet` first."""

    mean_over: int
    """Number of processes over whose gradients DDP or FSDP takes the mean."""
    over: str = ""
    """Why these processes stopped keeping steps together; empty while they keep them."""
    _missed: int = field(default=0, init=False)
    """Topics in a row that some process did not answer."""
    _agreement: Agreement | None = field(default=None, init=False)
    _store: Any = field(default=None, init=False)
    _line: _Line | None = field(default=None, init=False)

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes."""
        return dist.get_rank() == 0

    def meet(self) -> None:
        """Find the other processes that begin this audit.

        Raises:
            PeersError: not all processes answered within the time limit, or one of them is not audited.
        """
        self._take_number()
        assert self._agreement is not None
        limit = _within(ANSWER_SECONDS)
        settled = self._agreement.settle(MEETING, True, limit)
        if settled.silent:
            raise PeersError(_incomplete(settled.silent, limit), first=_first_of(settled.silent))
        if not settled.yes:
            raise PeersError("another process of this run is not audited; its own message says why")

    def decline(self) -> None:
        """Tell the others that this process begins no audit."""
        self._take_number()
        assert self._agreement is not None
        self._agreement.settle(MEETING, False, 0.0)

    def _take_number(self) -> None:
        """Take the first number in the store under which this audit can meet.

        Each audit has a number of its own; those of earlier audits are closed.
        """
        store = _default_store()
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # an agent's store outlives the processes
        number, rank, size = 0, dist.get_rank(), dist.get_world_size()
        while True:
            self._store = PrefixStore(f"{PREFIX}/{restart}/{number}", store)
            self._agreement = Agreement(self._store, rank, size)
            if not self._agreement.settled(MEETING):
                if not self._agreement.answered(MEETING):
                    return
                self._agreement.settle(MEETING, False, 0.0)  # left open by an earlier audit of this process
            number += 1

    def connect(self) -> None:
        """Connect to the first process; all processes call this, or no process does.

        Raises:
            PeersError: torch has no gloo.
            RuntimeError: a process did not connect within the time limit.
        """
        self._line = _Line(self._store, dist.get_rank(), dist.get_world_size())

    def agree(self, topic: str, yes: bool, limit_s: float | None = None) -> bool:
        """Return whether all processes say yes within the time limit.

        It raises nothing. If the processes stop keeping steps together, `over` says why.
        """
        if self.over or self._agreement is None:
            return False
        limit = _within(ANSWER_SECONDS if limit_s is None else limit_s)
        try:
            settled = self._agreement.settle(topic, yes, limit)
        except RuntimeError as error:
            self._end(f"the store of the process group cannot be reached ({type(error).__name__})", loud=True)
            return False
        self._note(topic, settled, limit)
        return settled.yes

    def _note(self, topic: str, settled: Settled, limit: float) -> None:
        """Log the effect of a missing answer, in one of the processes that answered."""
        self._missed = self._missed + 1 if settled.silent else 0
        if settled.left is not None:
            why = f"rank {settled.left} takes no part any more: its training has ended, or its own message says why"
            self._end(why, loud=_first_of((settled.left,)))
        elif settled.silent:
            why = f"{_ranks(settled.silent)} did not answer within {limit:g} s"
            if self._missed >= MOST_MISSED:
                self._end(f"{why}, {self._missed} times in a row", loud=_first_of(settled.silent))
            elif _first_of(settled.silent):
                logger.warning("%s is not kept: %s; training continues", topic.removeprefix(END_OF), why)

    def _end(self, why: str, *, loud: bool) -> None:
        """Keep no more steps."""
        self.over = why
        if loud:
            logger.warning("no more steps are kept: %s; training continues, and steps that were kept are audited", why)

    def leave(self) -> None:
        """Tell the others that this process takes no part any more.

        Their training continues without the audit.
        """
        agreement, self._agreement = self._agreement, None
        if agreement is not None and not self.over:
            try:
                agreement.leave()
            except RuntimeError as error:
                logger.debug("the others were not told: %s", type(error).__name__)

    def gather(self, truth: Truth) -> Truth:
        """Return the micro-batches of all processes, in the first process.

        They are sorted by rank. Each of the other processes gets only its own.

        Raises:
            RuntimeError: a process did not send within the time limit.
        """
        assert self._line is not None
        everything = self._line.to_first(_packed(truth))
        batches = tuple(batch for packed in everything for batch in _unpacked(packed))
        return replace(truth, micro_batches=batches) if self.first else truth

    def whole(self, shard: Any) -> Tensor:
        """Return a sharded tensor as a whole, in the first process.

        All processes call this; the others get the part that they hold.

        Args:
            shard: a DTensor that `check_layout` let through, or a piece of a flat shard.

        Raises:
            SnapshotError: pieces of flat shards are not the whole tensor.
            RuntimeError: a process did not send within the time limit.
        """
        assert self._line is not None
        own: Tensor = shard.to_local().detach()
        if isinstance(shard, FlatPiece):
            pieces = self._line.to_first(own.cpu())
            return shard.joined(pieces) if self.first else own
        (placement,) = shard.placements
        if placement.is_replicate():
            return own
        pieces = self._line.to_first(own.cpu())
        return torch.cat(pieces, dim=placement.dim) if self.first else own


class _Line:
    """Connections of every process to the first one."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """Connect.

        Args:
            store: of this audit.
            rank: of this process.
            size: how many processes connect.

        Raises:
            PeersError: torch has no gloo.
            RuntimeError: a process did not connect within the time limit.
        """
        if not dist.is_gloo_available():
            raise PeersError("torch was built without gloo, over which the processes of a run send their batches")
        limit = timedelta(seconds=_within(SENDING_SECONDS))
        self._rank, self._size = rank, size
        self._group: Any = dist.ProcessGroupGloo(PrefixStore("line", store), rank, size, limit)

    def to_first(self, mine: Tensor) -> list[Tensor]:
        """Send a tensor on the CPU to the first process.

        Args:
            mine: with the same type and number of dimensions in every process.

        Returns:
            Those of all processes by rank in the first one; nothing in the others.
        """
        mine = mine.contiguous()
        if self._rank:
            self._group.send([torch.tensor(mine.shape, dtype=torch.long)], 0, 0).wait()
            for piece in _pieces(mine):
                self._group.send([piece], 0, 0).wait()
            return []
        return [mine, *(self._received(rank, mine) for rank in range(1, self._size))]

    def _received(self, rank: int, like: Tensor) -> Tensor:
        shape = torch.empty(like.dim(), dtype=torch.long)
        self._group.recv([shape], rank, 0).wait()
        theirs = torch.empty(shape.tolist(), dtype=like.dtype)
        for piece in _pieces(theirs):
            self._group.recv([piece], rank, 0).wait()
        return theirs


def peers_of(processes: int | None = None) -> TorchProcessGroup | None:
    """Return the processes of this run; None if there is only one.

    Args:
        processes: how many the framework says there are; None asks `torch.distributed`.
    """
    if processes is not None and processes < 2:
        return None
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return None
    return TorchProcessGroup(mean_over=dist.get_world_size())


def check_layout(model: nn.Module, called: nn.Module, *, reduced: bool) -> None:
    """Refuse a model that is not divided over all processes alike.

    For such a model it is unknown over which batches the update is the mean.

    Args:
        model: the model itself.
        called: what the loop calls, with its wrappers.
        reduced: whether the update is audited as it is after the processes' gradients were summed.

    Raises:
        SnapshotError: several dimensions of devices, tensor parallelism, or a group that is only a part of the processes;
            FSDP1 with an option that hides the update.
    """
    size = dist.get_world_size()
    _check_flat(model, called, reduced=reduced)
    sharded = any("FSDPModule" in kind.__name__ for m in called.modules() for kind in type(m).__mro__)
    for name, parameter in model.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            continue
        if mesh.ndim != 1 or mesh.size() != size:
            raise SnapshotError(
                f"parameter {name} lies on a device mesh of shape {tuple(mesh.shape)}, and {size} processes train: the audit "
                "needs every process to have a share of the batch, and nothing else to be divided (DDP, or FSDP2 on a mesh of "
                "one dimension over all processes)"
            )
        simple = all(type(p).__name__ in ("Shard", "Replicate") for p in parameter.placements)  # type: ignore[attr-defined]
        if not sharded or not simple:
            raise SnapshotError(
                f"parameter {name} is split by tensor parallelism, where the processes share one batch; train with DDP or FSDP2 to audit"
            )
    for module in (called, *called.modules()):
        group = getattr(module, "process_group", None)
        if reduced and isinstance(group, dist.ProcessGroup) and group.size() != size:
            raise SnapshotError(
                f"gradients are averaged over {group.size()} of {size} processes (`process_group`), so their update is not the "
                "mean over all; use `observe='local'`, or DDP over all processes"
            )


def _check_flat(model: nn.Module, called: nn.Module, *, reduced: bool) -> None:
    """Refuse a model of FSDP1 whose whole gradient cannot be put together.

    Raises:
        SnapshotError: says what hides it.
    """
    if why := flat_refusal(called):
        raise SnapshotError(why)
    if not reduced and any(True for _ in fsdp1_modules(called)):
        raise SnapshotError(
            "FSDP1 sums the gradients of the processes before a hook sees them; use `observe='update'`, or DDP for `observe='local'`"
        )
    if left := unflattened(model, called):
        raise SnapshotError(
            f"FSDP1 leaves {left[0]!r} out (`ignored_states`), so every process trains it alone; freeze it, or let FSDP1 wrap it"
        )


def _default_store() -> Any:
    """Return the store in which the processes of the default group met.

    Torch has no public name for it in 2.6 to 2.13.

    Raises:
        PeersError: the group has no store, as with MPI.
    """
    find = getattr(dist.distributed_c10d, "_get_default_store", None)
    store = None if find is None else find()
    if store is None:
        raise PeersError(
            f"the process group ({dist.get_backend()}) has no store over which its processes could agree; use gloo or nccl"
        )
    return store


def _within(limit_s: float) -> float:
    """Return a time limit that is at most a quarter of the user's own limits."""
    own = [timeout.total_seconds() for timeout in _users_timeouts()]
    return min([limit_s, *(SHARE_OF_TIMEOUT * seconds for seconds in own)])


def _users_timeouts() -> Iterator[timedelta]:
    for kind in ("cpu", "cuda"):
        try:
            found = dist.group.WORLD._get_backend(torch.device(kind)).options._timeout  # type: ignore[union-attr]
        except (AttributeError, RuntimeError):  # no such backend, or one that does not tell
            continue
        if isinstance(found, timedelta):
            yield found


def _incomplete(silent: tuple[int, ...], limit: float) -> str:
    here = tuple(rank for rank in range(dist.get_world_size()) if rank not in silent)
    return (
        f"{_ranks(silent)} did not answer within {limit:g} s, so the audit is on {_ranks(here)} only; add the callback, or "
        "`watch`, on every rank"
    )


def _first_of(others: tuple[int, ...]) -> bool:
    """Return whether this process is the first that is not among some ranks."""
    return dist.get_rank() == min(rank for rank in range(dist.get_world_size()) if rank not in others)


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a contiguous tensor's memory, in pieces that one message can hold."""
    flat = tensor.reshape(-1).view(torch.uint8)
    for start in range(0, len(flat), PIECE):
        yield flat[start : start + PIECE]


def _packed(truth: Truth) -> Tensor:
    """Return micro-batches as the bytes of a safetensors file."""
    return torch.frombuffer(bytearray(safetensors.torch.save(tensors_of(truth))), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> tuple[MicroBatch, ...]:
    return truth_of(safetensors.torch.load(packed.numpy().tobytes())).micro_batches
