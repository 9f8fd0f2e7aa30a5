"""Candidates: the (token, position) pairs nearest to the span.

Matrix products test every token of the vocabulary at every position. For additive models the attention input is
x(t, p) = gain * (u - mean u) / std u + shift with u = w_t + d_p, the sum of a token vector and a position vector. Let
y = std * x, and B (R, D) the basis. Then |y|^2 and |B y|^2 are quadratic forms in quantities of the token alone, of the
position alone, and of products (V, P) such as w_t . d_p and (B gain w_t) . (B gain d_p). A block of P positions costs
about 2 V P (2 D + R) operations: 0.4 GFLOP for 30,522 tokens, 8 positions and D = 384.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from leakaudit.models.structure import InputStage, Norm

POSITION_BLOCK = 16
"""Positions scanned at once.
Our choice: a (V, 16) float32 intermediate takes about 2 MB at usual vocabularies."""

EMPTY_BLOCKS = 2
"""Number of successive blocks of positions without a candidate after which the scan stops.
DAGER stops at the first empty position, which loses the rest of a sentence if one token is missed. Our choice: it is
very improbable that all tokens of 32 positions are missed."""


@dataclass(frozen=True)
class Candidates:
    """(Token, position) pairs with their distance from the span."""

    tokens: Tensor
    """(N,) token ids."""
    positions: Tensor
    """(N,) positions; zeros where the model's inputs carry no position."""
    distance: Tensor
    """(N,) float64, 0 to 1: |x - B^T B x| / |x|; 0 inside the span."""
    inputs: Tensor
    """(N, D) float64: the attention inputs."""

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.tokens)

    def take(self, index: Tensor) -> Candidates:
        """Return the pairs at `index`."""
        return Candidates(self.tokens[index], self.positions[index], self.distance[index], self.inputs[index])


def distances(inputs: Tensor, basis: Tensor) -> Tensor:
    """Return (N,) |x - B^T B x| / |x|.

    Args:
        inputs: (N, D) float64.
        basis: (R, D) float64, orthonormal rows: B.
    """
    outside = inputs - (inputs @ basis.T) @ basis
    share: Tensor = outside.norm(dim=1) / inputs.norm(dim=1).clamp_min(1e-300)
    return share


@dataclass(frozen=True)
class _TokenSide:
    """Quantities of M tokens that the quadratic forms need, all float32."""

    vectors: Tensor
    """(M, D) w_t."""
    mean: Tensor
    """(M,)"""
    length: Tensor
    """(M,) |w_t|^2."""
    scaled: Tensor
    """(M, D) gain * w_t."""
    scaled_length: Tensor
    projected: Tensor
    """(M, R) B (gain * w_t)."""
    projected_length: Tensor


class Scan:
    """Distances of the whole vocabulary from one span, by blocks of positions."""

    def __init__(
        self, stage: InputStage, basis: Tensor, tokens: Tensor | None, keep: int, always: Sequence[int] = ()
    ) -> None:
        """Prepare what does not depend on positions.

        Args:
            stage: computes attention inputs.
            basis: (R, D) float64, orthonormal rows.
            tokens: (M,) the only token ids to consider, or None for the whole vocabulary.
            keep: candidates per position that are checked again in float64.
            always: token ids that are checked in float64 at every position: special tokens are in every batch.
        """
        self._stage = stage
        self._basis = basis
        self._tokens = torch.arange(stage.vocabulary, device=basis.device) if tokens is None else tokens
        self._keep = min(keep, len(self._tokens))
        self._always = torch.tensor(sorted(always), dtype=torch.long, device=basis.device)

    def block(self, start: int, stop: int) -> Candidates:
        """Return the nearest tokens at the positions from `start` to `stop` - 1.

        Returns:
            At least `keep` pairs per position, or all if there are fewer tokens, with float64 distances; in the order
            of positions and tokens.
        """
        positions = torch.arange(start, stop, device=self._basis.device)
        if self._stage.additive and len(self._tokens) > self._keep:
            nearest = self._nearest_by_products(positions)  # (keep, P)
        elif len(self._tokens) > self._keep:
            nearest = self._nearest_by_running(positions)
        else:
            nearest = self._tokens[:, None].expand(-1, len(positions))
        if len(self._tokens) > self._keep and len(self._always):
            nearest = torch.cat([nearest, self._always[:, None].expand(-1, len(positions))])
        tokens = nearest.T.reshape(-1)
        where = positions.repeat_interleave(nearest.shape[0])
        pairs = torch.unique(torch.stack([where, tokens]), dim=1)  # a token of `always` may also be among the nearest
        where, tokens = pairs[0], pairs[1]
        inputs = self._stage.inputs(tokens, where)
        return Candidates(tokens, where, distances(inputs, self._basis), inputs)

    def _nearest_by_products(self, positions: Tensor) -> Tensor:
        outside = self.outside_share(positions)  # (M, P)
        return self._tokens[outside.topk(self._keep, dim=0, largest=False).indices]

    def outside_share(self, positions: Tensor) -> Tensor:
        """Return (M, P) float32: squared distance from the span over squared norm.

        It is computed by quadratic forms, for additive models only.
        """
        norm = self._stage.norm
        assert norm is not None
        side = self._token_side
        d = self._stage.position_vectors[positions].float()
        gain, shift, basis = norm.gain.float(), norm.shift.float(), self._basis.float()
        mean = side.mean[:, None] + d.mean(1)[None, :] if norm.centred else torch.zeros(len(side.mean), len(d)).to(d)
        power = (side.length[:, None] + 2 * (side.vectors @ d.T) + d.square().sum(1)[None, :]) / d.shape[1]
        std = (power - mean.square() + norm.eps).clamp_min(1e-12).sqrt()
        gd = gain * d
        total = _quadratic(side.scaled_length, gd, gain, shift, mean, std, w_side=side.scaled)
        within = _quadratic(
            side.projected_length, gd @ basis.T, basis @ gain, basis @ shift, mean, std, w_side=side.projected
        )
        return 1.0 - within / total.clamp_min(1e-12)

    @cached_property
    def _token_side(self) -> _TokenSide:
        """Quantities of the tokens alone."""
        norm = self._stage.norm
        assert norm is not None
        vectors = self._stage.token_vectors[self._tokens].float()
        scaled = norm.gain.float() * vectors
        projected = scaled @ self._basis.float().T
        return _TokenSide(
            vectors=vectors,
            mean=vectors.mean(1),
            length=vectors.square().sum(1),
            scaled=scaled,
            scaled_length=scaled.square().sum(1),
            projected=projected,
            projected_length=projected.square().sum(1),
        )

    def _nearest_by_running(self, positions: Tensor) -> Tensor:
        columns = []
        for position in positions:
            found = []
            for chunk in self._tokens.split(8192):
                inputs = self._stage.inputs(chunk, position.expand(len(chunk)))
                found.append(distances(inputs, self._basis))
            columns.append(self._tokens[torch.cat(found).topk(self._keep, largest=False).indices])
        return torch.stack(columns, dim=1)


def _quadratic(
    ww: Tensor, d: Tensor, one: Tensor, shift: Tensor, mean: Tensor, std: Tensor, *, w_side: Tensor
) -> Tensor:
    """Return (M, P): |w + d - mean one + std shift|^2.

    All vectors are already scaled by the gain and projected to K dimensions.

    Args:
        ww: (M,) |w|^2.
        d: (P, K).
        one: (K,) the gain, which the mean multiplies.
        shift: (K,).
        mean: (M, P).
        std: (M, P).
        w_side: (M, K) the vectors w.
    """
    cross = w_side @ torch.cat([d, one[None], shift[None]]).T  # (M, P + 2)
    w_d, w_one, w_shift = cross[:, :-2], cross[:, -2:-1], cross[:, -1:]
    return (
        ww[:, None]
        + d.square().sum(1)[None]
        + mean.square() * (one @ one)
        + std.square() * (shift @ shift)
        + 2 * w_d
        - 2 * mean * (w_one + (d @ one)[None])
        + 2 * std * (w_shift + (d @ shift)[None])
        - 2 * mean * std * (one @ shift)
    )


def quadratic_form(stage: InputStage, matrix: Tensor, positions: Tensor) -> Tensor:
    """Return (V, P) float32: |M x(t, p)|^2 times a factor that depends on (t, p).

    The factor does not depend on M, so the ratio of two such forms at the same (t, p) is exact.

    Args:
        stage: an additive input stage.
        matrix: (K, D): M.
        positions: (P,) int64.
    """
    norm = stage.norm
    assert norm is not None
    vectors = stage.token_vectors.float()
    d, rows = stage.position_vectors[positions].float(), matrix.float()
    gain, shift = norm.gain.float(), norm.shift.float()
    mean, std = moments(norm, vectors, d)
    side = (gain * vectors) @ rows.T
    return _quadratic(side.square().sum(1), (gain * d) @ rows.T, rows @ gain, rows @ shift, mean, std, w_side=side)


def moments(norm: Norm, vectors: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Return (V, P) mean and deviation of w_t + d_p, as the norm uses them.

    Args:
        norm: the normalisation.
        vectors: (V, D) float32, w_t.
        d: (P, D) float32, d_p.
    """
    power = (vectors.square().sum(1)[:, None] + 2 * (vectors @ d.T) + d.square().sum(1)[None]) / d.shape[1]
    mean = vectors.mean(1)[:, None] + d.mean(1)[None] if norm.centred else torch.zeros_like(power)
    return mean, (power - mean.square() + norm.eps).clamp_min(1e-12).sqrt()


def blocks(max_length: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of positions, (start, stop), that cover `max_length` positions."""
    for start in range(0, max_length, POSITION_BLOCK):
        yield start, min(start + POSITION_BLOCK, max_length)


def join(parts: list[Candidates]) -> Candidates:
    """Return all candidates of several blocks, nearest first."""
    tokens = torch.cat([part.tokens for part in parts])
    positions = torch.cat([part.positions for part in parts])
    distance = torch.cat([part.distance for part in parts])
    inputs = torch.cat([part.inputs for part in parts])
    order = distance.argsort(stable=True)
    return Candidates(tokens[order], positions[order], distance[order], inputs[order])
