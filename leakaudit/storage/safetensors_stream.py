"""Tensors as a stream of bytes in the safetensors format, and back.

Neither a second copy of them nor a file is needed.

`safetensors` itself writes to a path that it opens on its own, or to bytes that double the memory; a snapshot is written to a file
that was created for its owner only, and hashed or encrypted on the way, so that nothing in clear needs to touch the disk.

The format (safetensors README, "Format"): 8 bytes little-endian N; N bytes of JSON, name -> {dtype, shape, data_offsets}; then the
data, row-major, little-endian, without holes. The header is padded with spaces to a multiple of 8, as the library does.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from leakaudit.errors import SnapshotError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of the types, as the library spells them."""

TYPES = {name: dtype for dtype, name in DTYPES.items()}
"""The same, the other way round."""

MAX_HEADER_BYTES = 32 * 1024 * 1024
"""Of a safetensors file. Our choice: the largest public models have below 100,000 tensors at about 150 bytes each."""

PIECE = 1 << 22
"""Bytes handed on at a time: 4 MiB, large enough that writing releases the interpreter for as long as it takes."""


class TensorStream(io.RawIOBase):
    """A read-only stream over tensors; they must not change until it is read."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Lay out the file.

        Args:
            tensors: dense; what is on a GPU is fetched a piece at a time.

        Raises:
            SnapshotError: a type that the format has no name for.
        """
        super().__init__()
        # The widest types first, so that every tensor starts at a multiple of its width; the library does the same.
        self._tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
        header: dict[str, Any] = {}
        offset = 0
        for name, tensor in self._tensors.items():
            if tensor.dtype not in DTYPES:
                raise SnapshotError(f"tensor {name!r} is of type {tensor.dtype}, which a snapshot cannot hold")
            size = tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset + size],
            }
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        self.size = len(self._head) + offset
        """Bytes of the whole file."""
        self._pieces = self.pieces()
        self._left = memoryview(b"")

    def pieces(self) -> Iterator[memoryview]:
        """Yield the file's bytes, at most 4 MiB at a time, as views of the tensors."""
        yield memoryview(self._head)
        for tensor in self._tensors.values():
            if not tensor.numel():
                continue
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            for start in range(0, len(flat), PIECE):
                yield memoryview(flat[start : start + PIECE].cpu().numpy().data)

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` as far as the current piece goes; 0 at the end."""
        while not len(self._left):
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._left = piece
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


class TensorSink(io.RawIOBase):
    """A write-only stream that fills tensors from a safetensors file.

    The bytes go into the tensors as they come.
    """

    def __init__(self, read_head: Callable[[bytes], Mapping[str, Any]], most: int) -> None:
        """Begin with nothing.

        Args:
            read_head: makes a header of the first bytes of the file: its length, then so many bytes of JSON.
            most: bytes that the file can have.
        """
        super().__init__()
        self._read_head = read_head
        self._most = most
        self._head = bytearray()
        self._layout: list[tuple[int, int, memoryview]] | None = None
        self._place = 0
        self._next = 0
        self.tensors: dict[str, Tensor] = {}
        """On the CPU; complete once `whole` is true."""
        self.failure: Exception | None = None
        """What was wrong with the header; a library in between puts it into other words."""

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Take the next bytes of the file."""
        left = memoryview(data).cast("B")
        if self._layout is None:
            try:
                left = self._take_head(left)
            except Exception as error:
                self.failure = error
                raise
        while len(left) and self._layout is not None and self._next < len(self._layout):
            start, end, target = self._layout[self._next]
            count = min(len(left), end - self._place)
            target[self._place - start : self._place - start + count] = left[:count]
            self._place, left = self._place + count, left[count:]
            self._next += self._place == end
        self._place += len(left)  # beyond the last tensor: the file is longer than its header says
        return len(data)

    @property
    def whole(self) -> bool:
        """Whether every tensor is filled and nothing came after the last."""
        return self._layout is not None and self._place == (self._layout[-1][1] if self._layout else 0)

    def _take_head(self, data: memoryview) -> memoryview:
        """Read the header once it is there; return what follows it."""
        self._head += data
        size = int.from_bytes(self._head[:8], "little")
        if len(self._head) < 8 or len(self._head) < 8 + size <= 8 + MAX_HEADER_BYTES:
            return memoryview(b"")
        self._lay_out(self._read_head(bytes(self._head[: 8 + size])))
        return memoryview(bytes(self._head[8 + size :]))

    def _lay_out(self, header: Mapping[str, Any]) -> None:
        """Make the tensors of a header.

        Raises:
            ValueError: it leaves holes, or describes more than there can be.
        """
        entries = sorted((e["data_offsets"], n, e) for n, e in header.items() if n != "__metadata__")
        layout, end = [], 0
        for (start, stop), name, entry in entries:
            dtype = TYPES[entry["dtype"]]
            if start != end or stop > self._most or stop - start != math.prod(entry["shape"]) * dtype.itemsize:
                raise ValueError("offsets")
            tensor = torch.empty(entry["shape"], dtype=dtype)
            self.tensors[name], end = tensor, stop
            if stop > start:
                layout.append((start, stop, memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)))
        self._layout = layout
