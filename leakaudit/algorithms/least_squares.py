"""Least squares that gives the same on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def solve_least_squares(matrix: Tensor, wanted: Tensor, *, rcond: float | None = None) -> Tensor:
    """Return the shortest x that minimises |matrix x - wanted|, computed on the CPU.

    torch solves least squares on a GPU only for a matrix of full rank, without saying so. The singular value decomposition of LAPACK
    (`gelsd`) also serves matrices with dependent columns.

    Args:
        matrix: (..., M, N), float32 or float64.
        wanted: (..., M, K) of the same type.
        rcond: singular values below this share of the largest one count as zero; None for the type's precision times max(M, N).

    Returns:
        (..., N, K), on the device of `matrix`.

    >>> x = solve_least_squares(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0]]))
    >>> torch.allclose(x, torch.ones(2, 1))
    True
    """
    solved: Tensor = torch.linalg.lstsq(matrix.cpu(), wanted.cpu(), rcond=rcond, driver="gelsd").solution
    return solved.to(matrix.device)
