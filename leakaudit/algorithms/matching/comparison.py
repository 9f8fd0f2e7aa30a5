"""Distances between candidates' gradients g and the observed gradient G.

This module computes the objectives of DLG, TAG and LAMP, and their derivatives. Except for the L1 term, an objective
depends on two numbers for each parameter, <G, g> and |g|^2. From pairs (x_t, d_t) they are

    <G, g> = sum_t d_t . G x_t,      |g|^2 = sum_{s,t} (x_s . x_t)(d_s . d_t),

and with a = dL/d<G, g> and b = dL/d|g|^2 the objective's derivatives are

    by d_t:  a G x_t + 2 b sum_s (x_s . x_t) d_s,      by x_t:  a G^T d_t + 2 b sum_s (d_s . d_t) x_s,

so no gradient of a weight matrix is formed. (Own derivation; the second identity is the "ghost norm" of Goodfellow,
"Efficient Per-Example Gradient Computations", 2015.) An L1 term needs the gradients of the matrices. They are
formed one at a time, so that each fits into a processor's cache. With `masked`, only the entries that pruning kept count;
this also needs the formed gradients, but only in the rows and columns that are not empty.

Letters: N candidates, K parameters, M tokens of a candidate at a layer.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from leakaudit.algorithms.matching.candidate_gradients import Pairs
from leakaudit.algorithms.matching.layers import Matrix, Vector
from leakaudit.algorithms.matching.objective import Objective
from leakaudit.algorithms.matching.pruned_blocks import Formed, block_of
from leakaudit.algorithms.matching.restoration import TINY, restore, weights_of
from leakaudit.algorithms.matching.target_factors import Products, Target, stacked
from leakaudit.algorithms.matching.vector_target import VectorTarget

STACKED = 2**20
"""Most entries of the inputs, or of the output gradients, that are compared together. Our choice: some megabytes."""


class Compared(NamedTuple):
    """Distances of N candidates, and the derivatives by their `Pairs`."""

    losses: Tensor
    """(N,) float64."""
    derivatives: Pairs


class Comparison:
    """Compares candidates with one observed update."""

    def __init__(
        self,
        objective: Objective,
        matrices: Sequence[Matrix],
        vectors: Sequence[Vector],
        update: Mapping[str, Tensor],
        tokens: int,
    ) -> None:
        """Arrange the observed update in the layout of pairs.

        Args:
            objective: the distance.
            matrices: parameters whose gradients are given as pairs, in the order of `Pairs`.
            vectors: parameters whose gradients are given formed, in the order of `Pairs`.
            update: parameter name -> observed gradient.
            tokens: M of a whole candidate. This is the rank of an update without noise or pruning.
        """
        self.objective = objective
        observed = [
            (update[matrix.name].T if matrix.input_first else update[matrix.name]).contiguous() for matrix in matrices
        ]
        self._blocks = [block_of(matrix) for matrix in observed] if objective.masked else None
        """Blocks in which pruned matrices are compared; None if all entries are compared."""
        if self._blocks is not None:
            observed = [block.target for block in self._blocks]
        parts = [update[vector.name] for vector in vectors]
        names = [*(matrix.name for matrix in matrices), *(vector.name for vector in vectors)]
        sigmas = [objective.sigma_of(name) for name in names]
        restored = restore(objective, observed, parts, update, tokens, sigmas)
        self._matrices = restored.matrices
        """(out, in) each."""
        self._power = restored.power.clone()
        """(K,) |G|^2."""
        self._targets: list[tuple[tuple[int, ...], Target]] = []
        """Numbers of the matrices of one shape, with their targets; empty if only blocks are compared."""
        if not objective.masked:
            targets = _targets(objective, self._matrices, tokens, sigmas)
            self._power[: len(targets)] = torch.cat([target.power for target in targets])
            self._targets = _stacked_by_shape(targets)
        self._groups = _groups(names, objective.per).to(self._power)
        """(K, groups) 1 if a parameter belongs to the group of a cosine, else 0."""
        self._weights = weights_of(restored, self._groups)
        """(groups,) the weight of each cosine. The weights add up to 1."""
        device = next(iter(update.values())).device
        self._vectors = VectorTarget(parts, device, kept_only=objective.masked or objective.filled)

    @property
    def of_nothing(self) -> float:
        """The distance of a zero gradient."""
        if self.objective.kind == "cosine":
            return 1.0
        absolute = sum(float(part.abs().sum()) for part in (*self._matrices, self._vectors.flat))
        apart = self._power if self.objective.squared else self._power.sqrt()
        return float(apart.sum()) + self.objective.l1 * absolute

    @torch.no_grad()
    def losses(self, pairs: Pairs) -> Tensor:
        """Return (N,) the distances, float64."""
        flat = self._vectors.flattened(pairs)
        inner, power = self._statistics(self._products(pairs), flat)
        losses = self._value(inner, power)
        if self.objective.l1:
            losses = losses + self.objective.l1 * self._l1(pairs, flat, self._scale(power))[0]
        return losses

    @torch.no_grad()
    def compare(self, pairs: Pairs) -> Compared:
        """Return the distances and their derivatives."""
        flat = self._vectors.flattened(pairs)
        parts = list(self._products(pairs))
        inner, power = self._statistics(parts, flat)
        with torch.enable_grad():
            statistics = (inner.requires_grad_(), power.requires_grad_())
            losses = self._value(*statistics)
            by_inner, by_power = torch.autograd.grad(losses.sum(), statistics)
        losses, scale = losses.detach(), self._scale(power.detach())
        if self.objective.l1 and self.objective.match_norm:
            # The scale is |G| / |g|, and its derivative by |g|^2 is -scale / (2 |g|^2).
            total = power.detach().sum(dim=1)
            along = self._l1(pairs, flat, scale)[1]
            by_power = by_power - (self.objective.l1 * along * scale / (2 * total.clamp_min(TINY)))[:, None]
        a, b = by_inner.float(), 2 * by_power.float()  # (N, K) each; d|g|^2 is 2 g
        if self._blocks is not None:
            inputs, output_gradients, absolute = self._by_blocks(pairs, parts, a, b, scale)
            losses = losses + self.objective.l1 * (absolute + self._vectors.l1(flat, scale))
        elif self.objective.l1:
            inputs, output_gradients, absolute = self._by_forming(pairs, a, b, scale)
            losses = losses + self.objective.l1 * (absolute + self._vectors.l1(flat, scale))
        else:
            inputs, output_gradients = self._by_grams(parts, a, b)
        return Compared(losses, Pairs(inputs, output_gradients, self._vector_derivatives(flat, a, b, scale)))

    def _products(self, pairs: Pairs) -> Iterator[_Part]:
        """Yield the products of candidates with updates, a few matrices at a time."""
        if self._blocks is not None:
            for part, (block, given, output_gradient) in enumerate(
                zip(self._blocks, pairs.inputs, pairs.output_gradients, strict=True)
            ):
                yield _Part((part,), None, block.products(given, output_gradient))
        for numbers, target in self._targets:
            for some in _alike(numbers, pairs):
                chosen = target.some(slice(numbers.index(some[0]), numbers.index(some[-1]) + 1))
                given, output_gradient = (
                    torch.stack([of[number] for number in some]) for of in (pairs.inputs, pairs.output_gradients)
                )
                yield _Part(some, chosen, chosen.products(given, output_gradient))

    def _statistics(self, parts: Iterable[_Part], flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return <G, g> and |g|^2, (N, K) float64 each."""
        inner, power = (torch.empty(len(flat), len(self._matrices)).to(self._power) for _ in range(2))
        for numbers, _, products in parts:
            inner[:, numbers], power[:, numbers] = products.inner.T, products.power.T
        by_vector = self._vectors.statistics(flat)
        return torch.cat([inner, by_vector[0]], dim=1), torch.cat([power, by_vector[1]], dim=1)

    def _value(self, inner: Tensor, power: Tensor) -> Tensor:
        """Return (N,) the distances without the L1 term."""
        if self.objective.kind == "l2":
            scale = self._scale(power)[:, None]
            apart = scale.square() * power - 2 * scale * inner + self._power
            if self.objective.squared:
                return apart.sum(dim=1).clamp_min(0.0)
            return apart.clamp_min(TINY).sqrt().sum(dim=1)
        norms = ((power @ self._groups) * (self._power @ self._groups)).clamp_min(TINY).sqrt()  # (N, groups)
        return 1 - (inner @ self._groups) / norms @ self._weights

    def _scale(self, power: Tensor) -> Tensor:
        """Return (N,) the factor on every candidate's gradient."""
        if not self.objective.match_norm:
            return torch.ones_like(power[:, 0])
        return (self._power.sum() / power.sum(dim=1).clamp_min(TINY)).sqrt()

    def _l1(self, pairs: Pairs, flat: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return (N,) the L1 distances and (N,) their derivatives by the scale."""
        total = self._vectors.l1(flat, scale)
        along = self._vectors.l1_by_scale(flat, scale)
        for part, target in enumerate(self._matrices):
            for number in range(len(total)):
                formed = self._formed(pairs, part, number)
                difference = torch.sub(formed * float(scale[number]), target)
                total[number] += difference.abs().sum(dtype=torch.float64)
                if self.objective.match_norm:
                    along[number] += (difference.sign_() * formed).sum(dtype=torch.float64)
        return total, along

    def _by_grams(self, parts: Sequence[_Part], a: Tensor, b: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the derivatives by inputs and by output gradients.

        For distances that need no formed matrix.
        """
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for numbers, target, seen in parts:
            assert target is not None and isinstance(seen, Products)
            by_input, by_gradient = target.derivatives(seen, a[:, numbers].T, b[:, numbers].T)
            found |= dict(zip(numbers, zip(by_input, by_gradient, strict=True), strict=True))
        return [found[part][0] for part in range(len(found))], [found[part][1] for part in range(len(found))]

    def _by_forming(
        self, pairs: Pairs, a: Tensor, b: Tensor, scale: Tensor
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Return the derivatives with an L1 term, and (N,) the L1 distances.

        Let S = a G + b g + alpha s sign(s g - G). The derivative by x_t is S^T d_t, and that by d_t is S x_t.
        """
        inputs, output_gradients = [], []
        absolute = torch.zeros(len(scale), dtype=torch.float64, device=scale.device)
        for part, (target, given, output_gradient) in enumerate(
            zip(self._matrices, pairs.inputs, pairs.output_gradients, strict=True)
        ):
            by_input, by_gradient = torch.empty_like(given), torch.empty_like(output_gradient)
            for number in range(len(given)):
                formed = self._formed(pairs, part, number)
                size = float(scale[number])
                slope = formed * b[number, part]
                residual = formed.mul_(size).sub_(target)
                absolute[number] += torch.linalg.vector_norm(residual, 1)
                slope.add_(residual.sign_(), alpha=self.objective.l1 * size)
                slope.add_(target, alpha=float(a[number, part]))
                by_input[number] = output_gradient[number] @ slope
                by_gradient[number] = given[number] @ slope.T
            inputs.append(by_input)
            output_gradients.append(by_gradient)
        return inputs, output_gradients, absolute

    def _by_blocks(
        self, pairs: Pairs, parts: Sequence[_Part], a: Tensor, b: Tensor, scale: Tensor
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Return the derivatives for a pruned update, and the L1 distances.

        As in `_by_forming`, but S is zero at pruned entries.
        """
        assert self._blocks is not None
        inputs, output_gradients = [], []
        absolute = torch.zeros(len(scale), dtype=torch.float64, device=scale.device)
        for part, (block, given, output_gradient) in enumerate(
            zip(self._blocks, pairs.inputs, pairs.output_gradients, strict=True)
        ):
            seen = parts[part].products
            assert isinstance(seen, Formed)
            formed = seen.gradient
            slope = b[:, part, None, None] * formed + a[:, part, None, None] * block.target
            if self.objective.l1:
                size = scale[:, None, None].float()
                residual = size * formed - block.target
                absolute += residual.abs().sum(dim=(1, 2), dtype=torch.float64)
                slope += self.objective.l1 * size * residual.sign_() * block.mask
            by_input, by_gradient = torch.zeros_like(given), torch.zeros_like(output_gradient)
            by_input[..., block.columns] = output_gradient[..., block.rows] @ slope
            by_gradient[..., block.rows] = given[..., block.columns] @ slope.transpose(1, 2)
            inputs.append(by_input)
            output_gradients.append(by_gradient)
        return inputs, output_gradients, absolute

    def _vector_derivatives(self, flat: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> list[Tensor]:
        first = len(self._matrices)
        return self._vectors.derivatives(flat, a[:, first:], b[:, first:], scale, self.objective.l1)

    def _formed(self, pairs: Pairs, part: int, number: int) -> Tensor:
        """Return one candidate's gradient of one matrix.

        Its shape is (out, in), or that of the block that is compared.
        """
        given, output_gradient = pairs.inputs[part][number], pairs.output_gradients[part][number]
        if self._blocks is not None:
            return self._blocks[part].formed(given[None], output_gradient[None])[0]
        return output_gradient.T @ given


class _Part(NamedTuple):
    """Products of candidates with some of the matrices."""

    numbers: tuple[int, ...]
    """The numbers of these matrices."""
    target: Target | None
    """Their updates; None if only a block of a pruned update is compared."""
    products: Products | Formed


def _targets(objective: Objective, matrices: Sequence[Tensor], tokens: int, sigmas: Sequence[float]) -> list[Target]:
    """Return the target of each matrix, (out, in), under its own noise."""
    levels = zip(matrices, sigmas, strict=False)  # vectors follow the matrices
    return [Target.of(each, tokens, whitened=objective.whitened, sigma=sigma) for each, sigma in levels]


def _stacked_by_shape(targets: Sequence[Target]) -> list[tuple[tuple[int, ...], Target]]:
    """Return one target for each shape, with the numbers of its matrices."""
    found = []
    for shape in dict.fromkeys(target.shape for target in targets):
        alike = tuple(number for number, target in enumerate(targets) if target.shape == shape)
        found.append((alike, stacked([targets[number] for number in alike])))
    return found


def _alike(numbers: Sequence[int], pairs: Pairs) -> Iterator[tuple[int, ...]]:
    """Split matrices into runs that can be compared together.

    The matrices of a run have equally many tokens, and a run is small enough for `STACKED`.
    """
    for shape, run in itertools.groupby(numbers, lambda number: pairs.inputs[number].shape):
        alike = tuple(run)
        at_once = max(1, STACKED // max(shape.numel(), pairs.output_gradients[alike[0]].numel()))
        yield from (alike[start : start + at_once] for start in range(0, len(alike), at_once))


def _groups(names: Sequence[str], per: Literal["parameter", "layer", "whole"]) -> Tensor:
    """Return (K, groups) 1 if a parameter belongs to a group, else 0.

    For `layer`, a group is a block, which the first number in a parameter's name tells. Other parameters are grouped by module.
    """
    keys = list(names)
    if per == "whole":
        keys = [""] * len(names)
    elif per == "layer":
        blocks = [re.match(r"(.*?\.\d+)\.", name) for name in names]
        keys = [found[1] if found else name.rpartition(".")[0] for name, found in zip(names, blocks, strict=True)]
    order = list(dict.fromkeys(keys))
    return torch.nn.functional.one_hot(torch.tensor([order.index(key) for key in keys]), len(order))
