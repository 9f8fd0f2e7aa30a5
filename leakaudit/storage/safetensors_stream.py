"""Streams that write and read tensors in the safetensors format.

They need neither a second copy of the tensors nor a file.

The library `safetensors` writes to a path that it opens itself, or to bytes that double the memory. A snapshot is instead written to a file
that only its owner can read. Its bytes are hashed or encrypted before they are written, so no unencrypted byte needs to reach the disk.

The format (safetensors README, "Format"): 8 bytes little-endian N; N bytes of JSON, name -> {dtype, shape, data_offsets}; then the
data, row-major, little-endian, without gaps. The header is padded with spaces to a multiple of 8, as in the library.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
"""Torch's type -> name of the type in the library."""

TYPES = {name: dtype for dtype, name in DTYPES.items()}
"""Name of the type in the library -> torch's type."""

MAX_HEADER_BYTES = 32 * 1024 * 1024
"""Most bytes of a file's header. Our choice: the largest public models have below 100,000 tensors at about 150 bytes each."""

PIECE = 1 << 22
"""Bytes of a piece: 4 MiB, large enough that the interpreter's lock is free for almost all of the time of writing."""


@dataclass(frozen=True)
class MadeLater:
    """A tensor that is made when its bytes are written, and not held afterwards."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    def numel(self) -> int:
        """Return the number of entries."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Return the size of an entry in bytes."""
        return self.dtype.itemsize

    def detach(self) -> Tensor:
        """Make the tensor."""
        return self.make().detach()


class TensorStream(io.RawIOBase):
    """A read-only stream over tensors, which must not change until it is read."""

    def __init__(self, tensors: Mapping[str, Tensor | MadeLater]) -> None:
        """Make the header of the file.

        Args:
            tensors: dense tensors; those on a GPU are copied piece by piece.

        Raises:
            SnapshotError: the format has no name for the type of a tensor.
        """
        super().__init__()
        # The widest types are first, so that every tensor starts at a multiple of its width, as in the library.
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
        """Size of the whole file in bytes."""
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
        """Copy bytes of one piece into `buffer` and return their number; 0 at the end."""
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

    The bytes are written directly into the tensors.
    """

    def __init__(self, read_head: Callable[[bytes], Mapping[str, Any]], most: int) -> None:
        """Begin without any bytes.

        Args:
            read_head: function from the first bytes of the file to its header; they are the length, then as many bytes of JSON.
            most: largest possible number of bytes of the file.
        """
        super().__init__()
        self._read_head = read_head
        self._most = most
        self._head = bytearray()
        self._layout: list[tuple[int, int, memoryview]] | None = None
        self._place = 0
        self._next = 0
        self.tensors: dict[str, Tensor] = {}
        """Name -> tensor on the CPU; complete when `whole` is true."""
        self.failure: Exception | None = None
        """Exception of the header; a library between may replace it by its own exception."""

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Add the next bytes of the file."""
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
        self._place += len(left)  # bytes after the last tensor: the file is longer than its header says
        return len(data)

    @property
    def whole(self) -> bool:
        """Whether every tensor is filled and no bytes followed the last one."""
        return self._layout is not None and self._place == (self._layout[-1][1] if self._layout else 0)

    def _take_head(self, data: memoryview) -> memoryview:
        """Read the header once it is complete; return the bytes after it."""
        self._head += data
        size = int.from_bytes(self._head[:8], "little")
        if len(self._head) < 8 or len(self._head) < 8 + size <= 8 + MAX_HEADER_BYTES:
            return memoryview(b"")
        self._lay_out(self._read_head(bytes(self._head[: 8 + size])))
        return memoryview(bytes(self._head[8 + size :]))

    def _lay_out(self, header: Mapping[str, Any]) -> None:
        """Create the tensors that a header describes.

        Raises:
            ValueError: the header leaves gaps, or describes more bytes than the file can have.
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
