"""Comparison of pruned matrices in the rows and columns that are not empty.

Letters: N candidates, M tokens of a candidate at a layer, R rows and C columns of a block.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Formed(NamedTuple):
    """Products of candidates with the block of a pruned matrix."""

    inner: Tensor
    """(1, N) <G, g>, float64."""
    power: Tensor
    """(1, N) |g|^2, float64."""
    gradient: Tensor
    """(N, R, C): g."""


class Block(NamedTuple):
    """The rows and columns in which a pruned matrix is compared."""

    rows: Tensor
    """(R,) indices."""
    columns: Tensor
    """(C,) indices."""
    target: Tensor
    """(R, C): G there."""
    mask: Tensor
    """(R, C) 1 if an entry of G was not pruned, else 0."""

    def formed(self, given: Tensor, output_gradient: Tensor) -> Tensor:
        """Return (N, R, C) candidates' gradients, with zeros where G was pruned.

        They are formed from (N, M, in) inputs and (N, M, out) output gradients.
        """
        return (output_gradient[..., self.rows].transpose(1, 2) @ given[..., self.columns]).mul_(self.mask)

    def products(self, given: Tensor, output_gradient: Tensor) -> Formed:
        """Return the products of candidates with the block.

        The arguments are those of `formed`.
        """
        formed = self.formed(given, output_gradient)
        inner = formed.flatten(1) @ self.target.flatten()
        return Formed(inner.double()[None], formed.square().sum(dim=(1, 2)).double()[None], formed)


def block_of(matrix: Tensor) -> Block:
    """Return the block of a pruned matrix's rows and columns that are not empty."""
    rows, columns = ((matrix != 0).any(dim=dim).nonzero().flatten() for dim in (1, 0))
    target = matrix[rows][:, columns].contiguous()
    return Block(rows, columns, target, (target != 0).to(target))
