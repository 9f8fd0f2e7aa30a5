"""Products of candidates with the observed updates of weight matrices.

A comparison computes <G, g>, |g|^2 and their derivatives from pairs (x_t, d_t). An update G of few tokens has few
singular values s_i and vectors l_i, r_i, and products with these are enough:

    <G, g> = sum_i s_i sum_t (r_i . x_t) (l_i . d_t).

With a metric, g is replaced by U g V (`whitening`). The directions of G then have weights w_i, and all others have w_0. So
no other directions are needed:

    <U G V, U g V> = sum_i s_i w_i^2 sum_t (r_i . x_t) (l_i . d_t),
    x_s . V^2 x_t = w_0 x_s . x_t - sum_i (w_0 - w_i) (r_i . x_s) (r_i . x_t),

and the same with U^2 for d_s and d_t. If G is not factored, its rows are the r_i, with l_i = e_i and s_i = 1.

Matrices of one shape are compared together. Each comparison needs two dozen small operations, and to start them takes as long
as to compute them.

Letters: K matrices of one shape, N candidates, M tokens of a candidate at a layer, r directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from leakaudit.algorithms.matching.whitening import metric_of

SPARE = 8
"""Number of columns beyond the expected rank when an update is factored. Our choice (Halko et al. 2011, Sec. 4.2, take 5 to 10)."""

FACTORED = 1e-5
"""Factors replace an update if their relative error is at most this. Our choice: float32 products have such an error; noise and
pruning leave far more."""


class Products(NamedTuple):
    """Products of candidates with a target, kept for the derivatives."""

    inner: Tensor
    """(K, N) <G, g>, float64."""
    power: Tensor
    """(K, N) |g|^2, float64."""
    given: Tensor
    """(K, N, M, in): x_t."""
    output_gradient: Tensor
    """(K, N, M, out): d_t."""
    given_along: Tensor
    """(K, N, M, r): r_i . x_t."""
    gradient_along: Tensor
    """(K, N, M, r): l_i . d_t."""
    of_inputs: Tensor
    """(K, N, M, M): x_s . x_t, in the metric."""
    of_gradients: Tensor
    """(K, N, M, M): d_s . d_t, in the metric."""


class Target(NamedTuple):
    """The updates of K weight matrices of one shape."""

    right: Tensor
    """(K, r, in): r_i."""
    left: Tensor | None
    """(K, r, out): l_i; None for the unit vectors."""
    values: Tensor
    """(K, 1, 1, r): s_i, in a metric s_i w_i^2."""
    power: Tensor
    """(K,) |G|^2, float64, in the metric."""
    absent: Tensor
    """(K, 1, 1, 1): w_0; 1 without a metric."""
    less: Tensor | None
    """(K, 1, 1, r): w_0 - w_i; None without a metric."""

    @classmethod
    def of(cls, matrix: Tensor, tokens: int, *, whitened: bool, sigma: float = 0.0) -> Target:
        """Return the update of one matrix.

        It is factored if that makes products cheaper, or if there is a metric.

        Args:
            matrix: (out, in).
            tokens: M of a whole candidate. This is the rank of an update without noise or pruning. With a metric, only this many
                directions and `SPARE` more are kept.
            whitened: compare in the metric of the update.
            sigma: standard deviation of the noise on every entry, if it is known.
        """
        factors = _factors(matrix, tokens + SPARE, whitened=whitened)
        if factors is None:
            ones = torch.ones(1, 1, 1, len(matrix)).to(matrix)
            return cls(matrix[None], None, ones, matrix.double().square().sum()[None], ones[..., :1], None)
        left, values, right = factors.left[None], factors.values[None, None, None], factors.right[None]
        if not whitened:
            power = factors.values.double().square().sum()
            return cls(right, left, values, power[None], torch.ones_like(values[..., :1]), None)
        metric = metric_of(factors.values, sigma * sum(size**0.5 for size in matrix.shape))
        counted = values * metric.present.square()
        absent = torch.full_like(values[..., :1], metric.absent)
        return cls(right, left, counted, (values * counted).double().sum()[None], absent, absent - metric.present)

    @property
    def shape(self) -> tuple[torch.Size | None, ...]:
        """The shapes that targets must share to be compared together."""
        return tuple(None if part is None else part.shape[1:] for part in self)

    def some(self, which: slice) -> Target:
        """Return the targets of some of the matrices."""
        left, less = (None if part is None else part[which] for part in (self.left, self.less))
        return Target(self.right[which], left, self.values[which], self.power[which], self.absent[which], less)

    def products(self, given: Tensor, output_gradient: Tensor) -> Products:
        """Return the products of candidates with the target.

        Args:
            given: (K, N, M, in): x_t.
            output_gradient: (K, N, M, out): d_t.
        """
        given_along = _product(given, self.right.transpose(1, 2))
        gradient_along = output_gradient if self.left is None else _product(output_gradient, self.left.transpose(1, 2))
        of_inputs, of_gradients = given @ given.transpose(2, 3), output_gradient @ output_gradient.transpose(2, 3)
        if self.less is not None:
            of_inputs = self.absent * of_inputs - (given_along * self.less) @ given_along.transpose(2, 3)
            of_gradients = self.absent * of_gradients - (gradient_along * self.less) @ gradient_along.transpose(2, 3)
        inner = (given_along * self.values * gradient_along).sum(dim=(2, 3), dtype=torch.float64)
        power = (of_inputs * of_gradients).sum(dim=(2, 3), dtype=torch.float64)
        return Products(inner, power, given, output_gradient, given_along, gradient_along, of_inputs, of_gradients)

    def derivatives(self, seen: Products, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the derivatives by x_t, (K, N, M, in), and d_t, (K, N, M, out).

        Args:
            seen: products of the candidates with this target.
            a: (K, N) derivatives of the loss by <G, g>.
            b: (K, N) twice the derivatives of the loss by |g|^2.
        """
        along, own = a[..., None, None] * self.values, b[..., None, None]
        of_gradients, of_inputs = own * seen.of_gradients, own * seen.of_inputs  # (K, N, M, M)
        by_given_along, by_gradient_along = along * seen.gradient_along, along * seen.given_along
        if self.less is not None:
            by_given_along = by_given_along - of_gradients @ (seen.given_along * self.less)
            by_gradient_along = by_gradient_along - of_inputs @ (seen.gradient_along * self.less)
            of_gradients, of_inputs = self.absent * of_gradients, self.absent * of_inputs
        by_given = of_gradients @ seen.given + _product(by_given_along, self.right)
        by_gradient = of_inputs @ seen.output_gradient
        return by_given, by_gradient + (
            by_gradient_along if self.left is None else _product(by_gradient_along, self.left)
        )


def stacked(targets: Sequence[Target]) -> Target:
    """Return one target for the matrices of several targets of one shape."""
    return Target(
        torch.cat([target.right for target in targets]),
        _joined([target.left for target in targets]),
        torch.cat([target.values for target in targets]),
        torch.cat([target.power for target in targets]),
        torch.cat([target.absent for target in targets]),
        _joined([target.less for target in targets]),
    )


def _product(rows: Tensor, matrices: Tensor) -> Tensor:
    """Return (K, N, M, q) from (K, N, M, p) and (K, p, q).

    The matrices are not copied for each candidate.
    """
    return (rows.flatten(1, 2) @ matrices).view(*rows.shape[:3], -1)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there) if there else None


class Factors(NamedTuple):
    """Singular vectors and values of a matrix."""

    left: Tensor
    """(r, out) orthonormal rows."""
    values: Tensor
    """(r,) largest first."""
    right: Tensor
    """(r, in) orthonormal rows."""


def _factors(matrix: Tensor, rank: int, *, whitened: bool) -> Factors | None:
    """Return a matrix's strongest directions, or None.

    None if the matrix is zero. Without `whitened`, also None unless products with them are cheaper and they reproduce the matrix.

    A gradient is a sum over tokens, so few tokens give it a low rank. Its range is that of a few random combinations of
    its columns (Halko et al. 2011, Algorithms 4.1 and 5.1).
    """
    rows, columns = matrix.shape
    cheaper = 2 * rank * (rows + columns) <= rows * columns
    if not (cheaper or whitened) or not bool(matrix.any()):
        return None
    drawn = torch.randn(columns, min(rank, rows, columns), generator=torch.Generator().manual_seed(0)).to(matrix)
    basis, _ = torch.linalg.qr(matrix.double() @ drawn.double())
    left, values, right = torch.linalg.svd(basis.T @ matrix.double(), full_matrices=False)
    left = (basis @ left).T
    if not whitened and float((matrix - left.T * values @ right).norm()) > FACTORED * float(matrix.norm()):
        return None
    return Factors(left.to(matrix), values.to(matrix), right.to(matrix))
