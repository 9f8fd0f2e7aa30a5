"""The rows of the adapters' A: what they combine, and with which weights.

A's gradient is sum_i (B^T dy_i) x_i^T over the tokens i. Its rows combine the inputs x_i (`row_evidence`); if all inputs are known, they
give the weights B^T dy_i, which are the gradients at A's output. There is one class for a gradient, and one for a first step of Adam.

Letters: N known inputs, F rows of a group of adapters, D inputs of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from leakaudit.algorithms.adam_step import AdamStep, known_rows
from leakaudit.algorithms.span.row_denoising import RepairedRows, repaired_rows
from leakaudit.algorithms.span.row_evidence import RowEvidence
from leakaudit.client.observation import Observation
from leakaudit.models.structure import Adapter

ROUNDING = 3e-7
"""Error of a gradient's entries as a share of their usual size. Our choice: float32 sums."""

OTHERS = 0.1
"""Weight of unknown inputs beside those that rows seem to combine. Our choice: most of these are right."""

DEPENDENT = 1e-5
"""Share of the largest singular value below which inputs count as dependent. Our choice: float32 inputs have errors of 1e-7."""


@dataclass(frozen=True)
class Weights:
    """The weights of N known inputs in F rows."""

    values: Tensor
    """(N, F) float64."""
    errors: Tensor
    """(N, F) float64 standard deviations."""


class AdapterRows(Protocol):
    """The rows of one group of adapters, which read one tensor."""

    def evidence(self, typical: Tensor) -> RowEvidence:
        """Return the rows, ready to be compared with inputs.

        Args:
            typical: (M, D) float64 inputs of the group, of the kind that the rows combine.
        """
        ...

    def refined(self, inputs: Tensor, /) -> AdapterRows | None:
        """Return rows that are estimated again, or None if they are exact.

        Args:
            inputs: (N, D) float64, most of which the rows combine.
        """
        ...

    def weights(self, inputs: Tensor) -> Weights | None:
        """Return the weights of inputs (N, D) float64, or None if these are dependent."""
        ...


@dataclass(frozen=True)
class GradientRows:
    """Rows of a gradient without errors but rounding."""

    rows: Tensor
    """(F, D) float64."""

    @classmethod
    def of(cls, seen: Observation, group: Sequence[Adapter]) -> GradientRows:
        """Return the rows of a group whose update is a gradient."""
        return cls(torch.cat([a.down.by_output(seen.update[a.down.weight]).double() for a in group]))

    def evidence(self, typical: Tensor) -> RowEvidence:
        """Return the principal rows above rounding, with the same error in every entry."""
        even = self.rows / self.rows.norm(dim=1, keepdim=True).clamp_min(1e-300)
        _, strength, directions = torch.linalg.svd(even, full_matrices=False)
        kept = strength > ROUNDING * strength[0]
        rows = strength[kept, None] * directions[kept]
        width = rows.shape[1]
        squared = (ROUNDING * float(strength[0])) ** 2 / width
        errors = squared * torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
        found = RepairedRows(rows, errors.expand(width, -1, -1), torch.ones_like(rows[0]))
        return RowEvidence(found, typical)

    def refined(self, _inputs: Tensor, /) -> None:
        """Return None: the rows are exact up to rounding."""

    def weights(self, inputs: Tensor) -> Weights | None:
        """Return the weights by least squares."""
        inverse = _inverse(inputs)
        if inverse is None:
            return None
        error = ROUNDING * self.rows.square().mean(dim=1).sqrt()
        return Weights((self.rows @ inverse).T, inverse.norm(dim=0)[:, None] * error)


@dataclass(frozen=True)
class StepRows:
    """Rows of a gradient that was estimated from a first step of Adam."""

    step: AdamStep
    group: Sequence[Adapter]
    likely: Tensor | None = None
    """(N, D) float64 inputs that the rows seem to combine."""

    def refined(self, inputs: Tensor, /) -> StepRows:
        """Return the rows with the knowledge of inputs that they seem to combine."""
        return replace(self, likely=inputs)

    def evidence(self, typical: Tensor) -> RowEvidence:
        """Return the rows; imprecise entries are predicted from precise ones.

        First from those of the same row (`_expected`), then from those of other rows (`row_denoising`).
        """
        estimate = self.step.estimate
        gradients = [a.down.by_output(estimate.update[a.down.weight]).double() for a in self.group]
        errors = [self._error(a, gradient) for a, gradient in zip(self.group, gradients, strict=True)]
        usual = typical.T @ typical / len(typical)
        scale = usual.diagonal().sqrt()
        if self.likely is not None:
            usual = OTHERS * usual + self.likely.T @ self.likely / len(self.likely)
        rows, off = _expected(torch.cat(gradients), torch.cat(errors), usual)
        return RowEvidence(repaired_rows(rows, off, scale.clamp_min(1e-6 * float(scale.max()))), typical)

    def weights(self, inputs: Tensor) -> Weights | None:
        """Return the weights; rows in the space of known inputs lose nearly all rounding."""
        inverse = _inverse(inputs)
        if inverse is None:
            return None
        basis = torch.linalg.qr(inputs.T)[0].T
        found = [self._known(adapter, basis) for adapter in self.group]
        rows, error = torch.cat([rows for rows, _ in found]), torch.cat([error for _, error in found])
        return Weights((rows @ inverse).T, inverse.norm(dim=0)[:, None] * error)

    def _known(self, adapter: Adapter, basis: Tensor) -> tuple[Tensor, Tensor]:
        name = adapter.down.weight
        moved, off = (adapter.down.by_output(part).double() for part in self.step.moved(name))
        return known_rows(moved, off, self.step.eps(name), basis)

    def _error(self, adapter: Adapter, gradient: Tensor) -> Tensor:
        name = adapter.down.weight
        if name in self.step.estimate.error:
            return adapter.down.by_output(self.step.estimate.error[name]).double()
        return torch.full_like(gradient, ROUNDING * float(gradient.square().mean().sqrt()))


def _expected(rows: Tensor, errors: Tensor, usual: Tensor) -> tuple[Tensor, Tensor]:
    """Return the expectation of imprecise rows (F, D), with its errors.

    A row combines inputs, so before it is seen it is normal with the inputs' second moments, up to its size.

    Args:
        rows: the imprecise rows.
        errors: (F, D) standard deviation of each entry.
        usual: (D, D) second moments of the inputs.
    """
    means, left = [], []
    for row, error in zip(rows, errors, strict=True):
        prior = float(row.square().median() / usual.diagonal().median()) * usual
        noise = error.square() + (ROUNDING * row.abs().median()).square()
        gain = torch.linalg.solve(prior + torch.diag(noise), prior)  # (D, D)
        means.append(row @ gain)
        left.append((prior.diagonal() - (prior * gain).sum(dim=0)).clamp_min(0.0).sqrt())
    return torch.stack(means), torch.stack(left).clamp_min(1e-300)


def _inverse(inputs: Tensor) -> Tensor | None:
    """Return the (D, N) pseudoinverse of inputs, or None if they are dependent."""
    left, strength, right = torch.linalg.svd(inputs, full_matrices=False)
    if len(inputs) > inputs.shape[1] or float(strength[-1]) < DEPENDENT * float(strength[0]):
        return None
    inverse: Tensor = right.T @ (left / strength).T
    return inverse
