"""How far an input is from the span of an update, in units of what rounding leaves there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.algorithms.span.subspace import Basis, span_of

ROUNDING_UNITS = 10.0
"""Distance from the second span, in units of what rounding leaves, up to which a prefix is right. Measured on a train split
(GPT-2 and LLaMA shapes, D = 384, up to 358 prefixes): at most 4.4 for true prefixes, 27 and more for prefixes with one wrong
word, early or late."""

FORWARD_ERROR = 3e-7
"""Relative error of an input computed in float32 in a batch of another shape than the client's. Measured: 1e-7 to 3e-7."""


@dataclass(frozen=True)
class ResidualScale:
    """Measures how far an input is from the span of an update, in units of what rounding leaves.

    An update G with noise of deviation e per entry has right singular vectors v_k that lean out of the true span by about
    e / s_k in each of the D - R other directions (first-order perturbation). So a true input x = sum_k c_k v_k is off by
    sqrt((D - R) sum_k (c_k e / s_k)^2), a lot where it needs weak directions; e is read off what lies outside the span.
    (Own derivation.)
    """

    basis: Basis
    perturbation: Tensor
    """(R,) float64: sqrt(D - R) e / s_k."""

    @classmethod
    def of(cls, stacked: Tensor) -> ResidualScale:
        """Measure the noise of a stacked update (F, D), float64."""
        basis = span_of(stacked)
        strength = (stacked @ basis.vectors.T).norm(dim=0)  # (R,)
        outside = stacked - (stacked @ basis.vectors.T) @ basis.vectors
        open_rows, open_columns = stacked.shape[0] - basis.rank, stacked.shape[1] - basis.rank
        noise = outside.norm() / max(1, open_rows * open_columns) ** 0.5
        return cls(basis, max(0, open_columns) ** 0.5 * noise / strength.clamp_min(1e-300))

    @property
    def certainty(self) -> float:
        """The inverse of the largest leaning: how much stronger the weakest direction is than the noise."""
        return 1.0 / max(float(self.perturbation.max()), 1e-300)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return (N,) float64 distances of inputs (N, D); infinite for zero inputs, which lie in every span and leave no trace."""
        inputs = inputs.double()
        inside = inputs @ self.basis.vectors.T
        off = (inputs - inside @ self.basis.vectors).norm(dim=1)
        expected = ((inside * self.perturbation).square().sum(1) + (FORWARD_ERROR * inputs.norm(dim=1)).square()).sqrt()
        return torch.where(expected > 0, off / expected.clamp_min(1e-300), torch.inf)
