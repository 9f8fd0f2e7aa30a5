"""Features at the input of a wide pooler, by moments of its update.

The new outputs j = 1..m of the pooler have weights w_j = s v_j with v_j standard normal, activation f and no bias. All of
them enter the logit of class c with the same constant. So the update of w_j is (Beyond Gradient and Priors, Appendix B, Eq. 7)

    g_j = sum_i r_i f'(w_j . x_i) x_i,        r_i = (1 / B) sum_c (p_i(c) - y_i(c)) c / m

with x_i the feature of sequence i, and by Stein's lemma (Eq. 8 to 12)

    sum_j g_j (x) (v_j (x) v_j - I)  ->  m s^2 sum_i r_i E[f'''(s v . x_i)] x_i (x) x_i (x) x_i,

a symmetric tensor whose decomposition gives the x_i up to their lengths. There are three estimates. Each is more exact
than the one before:

- `paper`: the tensor over the d' features that the new outputs use is symmetrised (Appendix B) and decomposed.
- `span` (ours): the g_j are exact combinations of the B features. So the span of the features is known without error, and
  the tensor is formed only in the B coordinates of the span. This removes the noise outside of it, which a finite m causes. Features
  have all D coordinates, because the combination of the first d' of them holds for the others as well.
- `solve` (ours): the result of `span` is a start from which the equations for g_j are solved for x_i and r_i by least
  squares. They hold exactly, so they also give lengths and signs.

Letters: B sequences, D features, d' of them used by the new outputs, m new outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import least_squares
from torch import Tensor

Slope = Callable[[Tensor], Tensor]
"""f', elementwise."""

TRIALS = 32
"""Pairs of random contractions that the decomposition tries. It refines the best result. Our choice: a trial costs almost
nothing, and a few are ill-conditioned."""

ROWS = 4096
"""Most outputs whose equations are solved. Our choice: each output gives B equations, for B (B + 1) unknowns in total."""

EXPLAINS = 0.1
"""A solution is accepted if the relative error of the equations is at most this. Our choice: a right solution is exact up to
rounding, and dropout after the pooler leaves more than 0.3."""

CHUNK = 2048
"""Outputs in each step of the sum of the paper's tensor. Our choice, for memory."""


@dataclass(frozen=True)
class PoolerUpdate:
    """The update of a wide pooler."""

    gradients: Tensor
    """(m, D) float64 of the new outputs' weights."""
    weights: Tensor
    """(m, d') float64 weights of the new outputs."""
    deviation: float
    """s."""

    @property
    def looked_at(self) -> int:
        """Return d'."""
        return self.weights.shape[1]


@dataclass(frozen=True)
class Features:
    """Features that were found, one for each sequence, in no order."""

    rows: Tensor
    """(B, d' or D) float64; the lengths and signs mean nothing unless the equations were solved."""
    explained: float
    """1 - relative squared error of the tensor by its decomposition, or of the equations by their solution."""
    solved: bool = False


def third_moment(gradients: Tensor, normals: Tensor) -> Tensor:
    """Return (K, K, K) the symmetrised third moment of the update.

    The mean of g_j (x) (v_j (x) v_j - I) over j (Beyond Gradient and Priors, Eq. 8 and the end of Appendix B.1).

    Args:
        gradients: (m, K).
        normals: (m, K) v_j, standard normal.
    """
    count, size = gradients.shape
    total = torch.zeros(size, size * size, dtype=gradients.dtype, device=gradients.device)
    for start in range(0, count, CHUNK):
        v = normals[start : start + CHUNK]
        total += gradients[start : start + CHUNK].T @ torch.einsum("jb,jc->jbc", v, v).flatten(1)
    tensor = total.view(size, size, size)
    tensor -= torch.einsum("a,bc->abc", gradients.sum(dim=0), torch.eye(size).to(gradients))
    # The tensor is already symmetric in its last two indices, so these three permutations are enough.
    symmetric: Tensor = (tensor + tensor.permute(1, 0, 2) + tensor.permute(2, 1, 0)) / (3 * count)
    return symmetric


def decompose(tensor: Tensor, components: int, rng: torch.Generator) -> tuple[Tensor, float]:
    """Write a symmetric tensor as a sum of third powers of vectors.

    The tensor is projected on the `components` main directions of its unfolding. Two random contractions T(., ., a)
    and T(., ., b) of the result are Z diag Z^T with the same Z. The columns of Z are the eigenvectors of the first contraction times the
    inverse of the second (Harshman 1970; known as Jennrich's algorithm). Least squares on the tensor itself then reduces
    the error that noise causes.

    Args:
        tensor: (K, K, K), symmetric.
        components: at least 1, at most K.
        rng: draws the contractions.

    Returns:
        (components, K) vectors whose third powers add up to the tensor, and the share of its square that they explain.
    """
    core, basis = _core(tensor, components)
    norm = float(core.square().sum())
    if norm == 0:
        return torch.zeros(components, tensor.shape[0], dtype=tensor.dtype), 0.0
    target: NDArray[np.float64] = core.cpu().double().numpy() / norm**0.5
    starts = [found for _ in range(TRIALS) if (found := _jennrich(target, rng)) is not None]
    starts = starts or [np.eye(components)]
    best = min(starts, key=lambda start: _misfit(start, target))

    def residual(flat: NDArray[np.float64]) -> NDArray[np.float64]:
        return (_sum_of_cubes(flat.reshape(components, components)) - target).ravel()

    refined = least_squares(residual, best.ravel(), max_nfev=50 * components).x.reshape(components, components)
    vectors = torch.from_numpy(refined * norm ** (1 / 6)).to(tensor) @ basis.T
    return vectors, 1.0 - _misfit(refined, target)


def features_by_tensor(seen: PoolerUpdate, sequences: int, rng: torch.Generator) -> Features:
    """Return (B, d') directions, by the paper's method."""
    moment = third_moment(seen.gradients[:, : seen.looked_at], seen.weights / seen.deviation)
    rows, explained = decompose(moment, min(sequences, seen.looked_at), rng)
    return Features(rows, explained)


def features_in_span(seen: PoolerUpdate, sequences: int, rng: torch.Generator) -> Features:
    """Return (B, D) directions, by moments in the coordinates of the span."""
    short = seen.gradients[:, : seen.looked_at]
    strengths, vectors = torch.linalg.eigh(short.T @ short)
    kept = min(sequences, _rank(strengths))
    basis, strengths = vectors[:, -kept:], strengths[-kept:].clamp_min(1e-300).sqrt()  # (d', K), (K,)
    coordinates, explained = decompose(
        third_moment(short @ basis, seen.weights @ basis / seen.deviation), kept, rng
    )  # (K, K)
    # The update is P S basis^T in the used features and P (P^T G) in all: a row z basis^T there is z S^-1 P^T G here.
    whole = (short @ basis / strengths).T @ seen.gradients  # (K, D) = P^T G
    return Features((coordinates / strengths) @ whole, explained)


def features_solved(
    seen: PoolerUpdate, start: Features, slope: Slope, lengths: Tensor, reference: Tensor
) -> Features | None:
    """Solve the equations g_j = sum_i r_i f'(w_j . x_i) x_i from given directions.

    Args:
        seen: the update.
        start: (B, D) directions in the span of the update.
        slope: f'.
        lengths: lengths of features to try in turn, such as those of the public model on other texts.
        reference: (D,) a vector with which all features have a common part. It gives the start its signs.

    Returns:
        Features with lengths and signs, or None if no solution explains the update.
    """
    directions = signed(torch.nn.functional.normalize(start.rows, dim=1), reference)
    count = len(directions)
    basis = torch.linalg.qr(directions.T).Q  # (D, B)
    some = torch.linspace(0, len(seen.weights) - 1, min(ROWS, len(seen.weights))).long()
    target = seen.gradients[some] @ basis  # (rows, B)
    size = float(target.norm())
    seen_by = seen.weights[some] @ basis[: seen.looked_at]  # (rows, B): w_j . x = seen_by . z for x = basis z
    if size == 0:
        return None

    def residual(flat: NDArray[np.float64]) -> NDArray[np.float64]:
        z, r = _unpacked(torch.from_numpy(flat), count)
        left = (target - (slope(seen_by @ z.T) * r) @ z) / size
        flattened: NDArray[np.float64] = left.ravel().numpy()
        return flattened

    best: tuple[float, Tensor] | None = None
    for length in lengths.tolist():
        z = length * directions @ basis
        output_gradients = slope(seen_by @ z.T)[:, :, None] * z  # (rows, B, B)
        r = torch.linalg.lstsq(
            output_gradients.transpose(1, 2).flatten(0, 1), target.flatten()[:, None]
        ).solution.flatten()
        found = least_squares(
            residual, torch.cat([z.flatten(), r]).numpy(), method="lm", x_scale="jac", max_nfev=400 * count
        )
        error = float((found.fun**2).sum())
        if best is None or error < best[0]:
            best = error, torch.from_numpy(found.x)
        if error < 1e-8:
            break
    if best is None or best[0] > EXPLAINS**2:
        return None
    return Features(_unpacked(best[1], count)[0] @ basis.T, 1.0 - best[0], solved=True)


def signed(rows: Tensor, reference: Tensor) -> Tensor:
    """Return rows with signs that make their inner products not negative.

    The inner products are those with the reference.
    """
    along = rows @ reference
    return torch.where(along < 0, -1.0, 1.0)[:, None] * rows


def _unpacked(flat: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return (B, B) coordinates of the features and (B,) weights."""
    return flat[: count * count].view(count, count), flat[count * count :]


def _rank(eigenvalues: Tensor) -> int:
    """Return the number of eigenvalues above rounding; at least 1.

    The eigenvalues are those of a Gram matrix of float32 rows.
    """
    return max(1, int((eigenvalues > 1e-12 * eigenvalues[-1]).sum()))


def _core(tensor: Tensor, components: int) -> tuple[Tensor, Tensor]:
    """Return the tensor in the main directions of its unfolding.

    Its shape is (components,) * 3. Also return (K, components) these directions.
    """
    unfolded = tensor.flatten(1)
    basis = torch.linalg.eigh(unfolded @ unfolded.T).eigenvectors[:, -components:]
    return torch.einsum("abc,ai,bj,ck->ijk", tensor, basis, basis, basis), basis


def _jennrich(target: NDArray[np.float64], rng: torch.Generator) -> NDArray[np.float64] | None:
    """Return (B, B) rows whose third powers add up to the tensor.

    They are computed from two random contractions. Return None if these are singular.
    """
    a, b = torch.randn(2, len(target), generator=rng, dtype=torch.float64).numpy()
    try:
        columns = np.linalg.eig(target @ a @ np.linalg.inv(target @ b)).eigenvectors.real
        norms = np.linalg.norm(columns, axis=0)
        rows = (columns / norms).T
        cubes = np.einsum("na,nb,nc->nabc", rows, rows, rows).reshape(len(rows), -1)
        weights = np.linalg.lstsq(cubes.T, target.ravel(), rcond=None)[0]
    except np.linalg.LinAlgError:
        return None
    found = np.cbrt(weights)[:, None] * rows
    return found if bool(np.isfinite(found).all()) else None


def _sum_of_cubes(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    total: NDArray[np.float64] = np.einsum("na,nb,nc->abc", rows, rows, rows)
    return total


def _misfit(rows: NDArray[np.float64], target: NDArray[np.float64]) -> float:
    """Return the squared error, relative to the tensor's own square of 1."""
    return float(((_sum_of_cubes(rows) - target) ** 2).sum())
