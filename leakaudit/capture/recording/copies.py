"""Memory on the CPU for the copies of a step.

It is allocated once and reused, because fresh memory costs several times as much in page faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leakaudit.capture.processes.process_group import ProcessGroup

POOL_BYTES = 2 * 10**9
"""Most bytes that the copies of a step may take in the trainer's memory. A larger step is written directly from the model, a few
megabytes at a time, while the optimizer waits. Our choice: a machine that trains a model of more than 2 GB has that much to spare."""


def fits_in_memory(size: int) -> bool:
    """Return whether so many bytes may be held beside the training."""
    return size <= POOL_BYTES


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which an update is kept.

    It is the update's own type if that is narrower than float32, else float32.
    """
    return dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32


@dataclass(frozen=True)
class Source:
    """A tensor that is to be copied."""

    tensor: Tensor
    """On any device; dense, sparse or sharded."""
    dtype: torch.dtype
    """Type of the copy."""
    scale: Tensor | None = None
    """What the copy is divided by; None for 1."""

    @property
    def bytes(self) -> int:
        """Size of the copy."""
        return self.tensor.numel() * self.dtype.itemsize


class CopyBuffers:
    """Buffers for the copies of a step, reused from step to step."""

    def __init__(self, group: ProcessGroup | None, *, always_pooled: bool = False) -> None:
        """Prepare; `make` allocates.

        Args:
            group: the processes of a distributed run; only the first one holds copies.
            always_pooled: whether copies are held however large they are.
        """
        self._group = group
        self._always_pooled = always_pooled
        self.tensors: dict[str, Tensor] = {}
        """Key of a source -> its buffer."""
        self.pooled = True
        """Whether the copies of a step are small enough to be held until the writer has written them."""
        self.stream: Any = None
        """CUDA stream on which copies are made; None before the first copy from a GPU."""

    @property
    def held_here(self) -> bool:
        """Whether this process is the one that holds copies."""
        return self._group is None or self._group.first

    def bytes_held(self) -> int:
        """Return the size of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.tensors.values())

    def choose(self, size: int, *, on_gpu: bool) -> None:
        """Decide whether copies of `size` bytes are held in memory."""
        held = 2 * size if on_gpu else size  # pinned memory comes in powers of two: at most twice a tensor's size
        self.pooled = self._always_pooled or fits_in_memory(held)

    def make(self, sources: Iterable[tuple[str, Source]]) -> None:
        """Allocate and touch buffers before training begins.

        Page faults would make the first copy twenty times as slow: 330 ms instead of 15 ms for MiniLM on one thread.
        """
        for key, source in sources:
            self.tensors[key] = _allocate(source)

    def copy(self, sources: Mapping[str, Source], *, on_gpu: bool) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Copy a step.

        Args:
            sources: key -> what to copy.
            on_gpu: whether the model is on a GPU.

        Returns:
            Key -> copy, and a function that waits until the copies have arrived.
        """
        self.choose(sum(source.bytes for source in sources.values()), on_gpu=on_gpu)
        return self.copy_into(sources)

    def copy_into(self, sources: Mapping[str, Source]) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Copy some tensors of a step; the last `choose` decided whether to hold them.

        Copies from a GPU are made on a separate stream, into pinned memory. The training stream waits for them; otherwise the optimizer
        would move weights that are still being read. The training thread does not wait; only the writer waits, for an event.
        """
        device = next((source.tensor.device for source in sources.values() if source.tensor.is_cuda), None)
        if device is None:
            return {key: self.into_buffer(key, source) for key, source in sources.items()}, lambda: None
        if self.stream is None:
            self.stream = torch.cuda.Stream(device)
        training, done = torch.cuda.current_stream(device), torch.cuda.Event()
        self.stream.wait_stream(training)
        try:
            with torch.cuda.stream(self.stream):
                copies = {key: self.into_buffer(key, source) for key, source in sources.items()}
        finally:
            self.stream.record_event(done)
            training.wait_event(done)
        return copies, done.synchronize

    def into_buffer(self, key: str, source: Source) -> Tensor:
        """Copy one tensor into its buffer, or return it as it is where no copy is held."""
        tensor = source.tensor.detach()
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor() if self._group is None else self._group.whole(tensor)
        if not self.held_here:
            return tensor
        if tensor.is_sparse and tensor.sparse_dim() == 1:
            return _copied_rows(tensor.coalesce(), source)
        if tensor.is_sparse:
            tensor = tensor.to_dense()
        if source.scale is not None:
            tensor = tensor / source.scale
        if not self.pooled:
            return tensor.to(source.dtype)  # mostly the tensor itself
        buffer = self.tensors.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != source.dtype:
            buffer = self.tensors[key] = _allocate(Source(tensor, source.dtype))
        return buffer.copy_(tensor, non_blocking=tensor.is_cuda)


def _copied_rows(tensor: Tensor, source: Source) -> Tensor:
    """Return a copy of a coalesced sparse tensor on the CPU."""
    values = tensor.values() if source.scale is None else tensor.values() / source.scale
    return torch.sparse_coo_tensor(
        tensor.indices().cpu(),
        values.to("cpu", source.dtype, copy=True),
        tensor.shape,
        is_coalesced=True,
        check_invariants=False,
    )


def _allocate(source: Source) -> Tensor:
    """Return touched memory for a copy; pinned if it is filled from a GPU."""
    return torch.empty(source.tensor.shape, dtype=source.dtype, pin_memory=source.tensor.is_cuda).fill_(0)
