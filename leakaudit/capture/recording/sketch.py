"""Short linear summaries of tensors.

Two sketches are enough to estimate the length of the difference of two tensors that are no longer held.

Source: the count sketch of Charikar, Chen and Farach-Colton, "Finding frequent items in data streams", 2002, Sec. 3: each entry is
added with a random sign to one of m buckets. Our variant lays the entries out in rows of m and rotates each row by a random shift; the
sign of an entry is the product of a sign of its row and a sign of its column. As in the source, two entries fall into the same bucket
with probability 1/m, and the product of their signs has mean 0, so E |sketch(x)|^2 = |x|^2. Our variant adds each row as a whole and
computes no hash for an entry.

The standard error of |sketch(x)|^2 is at most sqrt(2 / m) |x|^2 (the second moment of pairs in the same bucket, summed over all pairs).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

BUCKETS = 1 << 14
"""The number m. Our choice: 64 KB a tensor, a thousandth of a large one, for a standard error of 0.6 % of the length of a difference."""

ROWS = 16
"""Number of rows that are summed in float32 before the sum is added to one in float64. Our choice: 1 MB, which stays in a processor's
cache."""


def sketch(name: str, tensor: Tensor) -> Tensor:
    """Return the sketch of a tensor, the same on every device and in every process.

    Args:
        name: determines the signs and shifts, together with the number of entries.
        tensor: of any shape and floating type.

    Returns:
        (m,) float32 on the tensor's device, where m is the smaller of `BUCKETS` and the number of entries. The sketch is linear: that of
        a difference is the difference of the sketches, up to rounding.
    """
    flat = tensor.detach().reshape(-1)
    m = min(BUCKETS, flat.numel())
    out = torch.zeros(m, dtype=torch.float64, device=flat.device)
    if not m:
        return out.float()
    rows = math.ceil(flat.numel() / m)
    row_signs, column_signs, shifts = _draw(name, rows, m)
    wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
    column_signs = column_signs.to(flat.device, wide)
    for start in range(0, rows, ROWS):
        part = flat[start * m : (start + ROWS) * m]
        whole = len(part) - len(part) % m
        signed = torch.mul(part[:whole].view(-1, m), column_signs)
        some = torch.zeros_like(column_signs)
        for number, row in enumerate(signed, start):
            _add_rotated(some, row, shifts[number], row_signs[number])
        if whole < len(part):
            rest = torch.zeros_like(column_signs)
            rest[: len(part) - whole] = part[whole:] * column_signs[: len(part) - whole]
            _add_rotated(some, rest, shifts[-1], row_signs[-1])
        out += some
    return out.float()


def _add_rotated(out: Tensor, row: Tensor, shift: int, sign: int) -> None:
    """Add a row to `out`, rotated to the right by `shift`."""
    out[shift:].add_(row[: len(row) - shift], alpha=sign)
    out[:shift].add_(row[len(row) - shift :], alpha=sign)


def _draw(name: str, rows: int, m: int) -> tuple[list[int], Tensor, list[int]]:
    """Return signs of rows, signs of columns (m,), and shifts of rows for a name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    signs = torch.randint(0, 2, (rows + m,), generator=generator).mul_(2).sub_(1)
    return signs[:rows].tolist(), signs[rows:], torch.randint(0, m, (rows,), generator=generator).tolist()


def distance(sketches: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> tuple[float, float]:
    """Estimate how far a kept update was from another one, relative to that one.

    Args:
        sketches: parameter name -> sketch of the kept update.
        update: parameter name -> the other update, as a whole; of the same parameters.

    Returns:
        The relative error |kept - update| / |update|, and the standard error of that estimate.

    Raises:
        ValueError: the two name different parameters.
    """
    if sketches.keys() != update.keys():
        first = min(sketches.keys() ^ update.keys())
        raise ValueError(f"{len(sketches)} sketches and {len(update)} updates; only one of them has {first!r}")
    squares = [
        float((sketches[n].double() - sketch(n, g).to(sketches[n].device)).square().sum()) for n, g in update.items()
    ]
    whole = math.fsum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in update.values())
    error = math.sqrt(math.fsum(squares) / whole) if whole else float("inf")
    spread = [square * math.sqrt(2 / max(1, len(sketches[n]))) for square, n in zip(squares, update, strict=True)]
    return error, math.hypot(*spread) / (2 * error * whole) if whole and error else 0.0
