"""The span of the attention inputs, read from the update of their layers.

For a linear layer y = W x the update is sum_i dy_i x_i^T: its row space is the span of the inputs x_i of all real
tokens, as long as there are fewer distinct inputs than the hidden size D. Query, key and value layers read the same
inputs, so their updates are stacked.

Source: Petrov et al., DAGER, NeurIPS 2024, Sec. 4.1, which uses one of the three layers. Stacking is ours: a token
whose query has a small gradient may still have a large gradient of its key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.client.noise_level import NoiseLevel
from leakaudit.models.structure import Anatomy

FLOAT32_FLOOR = 3e-7
"""Share of the largest singular value below which a singular value is rounding.
Chosen on training sentences; see docs/decisions/span_constants.md."""

FULL_RANK_MARGIN = 4
"""Number of directions that must stay empty so that the span can test inputs.
Our choice: with fewer, no gap between the singular values can be seen."""

PRUNED_SHARE = 0.02
"""Share of exact zeros above which a matrix counts as pruned.
Our choice: sums of rounded products are hardly ever exactly zero."""

FILLING_TURNS = 80
"""Iterations of `filled_in`.
Chosen on training sentences; see docs/decisions/span_constants.md."""

FIRST_SHRINKAGE = 0.3
"""First shrinkage of `filled_in`, as a share of the largest singular value.
Our choice."""

FILLING_DECAY = 0.95
"""Factor on the shrinkage per iteration.
Our choice: after all iterations it is about a two-hundredth of the largest singular value."""

SHIFT = 1e-13
"""Share of the mean eigenvalue that is added to a Gram matrix whose spectrum was not found.
Our choice: far below rounding."""

LEAST_WEIGHT = 1e-3
"""Weight of the strongest direction if, by theory, noise hides all directions.
Our choice: any positive value gives the same ranking."""


@dataclass(frozen=True)
class Basis:
    """An orthonormal basis of the span."""

    vectors: Tensor
    """(R, D) float64, orthonormal rows."""
    gap: float
    """Ratio of the last kept singular value to the first one left out; large if the rank is certain."""
    noisy: bool
    """Whether noise, rounding or pruning fills all directions, so that the rank is only an estimate."""

    @property
    def rank(self) -> int:
        """Number R of directions."""
        return int(self.vectors.shape[0])


def stacked_update(update: Mapping[str, Tensor], anatomy: Anatomy) -> Tensor:
    """Return (F, D) float64: the updates of all layers that read the attention input.

    Rows are output features. Each layer's update is scaled to Frobenius norm 1; all-zero updates are left out.

    Args:
        update: parameter name -> update.
        anatomy: the layers, with their adapters.
    """
    rows = [gradient for _, gradient in _scaled(update, anatomy)]
    if not rows:
        return torch.zeros(0, anatomy.hidden, dtype=torch.float64)
    return torch.cat(rows)


def told_by(update: Mapping[str, Tensor], anatomy: Anatomy, basis: Basis) -> dict[str, float]:
    """Return parameter name -> its share of the span; the shares sum to 1.

    A direction's squared singular value is the sum of what the layers' rows have of it. A layer's share of the direction is its part of that
    sum, and its share of the span is the mean over the directions, because the test needs every direction alike. Own derivation. Several
    projections within one parameter are added up.

    Args:
        update: parameter name -> update.
        anatomy: the layers, with their adapters.
        basis: the span of the stacked update.

    Returns:
        Shares; empty for a span without a direction.
    """
    parts = [(name, (gradient @ basis.vectors.T).square().sum(dim=0)) for name, gradient in _scaled(update, anatomy)]
    if not basis.rank or not parts:
        return {}
    total = torch.stack([energy for _, energy in parts]).sum(dim=0)  # (R,)
    found: dict[str, float] = {}
    for name, energy in parts:
        found[name] = found.get(name, 0.0) + float((energy / total.clamp_min(1e-300)).mean())
    return found


def _scaled(update: Mapping[str, Tensor], anatomy: Anatomy) -> list[tuple[str, Tensor]]:
    """Return name and (out, D) float64 of each layer, at Frobenius norm 1."""
    layers = [*anatomy.projections, *(adapter.down for adapter in anatomy.adapters)]
    found = [(one.weight, one.by_output(update[one.weight]).double()) for one in layers if one.weight in update]
    return [(name, gradient / norm) for name, gradient in found if (norm := gradient.norm()) > 0]


def span_of(stacked: Tensor, margin: int = FULL_RANK_MARGIN) -> Basis:
    """Return the row space of a stacked update.

    The rank is the number of singular values above their largest gap. They come from the D x D Gram matrix in float64.
    It resolves squares down to 1e-16 of the largest, that is singular values down to 1e-8, which is below the rounding
    of float32 sums.

    Args:
        stacked: (F, D) float64.
        margin: directions that must stay empty for the update to count as free of noise.
    """
    if not bool(stacked.any()):
        return Basis(stacked[:0], gap=1.0, noisy=False)
    values, vectors = spectrum(stacked.T @ stacked)
    singular = values.flip(0).clamp_min(0).sqrt()
    vectors = vectors.flip(1).T  # (D, D) rows by falling singular value
    floor = singular[0] * FLOAT32_FLOOR
    clean = int((singular > floor).sum())
    if clean <= len(singular) - margin:
        rank = _sharpest_fall(singular, clean)
        return Basis(vectors[:rank], gap=float(singular[rank - 1] / singular[rank].clamp_min(1e-300)), noisy=False)
    # Noise fills every direction: keep the directions that are stronger than noise alone.
    rank = _above_noise(singular, stacked.shape)
    return Basis(
        vectors[:rank], gap=float(singular[rank - 1] / singular[rank]) if rank < len(singular) else 1.0, noisy=True
    )


def _sharpest_fall(singular: Tensor, clean: int) -> int:
    """Return the rank at the largest ratio of singular values near the floor.

    The floor alone may drop a weak true direction or keep a strong direction of rounding. So the largest ratio of
    neighbours decides, from 30 times the floor down to a tenth of it. Both factors are our choice: singular values of
    rounding differ by less among each other.
    """
    low = int((singular > 30 * FLOAT32_FLOOR * singular[0]).sum())
    high = int((singular > FLOAT32_FLOOR / 10 * singular[0]).sum())
    candidates = range(max(1, min(low, clean)), min(len(singular) - 1, max(high, clean)) + 1)
    falls = {rank: float(singular[rank - 1] / singular[rank].clamp_min(1e-300)) for rank in candidates}
    return max(falls, key=lambda rank: falls[rank])


def _above_noise(singular: Tensor, shape: torch.Size) -> int:
    """Return how many singular values are larger than noise alone explains.

    The optimal hard threshold for unknown noise is omega(beta) times the median singular value, with omega(b) = 0.56
    b^3 - 0.95 b^2 + 1.82 b + 1.43 (Gavish and Donoho, IEEE Trans. Inf. Theory 2014, Eq. 5).
    """
    short, long = sorted(shape)
    beta = short / long
    omega = 0.56 * beta**3 - 0.95 * beta**2 + 1.82 * beta + 1.43
    return max(1, int((singular > omega * singular.median()).sum()))


@dataclass(frozen=True)
class SoftSpan:
    """Directions of a noisy span, each weighted by its share of signal."""

    vectors: Tensor
    """(R, D) float64, orthonormal rows, by falling weight."""
    weights: Tensor
    """(R,) float64, 0 to 1: expected squared cosine between the direction and the true span."""
    update: Mapping[str, Tensor]
    """Parameter name -> (out, D) float64: the projection's update; pruned entries are filled in."""
    sigma: Mapping[str, float]
    """Parameter name -> standard deviation of the noise per entry of that projection's update."""


def soft_span_of(update: Mapping[str, Tensor], anatomy: Anatomy, declared: NoiseLevel | None = None) -> SoftSpan:
    """Return the directions of a noisy span, each with its share of signal.

    Every projection's update is divided by its own noise, so that its weight is its signal-to-noise ratio and not its
    norm. The stack (F, D) is then A + N with N of unit variance. With beta = D / F, an observed singular value s
    and the true one x are related by

        s^2 / F = (1 + x^2)(beta + x^2) / x^2.

    The observed right singular vector has the squared cosine (x^4 - beta) / (x^4 + beta x^2) with the true one; below
    x^4 = beta it is random (Benaych-Georges and Nadakuditi, J. Multivariate Analysis 2012, Sec. 3.1, with rows and
    columns named as here).

    Args:
        update: parameter name -> update.
        anatomy: the first block's projections.
        declared: noise of each parameter. None, and a projection without declared noise, measures it on that projection's
            update (`noise_of`).
    """
    seen = {
        p.weight: p.by_output(update[p.weight]).double()
        for p in anatomy.projections
        if p.weight in update and bool(update[p.weight].any())
    }
    if not seen:
        return SoftSpan(torch.zeros(0, anatomy.hidden).double(), torch.zeros(0).double(), {}, {})
    if declared is None and any(float((g == 0).double().mean()) > PRUNED_SHARE for g in seen.values()):
        whole = filled_in(torch.cat(list(seen.values())), smallest_kept(update))
        seen = dict(zip(seen, whole.split([len(g) for g in seen.values()]), strict=True))
    noise = {name: (declared.of(name) if declared else 0.0) or noise_of(gradient) for name, gradient in seen.items()}
    stacked = torch.cat([gradient / noise[name] for name, gradient in seen.items()])
    values, vectors = spectrum(stacked.T @ stacked)
    weights = _signal_shares(values.flip(0), stacked.shape)
    # If no direction is above the noise, the strongest one is still the best guess.
    weights[0] = weights[0].clamp_min(LEAST_WEIGHT)
    kept = int((weights > 0).sum())
    return SoftSpan(vectors.flip(1).T[:kept], weights[:kept], seen, noise)


def _signal_shares(values: Tensor, shape: torch.Size) -> Tensor:
    """Return (D,): expected squared cosine of each singular vector with the true span.

    Args:
        values: (D,) eigenvalues s^2 of the Gram matrix, descending, in units of the noise.
        shape: (F, D) of the stacked update.
    """
    power = values.clamp_min(0) / shape[0]  # s^2 / F
    beta = shape[1] / shape[0]
    excess = power - beta - 1.0
    true = (excess + (excess.square() - 4 * beta).clamp_min(0).sqrt()) / 2  # x^2
    cosine = (true.square() - beta) / (true.square() + beta * true).clamp_min(1e-300)
    return torch.where(power > (1 + beta**0.5) ** 2, cosine, 0.0).clamp(0.0, 1.0)


def filled_in(stacked: Tensor, smallest: float) -> Tensor:
    """Return a pruned matrix with its missing entries filled in at low rank.

    Each iteration shrinks the singular values and restores the kept entries; the shrinkage gets smaller each time
    (soft-impute: Mazumder, Hastie and Tibshirani, JMLR 2010, Algorithm 1). Missing entries are clamped to the smallest
    kept magnitude, because pruning keeps the largest.

    Args:
        stacked: (F, D) float64, zero where an entry is missing.
        smallest: smallest magnitude that was kept anywhere.
    """
    kept = stacked != 0
    filled = stacked
    shrinkage = 0.0
    for turn in range(FILLING_TURNS):
        values, vectors = spectrum(filled.T @ filled)
        singular = values.clamp_min(0).sqrt()
        shrinkage = shrinkage * FILLING_DECAY if turn else FIRST_SHRINKAGE * float(singular[-1])
        weights = (1 - shrinkage / singular.clamp_min(1e-300)).clamp_min(0)
        low = (filled @ (vectors * weights)) @ vectors.T
        filled = torch.where(kept, stacked, low.clamp(-smallest, smallest))
    return filled


def spectrum(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ascending eigenvalues and the eigenvectors of a Gram matrix.

    Eigenvectors are columns. The solver may fail on a matrix of mostly zeros, which heavy pruning causes. Then a shift
    far below rounding is added to the diagonal.

    Args:
        gram: (D, D) float64.
    """
    try:
        values, vectors = torch.linalg.eigh(gram)
    except RuntimeError:  # torch's LinAlgError is a RuntimeError
        shift = SHIFT * float(gram.diagonal().mean())
        spread = torch.linspace(0.5, 1.0, len(gram), dtype=gram.dtype, device=gram.device)
        values, vectors = torch.linalg.eigh(gram + torch.diag(shift * spread))
    return values, vectors


def noise_of(gradient: Tensor) -> float:
    """Return the standard deviation of the noise on one matrix; never zero.

    It is the ratio of the median singular value to that of a matrix of unit noise. The median shows the noise because a
    batch fills few directions and noise fills all.

    Args:
        gradient: (out, D) float64.
    """
    least = 1e-9 * float(gradient.norm()) / math.sqrt(gradient.numel()) + 1e-300
    short, long = sorted(gradient.shape)
    gram = gradient @ gradient.T if gradient.shape[0] == short else gradient.T @ gradient
    middle = float(torch.linalg.eigvalsh(gram).clamp_min(0).sqrt().median())
    return max(least, middle / (math.sqrt(long) * _median_singular(short / long)))


def smallest_kept(update: Mapping[str, Tensor]) -> float:
    """Return the smallest non-zero magnitude of an update."""
    found = [float(size[size > 0].min()) for g in update.values() if bool((size := g.abs()).any())]
    return min(found, default=0.0)


def _median_singular(beta: float) -> float:
    """Return the median singular value of an (n, beta n) matrix of unit noise.

    It is in units of sqrt(n). Source: the law of Marchenko and Pastur, 1967.
    """
    low, high = (1 - beta**0.5) ** 2, (1 + beta**0.5) ** 2
    grid = torch.linspace(low**0.5, high**0.5, 4001, dtype=torch.float64)[1:-1]  # in singular values: no pole at zero
    density = ((high - grid.square()) * (grid.square() - low)).clamp_min(0).sqrt() / grid
    mass = density.cumsum(0)
    return float(grid[int((mass < mass[-1] / 2).sum())])
