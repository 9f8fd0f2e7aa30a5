"""Scores of every token at every position, against a noisy update.

With noise no (token, position) pair lies exactly in the span, so pairs are ranked and no threshold is needed. There are
two scores, both in standard deviations over the vocabulary at that position:

- `soft`: the share of the attention input x that lies in the span, each direction weighted by its share of signal.
- `filtered`: simulation gives the output gradients D (T, F) of a hypothesis. Then the update is G = D^T X + noise,
  linear in the inputs X (T, D). Ridge regression around the vocabulary's mean input m_p (the rows of M) gives the most
  likely X = M + (D D^T + sigma^2 / tau^2)^-1 D (G - D^T M), with tau^2 the variance of a coordinate over the
  vocabulary. The score of a token at p is the cosine of x - m_p with row p of X - M. This score finds the missing words
  of a hypothesis that is partly right, because noise is averaged over all F features at once.

(Own derivation.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from leakaudit.algorithms.span.candidates import Scan, moments
from leakaudit.models.structure import InputStage

SAMPLE = 2048
"""Tokens, evenly spaced, from which mean and variance at a position are estimated.
Our choice: the mean then has an error of a fortieth of a deviation."""


@dataclass(frozen=True)
class Ranking:
    """Scores of all V tokens at the first P positions against one noisy update."""

    stage: InputStage
    """Computes attention inputs."""
    positions: int
    """P."""
    soft: Tensor
    """(V, P) float32: standard deviations above the vocabulary's mean at that position."""

    @classmethod
    def of(cls, stage: InputStage, vectors: Tensor, weights: Tensor, positions: int) -> Ranking:
        """Score all tokens against weighted directions.

        Args:
            stage: computes attention inputs.
            vectors: (R, D) float64, orthonormal rows.
            weights: (R,) float64, 0 to 1.
            positions: P.
        """
        rows = weights.sqrt()[:, None] * vectors
        where = torch.arange(positions, device=vectors.device)
        if stage.additive:
            share = 1.0 - Scan(stage, rows, None, keep=1).outside_share(where)
        else:
            share = torch.stack([_share(stage, rows, int(p)) for p in where], dim=1)
        return cls(stage, positions, standardised(share))

    @cached_property
    def _mean(self) -> Tensor:
        """(P, D) float64: the vocabulary's mean input at each position."""
        return self._sampled[0]

    @cached_property
    def _sampled(self) -> tuple[Tensor, float]:
        tokens = torch.linspace(0, self.stage.vocabulary - 1, min(SAMPLE, self.stage.vocabulary)).long()
        tokens = tokens.to(self.stage.device)
        means, spread = [], 0.0
        for position in range(self.positions):
            x = self.stage.inputs(tokens, torch.full_like(tokens, position))
            means.append(x.mean(0))
            spread += float(x.var(0, correction=0).mean())
        return torch.stack(means), spread / self.positions

    def filtered(self, gradients: Tensor, update: Tensor) -> Tensor:
        """Score all tokens at the positions of one hypothesis, given its output gradients.

        Args:
            gradients: (T, F) float64, of the first block's projections, in units of the noise of the update's entries.
            update: (F, D) float64, the observed update in the same units.

        Returns:
            (V, T) float32, standard deviations over the vocabulary.
        """
        length = len(gradients)
        mean, spread = self._mean[:length], self._sampled[1]
        ridge = torch.eye(length, dtype=gradients.dtype, device=gradients.device) / max(spread, 1e-300)
        change = torch.linalg.solve(
            gradients @ gradients.T + ridge, gradients @ (update - gradients.T @ mean)
        )  # (T, D): most likely x - m
        inner = self.inner_products(change)  # (V, T): x . change
        inner = inner - (mean * change).sum(1).float()
        size = (
            self.squared_norms[:, :length] - 2 * self._by_mean[:, :length] + mean.square().sum(1).float()
        ).clamp_min(1e-9)
        return standardised(inner * size.rsqrt())

    @cached_property
    def _by_mean(self) -> Tensor:
        """(V, P): x . m_p."""
        return self.inner_products(self._mean)

    @cached_property
    def squared_norms(self) -> Tensor:
        """(V, P): |x|^2 of every token at every position."""
        if not self.stage.additive:
            columns = [_inputs(self.stage, p).square().sum(1) for p in range(self.positions)]
            return torch.stack(columns, dim=1).float()
        # A quadratic form with the identity as basis is slow, so |x|^2 is
        # computed from linear forms: x = gain * (w + d - mean) / std + shift.
        norm = self.stage.norm
        assert norm is not None
        gain, shift = norm.gain.float(), norm.shift.float()
        mean, std = self._moments
        w = self.stage.token_vectors.float()
        d = self.stage.position_vectors[: self.positions].float()
        g2 = gain.square()
        # |gain * (u - mean)|^2 with u = w + d
        square = (w.square() @ g2)[:, None] + (d.square() @ g2)[None] + 2 * (w * g2) @ d.T
        first = (w @ g2)[:, None] + (d @ g2)[None]
        inside = square - 2 * mean * first + mean.square() * g2.sum()
        cross = (w @ (gain * shift))[:, None] + (d @ (gain * shift))[None] - mean * (gain @ shift)
        return inside / std.square() + 2 * cross / std + shift @ shift

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        """(V, P) mean and standard deviation of w_t + d_p, as the normalisation uses them."""
        norm = self.stage.norm
        assert norm is not None
        vectors, places = self.stage.token_vectors, self.stage.position_vectors[: self.positions]
        return moments(norm, vectors.float(), places.float())

    def inner_products(self, rows: Tensor) -> Tensor:
        """Return (V, T) float32: x(t, p) . row_p for rows (T, D)."""
        if not self.stage.additive:
            columns = [_inputs(self.stage, p) @ row for p, row in enumerate(rows)]
            return torch.stack(columns, dim=1).float()
        norm = self.stage.norm
        assert norm is not None
        rows = rows.float()
        length = len(rows)
        mean, std = (m[:, :length] for m in self._moments)
        scaled = rows * norm.gain.float()
        d = self.stage.position_vectors[:length].float()
        inner = self.stage.token_vectors.float() @ scaled.T + (d * scaled).sum(1) - mean * scaled.sum(1)
        return inner / std + rows @ norm.shift.float()


def standardised(scores: Tensor) -> Tensor:
    """Return scores (V, P) in standard deviations from the mean at each position."""
    return (scores - scores.mean(0)) / scores.std(0).clamp_min(1e-12)


def _inputs(stage: InputStage, position: int) -> Tensor:
    tokens = torch.arange(stage.vocabulary, device=stage.device)
    return stage.inputs(tokens, torch.full_like(tokens, position))


def _share(stage: InputStage, rows: Tensor, position: int) -> Tensor:
    x = _inputs(stage, position)
    return ((x @ rows.T).square().sum(1) / x.square().sum(1).clamp_min(1e-300)).float()
