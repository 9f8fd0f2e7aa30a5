"""Tensors as a stream in the safetensors format, without a copy of them and without a file.

`safetensors` itself writes to a path that it opens on its own, or to bytes that double the memory; a snapshot is written to a file
that was created for its owner only, and hashed or encrypted on the way, so that nothing in clear needs to touch the disk.

The format (safetensors README, "Format"): 8 bytes little-endian N; N bytes of JSON, name -> {dtype, shape, data_offsets}; then the
data, row-major, little-endian, without holes. The header is padded with spaces to a multiple of 8, as the library does.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
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

PIECE = 1 << 22
"""Bytes handed on at a time: 4 MiB, large enough that writing releases the interpreter for as long as it takes."""


class TensorStream(io.RawIOBase):
    """A read-only stream over tensors; they must not change until it is read."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Lay out the file.

        Args:
            tensors: on the CPU, dense.

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
        """Yield the file's bytes in order, at most 4 MiB at a time, as views of the tensors' own memory."""
        yield memoryview(self._head)
        for tensor in self._tensors.values():
            if not tensor.numel():
                continue
            data = memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            for start in range(0, len(data), PIECE):
                yield data[start : start + PIECE]

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
