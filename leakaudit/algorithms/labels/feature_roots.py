"""Recovery of each sequence's features from a feed-forward part's update.

The part consists of a linear layer, an activation and a second linear layer.

Letters: B sequences, D inputs (features) and M outputs of the first linear layer, f the activation.

Near the output of a classifier, only one row of each sequence has a gradient: the class token in an encoder's last block, or a hidden
layer of a picture classifier. The two updates are then dW1 = sum_k e_k x_k^T and dW2 = sum_k g_k u_k^T with u_k = f(W1 x_k + b1), so
their row spaces are X = span{x_k} and U = span{u_k}, both of dimension B while B is small enough. Every x of the batch is
therefore a root, within X, of

    r(x) = f(W1 x + b1) - its projection on U:

There are B unknowns and M - B equations, so other roots do not occur. The roots are the features of the batch, and the rank of the
updates is their number. Source: the row spaces are DAGER's observation (Petrov et al. 2024, Sec. 4.1); the rest is derived here.

Levenberg's damped Gauss-Newton method finds roots from random starts. The residual is multiplied by a factor that grows
near a hyperplane through the origin and all known roots. This keeps further searches away from the known roots (deflation as in Farrell
et al. 2015, with a plane instead of points) and from the origin, which is a root if the first layer's bias is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.errors import AnatomyError
from leakaudit.plugins.budget import Budget

CLEAR_GAP = 20.0
"""Smallest ratio between the last singular value that counts and the next one. Measured on MiniLM: 100 or more for up to 128 sequences,
and far less if there is no gap."""

NOTHING = 1e-9
"""Singular values below this share of the largest count as rounding. Our choice: float32 updates leave about 1e-8."""

IS_ROOT = 1e-2
"""Length of r over that of f(W1 x + b1) up to which x counts as found. Measured: 1e-5 or less at roots, 1e-3 in the weakest
directions of 128 sequences, 0.9 if the search ends at a point that is no root."""

SAME_ROOT = 1e-3
"""Relative distance up to which two roots count as the same."""

TURNS = 40
"""Most Gauss-Newton steps from one start. Measured: 8 on average for 32 sequences, 25 for 128."""

REACH = 4.0
"""Distance of starts from the centre, in units of the scatter of dummy inputs. Measured on training texts: with 1 the search finds the
same roots again and again; 2 and 4 avoid this."""

OTHER_REACHES = (1.0, 0.5, 2.0, 0.25)
"""Factors of REACH. The next factor is tried after every four starts without a new root, because the last root may lie near the others
or far away. Our choice."""

POLE = 2.0
"""Distance from the hyperplane of known roots at which the deflated residual has doubled. Measured with `REACH`."""

FRUITLESS = 64
"""The search ends after this many starts in a row without a new root. Our choice."""


def row_space(update: Tensor) -> Tensor:
    """Return (B, D) an orthonormal basis of the rows of an update.

    Raises:
        AnatomyError: no gap shows how many directions there are.
    """
    _, strength, rows = torch.linalg.svd(update.double(), full_matrices=False)
    floor = (strength[0] * NOTHING).clamp_min(1e-300)
    ratio = strength[:-1] / strength[1:].clamp_min(float(floor))
    if float(strength[0]) == 0.0 or float(ratio.max()) < CLEAR_GAP:
        raise AnatomyError(
            "no gap in the singular values of the feed-forward part's update says how many sequences there are: as many as the "
            "layer is wide, several local steps, or a defence that changes every entry"
        )
    clear = (ratio >= CLEAR_GAP).nonzero().flatten()
    basis: Tensor = rows[: int(clear[-1]) + 1]  # up to the last gap: earlier gaps separate classes, not sequences
    return basis


@dataclass
class Roots:
    """The features that were found."""

    features: Tensor
    """(N, D) float64."""
    wanted: int
    """Number of features that the update holds."""
    starts: int


def find_roots(
    weight: Tensor,
    bias: Tensor,
    activation: Callable[[Tensor], Tensor],
    inner: Tensor,
    outer: Tensor,
    centre: Tensor,
    scatter: float,
    rng: torch.Generator,
    budget: Budget,
) -> Roots:
    """Find the batch's features.

    Args:
        weight: (M, D) of the first layer, float64.
        bias: (M,).
        activation: elementwise.
        inner: (B, D) orthonormal basis of X.
        outer: (B, M) orthonormal basis of U.
        centre: (D,) expected mean of the features.
        scatter: their expected distance from it.
        rng: draws the starts; a CPU generator.
        budget: checked before each start.
    """
    count = len(inner)
    mixed = weight @ inner.T  # (M, B)
    middle = expected = inner @ centre  # (B,)
    known = torch.zeros(0, count, dtype=torch.float64, device=weight.device)
    starts = fruitless = 0
    while len(known) < count and fruitless < FRUITLESS and not budget.exhausted():
        starts += 1
        away = torch.randn(count, generator=rng, dtype=torch.float64).to(weight.device)
        if len(known):
            basis = torch.linalg.qr(known.T)[0]  # (B, K)
            away = away - basis @ (basis.T @ away)
            middle = known.mean(dim=0)
        away = away / away.norm()
        reach = REACH * OTHER_REACHES[fruitless // 4 % len(OTHER_REACHES)]
        start = (middle if fruitless % 2 == 0 else expected) + reach * scatter * away
        found, error = _descend(start, mixed, bias, activation, outer, away)
        if error < IS_ROOT:
            found, error = _descend(found, mixed, bias, activation, outer, None)
        fruitless += 1
        far = float(found.norm()) > SAME_ROOT * float(start.norm())  # not the origin, which may be a root itself
        if error < IS_ROOT and far and not bool(((known - found).norm(dim=1) < SAME_ROOT * found.norm()).any()):
            known = torch.cat([known, found[None]])
            fruitless = 0
    return Roots(known @ inner, count, starts)


def _descend(
    at: Tensor,
    mixed: Tensor,
    bias: Tensor,
    activation: Callable[[Tensor], Tensor],
    outer: Tensor,
    plane: Tensor | None,
) -> tuple[Tensor, float]:
    """Return the end point of Levenberg's method, and |r| / |f| there.

    With `plane` (B,) the residual is m r with m = 1 + (POLE / (plane . c))^2. Let J be the Jacobian of r, and h the gradient of log m. The
    Gauss-Newton matrix of m r is then m^2 (J + r h^T)^T (J + r h^T).
    """

    def residual(c: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
        z = (mixed @ c + bias).detach().requires_grad_()
        with torch.enable_grad():
            value = activation(z)
            (slope,) = torch.autograd.grad(value.sum(), z)
        value = value.detach()
        r = value - outer.T @ (outer @ value)
        m = 1.0 if plane is None else 1.0 + (POLE / float(plane @ c)) ** 2
        return value, slope, r, m

    damping = 1e-2
    rough = mixed.float(), outer.float()
    value, slope, r, m = residual(at)
    cost = m * m * float(r @ r)
    for _ in range(TURNS):
        jacobian = (
            slope.float()[:, None] * rough[0]
        )  # (M, B), before the projection; float32 is enough for the steps, but not for r
        inside = rough[1] @ jacobian
        matrix = (jacobian.T @ jacobian - inside.T @ inside).double()
        pull = mixed.T @ (slope * r)
        if plane is not None:
            h = -2 * POLE**2 / (float(plane @ at) ** 3 * m) * plane
            squared = float(r @ r)
            matrix = matrix + torch.outer(pull, h) + torch.outer(h, pull) + squared * torch.outer(h, h)
            pull = pull + squared * h
        mean = matrix.diagonal().mean().clamp_min(1e-300)
        better = False
        while not better and damping < 1e4:
            damped = matrix + torch.diag((damping * mean).expand(len(at)))
            step = torch.linalg.solve(damped, pull)
            new = residual(at - step)
            new_cost = new[3] ** 2 * float(new[2] @ new[2])
            better = new_cost < cost
            damping = max(damping / 3, 1e-12) if better else damping * 4
        if not better:
            break
        settled = new_cost > 0.99999 * cost
        at, (value, slope, r, m), cost = at - step, new, new_cost
        if settled or float(r.norm()) < 1e-9 * float(value.norm()):
            break
    return at, float(r.norm() / value.norm().clamp_min(1e-300))
