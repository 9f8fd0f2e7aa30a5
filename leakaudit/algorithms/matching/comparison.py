"""Distances between candidates' gradients g and the observed gradient G.

The objectives of DLG, TAG and LAMP, and their derivatives. Every objective but the L1 term depends on two numbers for
each parameter, <G, g> and |g|^2. From pairs (x_t, d_t) they are

    <G, g> = sum_t d_t . G x_t,      |g|^2 = sum_{s,t} (x_s . x_t)(d_s . d_t),

and with a = dL/d<G, g> and b = dL/d|g|^2 the objective's derivatives are

    by d_t:  a G x_t + 2 b sum_s (x_s . x_t) d_s,      by x_t:  a G^T d_t + 2 b sum_s (d_s . d_t) x_s,

so no gradient of a weight matrix is formed. (Own derivation; the second identity is the "ghost norm" of Goodfellow,
"Efficient Per-Example Gradient Computations", 2015.) An L1 term needs the matrices: they are formed one at a time,
small enough for a processor's cache. A pruned update of which only the remaining entries count (`masked`) needs them
too, in the rows and columns that are not empty.

Letters: N candidates, K parameters, M tokens of a candidate at a layer.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from leakaudit.algorithms.matching.candidate_gradients import Matrix, Pairs, Vector
from leakaudit.algorithms.matching.low_rank_completion import completed
from leakaudit.algorithms.matching.singular_value_shrinkage import denoised
from leakaudit.algorithms.matching.target_factors import Products, Target, stacked
from leakaudit.algorithms.span.subspace import smallest_kept

TINY = 1e-30
"""Keeps quotients finite."""

STACKED = 2**20
"""Most entries of the inputs of matrices that are compared together. Our choice: some megabytes."""

HARM = 2.0
"""How fast cosines get weights of their own with the share of an update's power that is noise or was pruned: completely
from a half on, which noise as large as the update gives. Our choice: with less damage, equal weights did better on
training sentences; see docs/decisions/matching.md."""


@dataclass(frozen=True)
class Objective:
    """The distance between gradients that a search minimises."""

    kind: Literal["l2", "cosine"] = "l2"
    """L2 distance, or one minus the cosine (LAMP, Sec. 4.2, L_cos)."""
    squared: bool = True
    """Square the L2 distance of each parameter, as DLG does (Zhu et al. 2019); LAMP (L_tag) and GRAB (Eq. 1) print it without the square."""
    per: Literal["parameter", "layer", "whole"] = "parameter"
    """The unit of a cosine, before the mean: each parameter tensor, all parameters of a block, or the whole update. The
    L2 distance is the same for all."""
    whitened: bool = False
    """Take cosines of matrices in a metric in which weak tokens count (`whitening`)."""
    l1: float = 0.0
    """Weight of the additional L1 distance (TAG)."""
    match_norm: bool = False
    """Scale every candidate's gradient to the norm of the observed one first: for updates whose length is unknown."""
    masked: bool = False
    """Compare only where the observed update is not zero (GRAB, Sec. 5.5.2): for pruned updates."""
    filled: bool = False
    """For pruned updates, too: fill in removed entries by the low rank first (`low_rank_completion`), and compare
    everywhere. The more was pruned, the more a cosine counts by the length of its update, because pruning removes most
    of the short ones. Vectors are compared where they are not zero."""
    sigma: float = 0.0
    """Standard deviation of noise on every entry. It is removed from matrices as far as their rank allows
    (`singular_value_shrinkage`). The more of the update is noise, the more a cosine counts by its expected square
    between the denoised and the clean update: noise of one size hides small gradients."""

    def __post_init__(self) -> None:
        """Refuse a metric for an L1 distance or for single entries.

        These have no singular values.
        """
        if self.whitened and (self.kind != "cosine" or self.l1 or self.masked):
            raise ValueError(
                f"whitened compares cosines of whole updates; got kind={self.kind!r}, l1={self.l1}, masked={self.masked}"
            )


class Compared(NamedTuple):
    """Distances of N candidates, and their derivatives by what `Pairs` holds."""

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
            matrices: parameters whose gradients come as pairs, in their order.
            vectors: parameters whose gradients come formed, in their order.
            update: parameter name -> observed gradient.
            tokens: M, of a whole candidate: the rank of an update without damage.
        """
        self.objective = objective
        observed = [
            (update[matrix.name].T if matrix.input_first else update[matrix.name]).contiguous() for matrix in matrices
        ]
        self._blocks = [_block(matrix) for matrix in observed] if objective.masked else None
        """Blocks where pruned matrices are compared; None for everywhere."""
        if self._blocks is not None:
            observed = [block.target for block in self._blocks]
        parts = [update[vector.name] for vector in vectors]
        restored = _restored(objective, observed, parts, update, tokens)
        self._matrices = restored.matrices
        """(out, in) each."""
        self._power = restored.power.clone()
        """(K,) |G|^2."""
        self._targets: list[tuple[tuple[int, ...], Target]] = []
        """Matrices of one shape and their targets, where they are compared everywhere."""
        if not objective.masked:
            targets = [
                Target.of(matrix, tokens, whitened=objective.whitened, sigma=objective.sigma)
                for matrix in self._matrices
            ]
            self._power[: len(targets)] = torch.cat([target.power for target in targets])
            for shape in dict.fromkeys(target.shape for target in targets):
                alike = tuple(number for number, target in enumerate(targets) if target.shape == shape)
                self._targets.append((alike, stacked([targets[number] for number in alike])))
        names = [*(matrix.name for matrix in matrices), *(vector.name for vector in vectors)]
        self._groups = _groups(names, objective.per).to(self._power)
        """(K, groups) one where a parameter belongs to a cosine's group."""
        self._weights = _weights(restored, self._groups)
        """(groups,) the weight of each cosine; they add up to 1."""
        self._sizes = [len(part) for part in parts]
        device = next(iter(update.values())).device
        self._flat = torch.cat(parts) if parts else torch.zeros(0, device=device)
        """(P,): all vectors side by side, so that one product is enough."""
        self._owner = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(self._sizes, dtype=torch.long)).to(
            device
        )
        """(P,) the number of the vector that an entry belongs to."""

    @property
    def of_nothing(self) -> float:
        """The distance of a zero gradient."""
        if self.objective.kind == "cosine":
            return 1.0
        absolute = sum(float(part.abs().sum()) for part in (*self._matrices, self._flat))
        apart = self._power if self.objective.squared else self._power.sqrt()
        return float(apart.sum()) + self.objective.l1 * absolute

    @torch.no_grad()
    def losses(self, pairs: Pairs) -> Tensor:
        """Return (N,) the distances, float64."""
        flat = self._flattened(pairs)
        inner, power = self._statistics(self._products(pairs), flat)
        losses = self._value(inner, power)
        if self.objective.l1:
            losses = losses + self.objective.l1 * self._l1(pairs, flat, self._scale(power))[0]
        return losses

    @torch.no_grad()
    def compare(self, pairs: Pairs) -> Compared:
        """Return the distances and their derivatives."""
        flat = self._flattened(pairs)
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
            losses = losses + self.objective.l1 * (absolute + self._flat_l1(flat, scale))
        elif self.objective.l1:
            inputs, output_gradients, absolute = self._by_forming(pairs, a, b, scale)
            losses = losses + self.objective.l1 * (absolute + self._flat_l1(flat, scale))
        else:
            inputs, output_gradients = self._by_grams(parts, a, b)
        return Compared(losses, Pairs(inputs, output_gradients, self._by_vectors(flat, a, b, scale)))

    def _products(self, pairs: Pairs) -> Iterator[_Part]:
        """Yield the products of candidates with updates, some matrices at a time."""
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
        by_vector = (self._by_owner(flat * self._flat), self._by_owner(flat.square()))
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
        """Return (N,) what every candidate's gradient is multiplied by."""
        if not self.objective.match_norm:
            return torch.ones_like(power[:, 0])
        return (self._power.sum() / power.sum(dim=1).clamp_min(TINY)).sqrt()

    def _l1(self, pairs: Pairs, flat: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return (N,) the L1 distances and (N,) their derivatives by the scale."""
        total = self._flat_l1(flat, scale)
        along = ((scale[:, None].float() * flat - self._flat).sign() * flat).sum(dim=1, dtype=torch.float64)
        for part, target in enumerate(self._matrices):
            for number in range(len(total)):
                formed = self._formed(pairs, part, number)
                difference = torch.sub(formed * float(scale[number]), target)
                total[number] += difference.abs().sum(dtype=torch.float64)
                if self.objective.match_norm:
                    along[number] += (difference.sign_() * formed).sum(dtype=torch.float64)
        return total, along

    def _flat_l1(self, flat: Tensor, scale: Tensor) -> Tensor:
        """Return (N,) the L1 distances of the vectors."""
        return (scale[:, None].float() * flat - self._flat).abs().sum(dim=1, dtype=torch.float64)

    def _by_grams(self, parts: Sequence[_Part], a: Tensor, b: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the derivatives where the distance needs no formed matrix.

        They are by inputs and by output gradients.
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
        """Return the derivatives with an L1 term, and the (N,) L1 distances.

        With S = a G + b g + alpha s sign(s g - G): by x_t, S^T d_t, by d_t, S x_t.
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

        In the notation of `_by_forming`, S is zero where an entry was pruned.
        """
        assert self._blocks is not None
        inputs, output_gradients = [], []
        absolute = torch.zeros(len(scale), dtype=torch.float64, device=scale.device)
        for part, (block, given, output_gradient) in enumerate(
            zip(self._blocks, pairs.inputs, pairs.output_gradients, strict=True)
        ):
            seen = parts[part].products
            assert isinstance(seen, _Formed)
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

    def _by_vectors(self, flat: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> list[Tensor]:
        first = len(self._matrices)
        found = a[:, first:][:, self._owner] * self._flat + b[:, first:][:, self._owner] * flat  # (N, P)
        if self.objective.l1:
            size = scale[:, None].float()
            found = found + self.objective.l1 * size * (size * flat - self._flat).sign()
        if self.objective.masked or self.objective.filled:
            found = found * (self._flat != 0)
        return list(found.split(self._sizes, dim=1))

    def _formed(self, pairs: Pairs, part: int, number: int) -> Tensor:
        """Return one candidate's gradient of one matrix.

        (out, in), or only the block that is compared.
        """
        given, output_gradient = pairs.inputs[part][number], pairs.output_gradients[part][number]
        if self._blocks is not None:
            return self._blocks[part].formed(given[None], output_gradient[None])[0]
        return output_gradient.T @ given

    def _flattened(self, pairs: Pairs) -> Tensor:
        """Return (N, P) the formed vectors side by side, where they are compared."""
        if not pairs.vectors:
            return self._flat.new_zeros(len(pairs.inputs[0]), 0)
        flat = torch.cat(pairs.vectors, dim=1).detach()
        return flat * (self._flat != 0) if self.objective.masked or self.objective.filled else flat

    def _by_owner(self, entries: Tensor) -> Tensor:
        """Return (N, vectors) sums of (N, P) entries over each vector, float64."""
        sums = torch.zeros(len(entries), len(self._sizes), dtype=torch.float64, device=entries.device)
        return sums.index_add_(1, self._owner, entries.double())


class _Formed(NamedTuple):
    """Products of candidates with the block of a pruned matrix."""

    inner: Tensor
    """(1, N) <G, g>, float64."""
    power: Tensor
    """(1, N) |g|^2, float64."""
    gradient: Tensor
    """(N, R, C): g."""


class _Part(NamedTuple):
    """Products of candidates with some of the matrices."""

    numbers: tuple[int, ...]
    """The numbers of these matrices."""
    target: Target | None
    """Their updates; None for a pruned one."""
    products: Products | _Formed


class _Block(NamedTuple):
    """The rows and columns in which a pruned matrix is compared."""

    rows: Tensor
    """(R,) indices."""
    columns: Tensor
    """(C,) indices."""
    target: Tensor
    """(R, C): G there."""
    mask: Tensor
    """(R, C) one where G was not pruned, else zero."""

    def formed(self, given: Tensor, output_gradient: Tensor) -> Tensor:
        """Return (N, R, C) candidates' gradients, zero where G was pruned.

        They are formed from (N, M, in) inputs and (N, M, out) output gradients.
        """
        return (output_gradient[..., self.rows].transpose(1, 2) @ given[..., self.columns]).mul_(self.mask)

    def products(self, given: Tensor, output_gradient: Tensor) -> _Formed:
        """Return the products of candidates with the block, from the same."""
        formed = self.formed(given, output_gradient)
        inner = formed.flatten(1) @ self.target.flatten()
        return _Formed(inner.double()[None], formed.square().sum(dim=(1, 2)).double()[None], formed)


def _block(matrix: Tensor) -> _Block:
    """Return the block of a pruned matrix's rows and columns that are not empty."""
    rows, columns = ((matrix != 0).any(dim=dim).nonzero().flatten() for dim in (1, 0))
    target = matrix[rows][:, columns].contiguous()
    return _Block(rows, columns, target, (target != 0).to(target))


def _alike(numbers: Sequence[int], pairs: Pairs) -> Iterator[tuple[int, ...]]:
    """Split matrices into runs that can be compared together.

    The matrices of a run have equally many tokens, and a run is small enough for `STACKED`.
    """
    for shape, run in itertools.groupby(numbers, lambda number: pairs.inputs[number].shape):
        alike = tuple(run)
        at_once = max(1, STACKED // max(shape.numel(), pairs.output_gradients[alike[0]].numel()))
        yield from (alike[start : start + at_once] for start in range(0, len(alike), at_once))


def _powers(parts: Sequence[Tensor]) -> Tensor:
    """Return (K,) float64 the squared norms of some gradients."""
    return torch.stack([part.double().square().sum() for part in parts])


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """Return part / whole, and zero where the whole is zero."""
    return torch.where(whole > 0, part / whole.clamp_min(TINY), 0.0)


class _Restored(NamedTuple):
    """An update after restoration, and the damage that was found."""

    matrices: list[Tensor]
    power: Tensor
    """(K,) |G|^2 of every parameter as it is compared, vectors last."""
    sure: Tensor
    """(K,) the squared cosine that each parameter's update is expected to have with that before noise."""
    noise: float
    """Share of the observed update's power that was noise."""
    pruned: float
    """Share of it that was pruned and has been filled in."""


def _restored(
    objective: Objective,
    matrices: list[Tensor],
    vectors: Sequence[Tensor],
    update: Mapping[str, Tensor],
    tokens: int,
) -> _Restored:
    """Fill in pruned entries and remove noise, where the objective says so.

    Args:
        objective: its `filled` and `sigma`.
        matrices: observed.
        vectors: observed; they have no rank and stay as they are.
        update: the whole update; its smallest entry bounds what was pruned.
        tokens: the rank of matrices without damage.
    """
    power = observed = _powers([*matrices, *vectors])
    if objective.filled:
        smallest = smallest_kept(update)
        matrices = [completed(matrix, tokens, smallest) for matrix in matrices]
        power = _powers([*matrices, *vectors])
    entries = torch.tensor([part.numel() for part in (*matrices, *vectors)]).to(power)
    noise, left = objective.sigma**2 * entries, power
    if objective.sigma and not objective.masked:
        without = [denoised(matrix, tokens, objective.sigma) for matrix in matrices]
        if any(
            bool(matrix.any()) for matrix in without
        ):  # else no singular value is above noise: the noisy update is the best guess
            matrices, left = without, _powers([*without, *vectors])
    clean = (power - noise).clamp_min(0.0)  # expected |G|^2
    # Noise adds to <G, G> and not to <G, g>; shrinkage makes both equal. In both cases the smaller over the larger is cos^2.
    sure = _ratio(torch.minimum(clean, left), torch.maximum(clean, left))
    shares = (float(harm.clamp_min(0.0).sum() / power.sum().clamp_min(TINY)) for harm in (noise, power - observed))
    return _Restored(matrices, left, sure, *shares)


def _weights(restored: _Restored, groups: Tensor) -> Tensor:
    """Return (groups,) the weight of each group's cosine in the mean.

    The weights add up to 1, unless no parameter has an update.

    Args:
        restored: the update that is compared.
        groups: (K, groups) one where a parameter belongs to a group.
    """
    power, sure = restored.power, restored.sure
    if not bool((power * sure).any()):  # all is noise: no parameter is better than another
        sure = torch.ones_like(sure)
    by_group = power @ groups
    believed = _ratio((power * sure) @ groups, by_group) ** min(1.0, HARM * restored.noise)
    counted = (by_group > 0) * (believed * by_group.sqrt() ** min(1.0, HARM * restored.pruned))
    return counted / counted.sum().clamp_min(TINY)


def _groups(names: Sequence[str], per: Literal["parameter", "layer", "whole"]) -> Tensor:
    """Return (K, groups) one where a parameter belongs to a group.

    A layer is a block, by the first number in a parameter's name; parameters outside the blocks are grouped by module.
    """
    keys = list(names)
    if per == "whole":
        keys = [""] * len(names)
    elif per == "layer":
        blocks = [re.match(r"(.*?\.\d+)\.", name) for name in names]
        keys = [found[1] if found else name.rpartition(".")[0] for name, found in zip(names, blocks, strict=True)]
    order = list(dict.fromkeys(keys))
    return torch.nn.functional.one_hot(torch.tensor([order.index(key) for key in keys]), len(order))
