"""Target gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.algorithms.padding import padded_batch
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.models.structure import Tail, find_tail

EXPLAINED = 3e-2
"""Share of |dy_i| that the targets found may leave unexplained. Measured on a train split (GPT-2 and LLaMA shapes, D = 384, up to 174
prefixes): at most 3e-5 once all targets are found; set far above for the noise of more prefixes, and far below 1."""


SHORTLIST = 64
"""Tokens whose atoms are computed exactly. Our choice: the estimate that ranks them is exact but for the length of atoms."""


MOST_TARGETS = 24
"""Different tokens after one prefix that are looked for."""


@dataclass(frozen=True)
class PrefixStates:
    """What the public model makes of every prefix at its last token."""

    given: Tensor
    """(N, F) float64: a_i."""
    slope: Tensor
    """(N, H, D): J_i."""
    mean: Tensor
    """(N, H): W^T p_i."""
    head: Tensor
    """(C, H): W."""
    head_squared: Tensor
    """(C, H): the squares of its entries."""


def shared_tail(seen: Observation) -> Tail | None:
    """Return the last layer before the head, or None where there is none or its update says nothing."""
    try:
        tail = find_tail(seen.model)
    except AnatomyError:
        return None
    update = seen.update.get(tail.layer.weight)
    return tail if update is not None and bool(update.any()) else None


def run_prefixes(seen: Observation, tail: Tail, tokens: Sequence[int], parents: Sequence[int]) -> PrefixStates:
    """Run the model once over the longest prefixes and take every prefix's rows from there."""
    paths, where = _paths(tokens, parents)
    ids, mask = padded_batch(seen, paths)
    rows, columns = (torch.tensor(index, device=ids.device) for index in zip(*where, strict=True))
    layer, head = seen.model.get_submodule(tail.layer.module), seen.model.get_submodule(tail.head)
    taken: dict[str, Tensor] = {}

    def at_layer(module: object, given: tuple[Tensor, ...], states: Tensor) -> Tensor:
        taken["given"] = given[0].detach()
        taken["made"] = states.detach().requires_grad_()
        return taken["made"]

    def at_head(module: object, given: tuple[Tensor, ...], states: Tensor) -> None:
        taken["features"], taken["logits"] = given[0], states.detach()

    handles = [layer.register_forward_hook(at_layer), head.register_forward_hook(at_head)]
    try:
        with torch.enable_grad():
            seen.model(input_ids=ids, attention_mask=mask)
    finally:
        for handle in handles:
            handle.remove()
    features, start = taken["features"], taken["made"]
    slopes = []
    for feature in range(features.shape[-1]):  # tokens do not mix behind the layer, so one pass serves all of them
        (slope,) = torch.autograd.grad(features[..., feature].sum(), start, retain_graph=True)
        slopes.append(slope[rows, columns])
    weight: Tensor = head.weight.detach()  # type: ignore[operator]
    return PrefixStates(
        given=taken["given"][rows, columns].double(),
        slope=torch.stack(slopes, dim=1),
        mean=taken["logits"][rows, columns].softmax(dim=1) @ weight,
        head=weight,
        head_squared=weight.square(),
    )


def _paths(tokens: Sequence[int], parents: Sequence[int]) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Return the prefixes that no other one continues, and for every prefix (row, column) where its last token stands."""
    inner = set(parents)
    paths: list[list[int]] = []
    where: dict[int, tuple[int, int]] = {}
    for leaf in (node for node in range(len(tokens)) if node not in inner):
        chain, node = [], leaf
        while node >= 0:
            chain.append(node)
            node = parents[node]
        chain.reverse()
        for column, member in enumerate(chain):
            where.setdefault(member, (len(paths), column))
        paths.append([tokens[member] for member in chain])
    return paths, [where[node] for node in range(len(tokens))]


def atoms_of(states: PrefixStates, node: int, targets: Tensor) -> Tensor:
    """Return (K, D) float64: the gradient at a prefix that each target would leave, times N."""
    return (states.mean[node] - states.head[targets]).double() @ states.slope[node].double()


@dataclass(frozen=True)
class Targets:
    """What follows a prefix."""

    tokens: list[int]
    amounts: list[float]
    """How often, times 1/N and the clipping factor."""
    residual: float
    """Share of the gradient left unexplained."""


def explain(states: PrefixStates, node: int, gradient: Tensor, known: Sequence[int]) -> Targets:
    """Explain a prefix's gradient by targets: those that are known to follow first, then the best of all."""
    chosen = list(known)
    size = float(gradient.norm())
    while True:
        amounts, left = least_squares(states, node, gradient, chosen)
        residual = float(left.norm()) / max(size, 1e-300)
        if residual < EXPLAINED or len(chosen) >= MOST_TARGETS:
            return Targets(chosen, amounts, residual)
        best = _best_target(states, node, left, chosen)
        _, less = least_squares(states, node, gradient, [*chosen, best])
        if float(less.norm()) > 0.9 * float(left.norm()):  # nothing explains the rest
            return Targets(chosen, amounts, residual)
        chosen.append(best)


def least_squares(
    states: PrefixStates, node: int, gradient: Tensor, targets: Sequence[int]
) -> tuple[list[float], Tensor]:
    """Return the amounts of some targets that explain a prefix's gradient best, and (D,) the rest of the gradient."""
    if not targets:
        return [], gradient
    atoms = atoms_of(states, node, torch.tensor(targets, device=gradient.device))  # (K, D)
    amounts = torch.linalg.lstsq(atoms.T, gradient[:, None]).solution[:, 0]
    return amounts.tolist(), gradient - amounts @ atoms


def _best_target(states: PrefixStates, node: int, left: Tensor, taken: Sequence[int]) -> int:
    """Return the token whose atom points most nearly where `left` does.

    All inner products come from one product with the head; lengths are estimated with the diagonal of J J^T, and the best
    `SHORTLIST` are computed exactly.
    """
    inner, length = inner_and_length(states, node, left)
    score = inner / length
    if taken:
        score[torch.tensor(taken, device=score.device)] = -torch.inf
    short = score.topk(min(SHORTLIST, len(score))).indices
    atoms = atoms_of(states, node, short)
    exact = (atoms @ left) / atoms.norm(dim=1).clamp_min(1e-300)
    exact = torch.where(score[short].isinf(), -torch.inf, exact)
    return int(short[exact.argmax()])


def inner_and_length(states: PrefixStates, node: int, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return (C,) the inner product of every token's atom with a gradient, and (C,) the estimated length of every atom."""
    slope, head, mean = states.slope[node], states.head, states.mean[node]
    pulled = slope @ gradient.to(slope)  # (H,)
    weight = slope.square().sum(dim=1)  # (H,)
    square = states.head_squared @ weight - 2 * (head @ (weight * mean)) + (weight * mean.square()).sum()
    return mean @ pulled - head @ pulled, square.clamp_min(1e-30).sqrt()
