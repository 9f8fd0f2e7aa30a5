"""The gradient of every token's query and key, factored out of the update.

With the n input vectors known as rows of X (n, D), the update of a linear layer is G = dY^T X, so dY = (G X^+)^T. That
is exact while the rows of X are independent. Queries and keys themselves are computed from X and the public weights.

Query and key must be linear in the input. With rotary positions they are not: they are rotated afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.models.structure import Anatomy, Projection


@dataclass(frozen=True)
class AttentionFactors:
    """Queries, keys and their gradients of n inputs, by head (H heads of width d_h)."""

    keys: Tensor
    """(H, n, d_h + 1) float64: k_j with a constant appended, which carries sum_j a_ij = 0."""
    queries: Tensor
    """(H, n, d_h) float64: q_j."""
    query_updates: Tensor
    """(H, n, d_h + 1) float64: dq_i with a zero appended."""
    key_updates: Tensor
    """(H, n, d_h) float64: dk_i."""
    missing: Tensor | None = None
    """(2H, m, d_h + 1) orthonormal: directions that inputs outside the n may add to these gradients."""

    @property
    def vectors(self) -> Tensor:
        """(2H, n, d_h + 1): the keys of every head, then the queries."""
        return torch.cat([self.keys, padded(self.queries)])

    @property
    def updates(self) -> Tensor:
        """(2H, n, d_h + 1): dq of every head, then dk."""
        return torch.cat([self.query_updates, padded(self.key_updates)])


def padded(vectors: Tensor) -> Tensor:
    """Return vectors (..., d) with a zero appended, where keys have their constant."""
    return torch.cat([vectors, torch.zeros_like(vectors[..., :1])], dim=-1)


MOST_MISSING = 8
"""Directions per head that are left to inputs that were not found.
Our choice: a quarter of a head of 32 dimensions; the rest still tests sequences of twenty tokens."""


def factor(
    update: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    anatomy: Anatomy,
    inputs: Tensor,
    span: Tensor | None = None,
) -> AttentionFactors | None:
    """Return the queries, keys and gradients of every input.

    Args:
        update: parameter name -> update.
        weights: parameter name -> weights before the step.
        anatomy: parts of the model, with its heads.
        inputs: (n, D) float64, the inputs as the layers saw them.
        span: (R, D) float64, orthonormal rows: the span of all inputs, if some of them may be missing from `inputs`.

    Returns:
        The factors. None if the heads are unknown, or if the update shares neither all projections nor an adapter whose
        rank is at least n.
    """
    changes = _changes(update, weights, anatomy, inputs) if anatomy.heads else None
    if changes is None:
        return None
    keys, queries = keys_and_queries(weights, anatomy, inputs)
    query_updates, key_updates = by_head(changes, anatomy)
    return AttentionFactors(
        keys=keys,
        queries=queries,
        query_updates=padded(query_updates),
        key_updates=key_updates,
        missing=None if span is None else _directions_of_missing(update, anatomy, inputs, span),
    )


def _directions_of_missing(
    update: Mapping[str, Tensor], anatomy: Anatomy, inputs: Tensor, span: Tensor
) -> Tensor | None:
    """Return (2H, m, d_h + 1): directions that missing inputs may add, per head.

    Let N be the directions of the span that are orthogonal to all known inputs. The direction that reads one input is
    only known up to a combination of the rows of N. So it reads dq_i plus a combination of the columns of G N^T. The
    combination is the same for all heads; here each head may have a different one.
    """
    width = span.shape[0] - len(inputs)
    if width <= 0 or any(p.weight not in update for p in anatomy.projections):
        return None
    known = torch.linalg.svd(inputs @ span.T, full_matrices=True).Vh  # (R, R)
    outside = known[len(inputs) :] @ span  # (m, D)
    terms = torch.cat([p.by_output(update[p.weight]).double() @ outside.T for p in anatomy.projections])  # (F, m)
    directions: Tensor = torch.linalg.svd(both_sides(terms, anatomy), full_matrices=False).Vh[:, :MOST_MISSING]
    return directions


def _changes(
    update: Mapping[str, Tensor], weights: Mapping[str, Tensor], anatomy: Anatomy, inputs: Tensor
) -> Tensor | None:
    """Return (F, n): the gradient of all outputs of the projections, per input.

    It is computed from the projections' own updates. If these are not all shared, it is computed from the update
    dY^T X A^T of the adapters' second map B; projections without an adapter get zeros. None if neither is possible.
    """
    if all(p.weight in update for p in anatomy.projections):
        inverse = torch.linalg.pinv(inputs)  # (D, n)
        return torch.cat([p.by_output(update[p.weight]).double() @ inverse for p in anatomy.projections])
    parts = {}
    for adapter in anatomy.adapters:
        if adapter.up.weight in update and adapter.rank >= len(inputs):
            down = adapter.down.by_output(weights[adapter.down.weight]).double()  # (R, D)
            images = torch.linalg.pinv(inputs @ down.T)  # (R, n)
            parts[adapter.beside] = adapter.up.by_output(update[adapter.up.weight]).double() @ images
    if not parts:
        return None
    silent = [inputs.new_zeros(p.out_features, len(inputs)) for p in anatomy.projections]
    return torch.cat([parts.get(index, none) for index, none in enumerate(silent)])


def by_head(features: Tensor, anatomy: Anatomy) -> tuple[Tensor, Tensor]:
    """Split features (F, n) of all projections by head.

    Returns:
        The features of queries and those of keys, (H, n, d_h) each.
    """
    heads = [h for h in anatomy.heads if len(h.query) == len(anatomy.heads[0].query)]
    query = torch.stack([h.query for h in heads]).to(features.device)
    key = torch.stack([h.key for h in heads]).to(features.device)
    return features[query].transpose(1, 2), features[key].transpose(1, 2)


def both_sides(updates: Tensor, anatomy: Anatomy) -> Tensor:
    """Return updates (F, n) as (2H, n, d_h + 1): of queries for every head, then keys."""
    return torch.cat([padded(side) for side in by_head(updates, anatomy)])


def keys_and_queries(weights: Mapping[str, Tensor], anatomy: Anatomy, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys (H, n, d_h + 1) and queries (H, n, d_h) of inputs.

    The last entry of a key is a constant, which carries the constraint that coefficients sum to zero.

    Args:
        weights: parameter name -> weights before the step.
        anatomy: parts of the model, with its heads.
        inputs: (n, D) float64.
    """
    queries, keys = by_head(torch.cat([_outputs(p, weights, inputs) for p in anatomy.projections]), anatomy)
    one = keys.abs().mean() * torch.ones_like(keys[..., :1])
    return torch.cat([keys, one], dim=2), queries


def _outputs(projection: Projection, weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Return (out, n): the layer's outputs for the inputs."""
    made = projection.by_output(weights[projection.weight]).double() @ inputs.T
    bias = weights.get(projection.weight.removesuffix("weight") + "bias")
    return made if bias is None else made + bias.double()[:, None]
