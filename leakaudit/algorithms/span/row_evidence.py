"""Evidence that an input is one of those that the rows of an update combine.

Rows G = C X + errors combine the inputs X (T, D) with unknown weights C. If the weights may be anything and the inputs that are not yet
known look like other inputs of the model (covariance K), then the rows known up to the weights have the likelihood

    |G' G'^T + N|^(-(D - k) / 2),        G' = G K^(-1/2) without its part in the span of the k known inputs,

where N is the covariance of the errors over the rows. A candidate input a (whitened and without that part) adds

    -(D - k) / 2 log(1 - |H a|^2 / |a|^2),        H = (G' G'^T + N)^(-1/2) G',

nats. With exact rows and fewer inputs than rows it is the test of the span; with more inputs it is a statistic. (Own derivation: the
determinant is that of a matrix-t distribution.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.algorithms.span.row_denoising import RepairedRows

KNOWN = 1e-3
"""Share of a candidate's squared length outside the known inputs' span below which it adds nothing. Our choice."""


SAME = 1e-5
"""Share of an input's squared length outside the known inputs' span below which it is one of them.
Our choice: float32 leaves 1e-6 after whitening."""


class RowEvidence:
    """The rows of one layer, whitened."""

    def __init__(self, found: RepairedRows, typical: Tensor) -> None:
        """Whiten the rows.

        Args:
            found: rows with their errors.
            typical: (M, D) inputs of the layer on other texts.
        """
        typical = typical.double()
        width = found.rows.shape[1]
        squared = found.scale.square()
        share = found.errors.diagonal(dim1=1, dim2=2).sum() / (found.rows / found.scale).square().sum().clamp_min(
            1e-300
        )
        usual = typical.T @ typical / len(typical)
        usual = usual + torch.diag(share * squared * (usual.trace() / squared.sum()) + 1e-10 * usual.trace() / width)
        values, vectors = torch.linalg.eigh(usual)
        self._whiten = vectors @ torch.diag(values.clamp_min(1e-300).rsqrt()) @ vectors.T
        self.rows = found.rows @ self._whiten  # (F, D)
        noise = torch.einsum("d,dij->ij", self._whiten.square().sum(dim=0) * squared, found.errors)
        eye = torch.eye(len(noise), dtype=noise.dtype, device=noise.device)
        self.noise = noise + (1e-9 * noise.trace() / len(noise) + 1e-300) * eye  # (F, F)

    def whitened(self, inputs: Tensor) -> Tensor:
        """Return inputs (..., D) in the coordinates of the rows, float64."""
        found: Tensor = inputs.double() @ self._whiten
        return found


@dataclass(frozen=True)
class Explained:
    """The inputs that are known in every layer, and the rows without them."""

    layers: Sequence[RowEvidence]
    axes: tuple[Tensor, ...]
    """For each layer (k, D): orthonormal rows that span the known inputs."""
    left: tuple[Tensor, ...]
    """For each layer (F, D): the rows outside that span."""
    readers: tuple[Tensor, ...]
    """For each layer (F, D): H of the module's docstring."""

    @staticmethod
    def nothing(layers: Sequence[RowEvidence]) -> Explained:
        """Return the start, at which no input is known."""
        axes = tuple(layer.rows[:0] for layer in layers)
        left = tuple(layer.rows for layer in layers)
        return Explained(layers, axes, left, tuple(map(_reader, layers, left)))

    def gain(self, layer: int, candidates: Tensor) -> Tensor:
        """Return (N,) nats that candidates add.

        Args:
            layer: index of the layer.
            candidates: (N, D) whitened inputs.
        """
        axes = self.axes[layer]
        length = candidates.square().sum(dim=1)
        outside = length - (candidates @ axes.T).square().sum(dim=1)
        share = (candidates @ self.readers[layer].T).square().sum(dim=1) / outside.clamp_min(1e-300)
        nats = -0.5 * (candidates.shape[1] - len(axes)) * torch.log1p(-share.clamp(max=1 - 1e-12))
        return torch.where(outside > KNOWN * length, nats, torch.zeros_like(nats))

    def nats(self, layer: int, share: float) -> float:
        """Return the nats of a candidate whose share |H a|^2 / |a|^2 is known."""
        axes = self.axes[layer]
        return -0.5 * (axes.shape[1] - len(axes)) * math.log1p(-min(share, 1 - 1e-12))

    def chance(self, layer: int, candidates: int) -> float:
        """Return the nats that the best of some wrong candidates adds by chance.

        A wrong candidate's share is that of a random direction in as many dimensions as the rows have above their errors, so that twice
        its nats are nearly chi-squared. The bound is that of Laurent and Massart (2000, Lemma 1).
        """
        signals = float(self.readers[layer].square().sum())
        tail = math.log(candidates)
        return 0.5 * float(signals + 2 * (signals * tail) ** 0.5 + 2 * tail)

    def with_inputs(self, inputs: Sequence[Tensor]) -> Explained:
        """Return this with one more known input in each layer.

        Args:
            inputs: for each layer (D,) raw inputs.
        """
        axes, left, readers = list(self.axes), list(self.left), list(self.readers)
        for index, (layer, given) in enumerate(zip(self.layers, inputs, strict=True)):
            whole = layer.whitened(given)
            rest = whole
            for _ in range(2):  # twice, because one projection is not orthogonal to rounding
                rest = rest - (rest @ axes[index].T) @ axes[index]
            if float(rest.square().sum()) <= SAME * float(whole.square().sum()):
                continue
            rest = rest / rest.norm()
            axes[index] = torch.cat([axes[index], rest[None]])
            left[index] = left[index] - torch.outer(left[index] @ rest, rest)
            readers[index] = _reader(layer, left[index])
        return Explained(self.layers, tuple(axes), tuple(left), tuple(readers))


def _reader(layer: RowEvidence, left: Tensor) -> Tensor:
    """Return (F, D): H of the module's docstring."""
    factor = torch.linalg.cholesky(left @ left.T + layer.noise)
    reader: Tensor = torch.linalg.solve_triangular(factor, left, upper=False)
    return reader
