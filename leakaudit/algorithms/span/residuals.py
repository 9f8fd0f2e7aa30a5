"""Distance of an input from the span, in units of the rounding error."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.algorithms.span.subspace import Basis, span_of

ROUNDING_UNITS = 10.0
"""Largest distance, in units of rounding, at which an input is in the span.
Chosen on training sentences; see docs/decisions/span_constants.md."""

FORWARD_ERROR = 3e-7
"""Relative error of an input that is computed in float32 in a batch of another shape.
Measured; see docs/decisions/span_constants.md."""


@dataclass(frozen=True)
class ResidualScale:
    """Distances of inputs from the span, in units of rounding.

    Let G (F, D) be an update with noise of standard deviation e per entry, v_k its right singular vectors and s_k its
    singular values. In each of the D - R directions outside the true span, v_k is off by about e / s_k (first-order
    perturbation). So a true input x = sum_k c_k v_k has an expected distance of

        sqrt((D - R) sum_k (c_k e / s_k)^2),

    which is large if x needs weak directions. The noise e is measured on the part of G outside the span. (Own
    derivation.)
    """

    basis: Basis
    """The span, with R directions."""
    perturbation: Tensor
    """(R,) float64: sqrt(D - R) e / s_k, the expected length of each direction's part outside the true span."""

    @classmethod
    def of(cls, stacked: Tensor) -> ResidualScale:
        """Measure the noise of a stacked update (F, D) float64."""
        basis = span_of(stacked)
        strength = (stacked @ basis.vectors.T).norm(dim=0)  # (R,)
        outside = stacked - (stacked @ basis.vectors.T) @ basis.vectors
        open_rows, open_columns = stacked.shape[0] - basis.rank, stacked.shape[1] - basis.rank
        noise = outside.norm() / max(1, open_rows * open_columns) ** 0.5
        return cls(basis, max(0, open_columns) ** 0.5 * noise / strength.clamp_min(1e-300))

    @property
    def certainty(self) -> float:
        """Strength of the weakest direction over the noise."""
        return 1.0 / max(float(self.perturbation.max()), 1e-300)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return (N,) float64 distances of inputs (N, D), in units of rounding.

        A zero input gets infinity: it lies in every span and adds nothing to an update.
        """
        inputs = inputs.double()
        inside = inputs @ self.basis.vectors.T
        off = (inputs - inside @ self.basis.vectors).norm(dim=1)
        expected = ((inside * self.perturbation).square().sum(1) + (FORWARD_ERROR * inputs.norm(dim=1)).square()).sqrt()
        return torch.where(expected > 0, off / expected.clamp_min(1e-300), torch.inf)
