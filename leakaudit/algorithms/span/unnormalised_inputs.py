"""Sums of token and position vectors, before the first normalisation.

With dropout before the normalisation, the masked sum u lies in a space that follows from the span of the update by
undoing the normalisation (`widened`). Candidates are sums of token and position vectors (`SumScan`). See
`readers.early_dropout` for the derivation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leakaudit.algorithms.span.candidates import Candidates, distances
from leakaudit.models.structure import InputStage, Norm

LEAST_GAIN = 1e-3
"""Least gain of a coordinate, as a share of the median gain; smaller gains are replaced by it.
Our choice: such coordinates give no information about the input."""


def widened(basis: Tensor, norm: Norm) -> Tensor:
    """Return an orthonormal basis (R + 2, D) of the space of masked sums.

    Args:
        basis: (R, D) float64, orthonormal rows: the span of the attention inputs.
        norm: the normalisation. Without centring (RMSNorm) the vector of ones is not needed; without shift, c / g is
            not.
    """
    gain = norm.gain.clone()
    floor = LEAST_GAIN * gain.abs().median()
    gain = torch.where(gain.abs() < floor, floor, gain)
    rows = [basis / gain]
    if bool(norm.shift.any()):
        rows.append((norm.shift / gain)[None])
    if norm.centred:
        rows.append(torch.ones_like(gain)[None])
    stacked = torch.cat([part / part.norm(dim=1, keepdim=True) for part in rows])
    orthonormal: Tensor = torch.linalg.qr(stacked.T).Q.T
    return orthonormal


class SumScan:
    """Distances of sums of token and position vectors from one space."""

    def __init__(self, stage: InputStage, basis: Tensor, tokens: Tensor | None, keep: int) -> None:
        """Prepare what does not depend on positions.

        Args:
            stage: gives the vectors.
            basis: (R, D) float64, orthonormal rows.
            tokens: (M,) the only token ids to consider, or None for the whole vocabulary.
            keep: candidates per position.
        """
        self._stage = stage
        self._basis = basis
        self._tokens = torch.arange(stage.vocabulary, device=basis.device) if tokens is None else tokens
        self._keep = min(keep, len(self._tokens))
        self._vectors = stage.token_vectors[self._tokens].float()  # (M, D)
        self._inside = self._vectors @ basis.T.float()  # (M, R)

    def block(self, start: int, stop: int) -> Candidates:
        """Return the nearest tokens at the positions from `start` to `stop` - 1.

        Returns:
            `keep` pairs per position, the nearest of each position first; their inputs are the sums, float64.
        """
        d = self._stage.position_vectors[start:stop]  # (P, D)
        total = _squares(self._vectors, d.float())
        within = _squares(self._inside, (d @ self._basis.T).float())
        share = 1.0 - within / total.clamp_min(1e-12)
        nearest = share.topk(self._keep, dim=0, largest=False).indices  # (keep, P)
        tokens = self._tokens[nearest.T.reshape(-1)]
        where = torch.arange(start, stop, device=tokens.device).repeat_interleave(self._keep)
        inputs = self._stage.token_vectors[tokens].double() + self._stage.position_vectors[where]
        return Candidates(tokens, where, distances(inputs, self._basis), inputs)


def _squares(w: Tensor, d: Tensor) -> Tensor:
    """Return (M, P): |w + d|^2."""
    sums: Tensor = w.square().sum(1)[:, None] + 2 * (w @ d.T) + d.square().sum(1)[None]
    return sums
