"""Targets that follow each prefix, from the gradient of the last layer.

From known prefixes the public model computes the inputs a_i of the last linear layer before the head. They are linearly
independent if there are no more prefixes than the layer has inputs (in most models four times the hidden size). So its
update G = sum_i dy_i a_i^T gives the gradient dy_i at every prefix:

    dY = G pinv(A),        dy_i = 1/N sum_t k_it J_i^T W^T (p_i - e_t),

where J_i is the derivative of the head's input by the layer's output at that token, W the head, p_i the predicted
probabilities, k_it how often token t follows prefix i as a target, and N the number of targets. The atoms J_i^T W^T
(p_i - e_t) are computable for every token t. An orthogonal matching pursuit over them gives k_it. (Own derivation.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.algorithms.least_squares import solve_least_squares
from leakaudit.algorithms.padding import padded_batch
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.models.structure import Tail, find_tail

EXPLAINED = 3e-2
"""Largest share of |dy_i| that the targets may leave unexplained.
Chosen on training sentences; see docs/decisions/span_constants.md."""

SHORTLIST = 64
"""Number of tokens whose atoms are computed exactly.
Our choice: the estimate that ranks tokens is exact except for the length of the atoms."""

MOST_TARGETS = 24
"""Most different tokens after one prefix. Our choice."""


@dataclass(frozen=True)
class PrefixStates:
    """What the public model computes at the last token of every prefix."""

    given: Tensor
    """(N, F) float64: inputs a_i of the last layer before the head."""
    slope: Tensor
    """(N, H, D): J_i."""
    mean: Tensor
    """(N, H): W^T p_i."""
    head: Tensor
    """(C, H): W."""
    head_squared: Tensor
    """(C, H): squared entries of W."""


def shared_tail(seen: Observation) -> Tail | None:
    """Return the last layer before the head, or None if its update is not shared.

    An all-zero update counts as not shared.
    """
    try:
        tail = find_tail(seen.model)
    except AnatomyError:
        return None
    update = seen.update.get(tail.layer.weight)
    return tail if update is not None and bool(update.any()) else None


def run_prefixes(seen: Observation, tail: Tail, tokens: Sequence[int], parents: Sequence[int]) -> PrefixStates:
    """Run the model once over the longest prefixes and read every prefix's state.

    Args:
        seen: the observation.
        tail: the last layer before the head, and the head.
        tokens: (N,) last token of each prefix.
        parents: (N,) index of the prefix without it, -1 for single tokens.
    """
    paths, where = _paths(tokens, parents)
    ids, mask = padded_batch(seen, paths)
    rows, columns = (torch.tensor(index, device=ids.device) for index in zip(*where, strict=True))
    layer, head = seen.model.get_submodule(tail.layer.module), seen.model.get_submodule(tail.head)
    taken: dict[str, Tensor] = {}

    def at_layer(_: object, given: tuple[Tensor, ...], states: Tensor) -> Tensor:
        taken["given"] = given[0].detach()
        taken["made"] = states.detach().requires_grad_()
        return taken["made"]

    def at_head(_: object, given: tuple[Tensor, ...], states: Tensor) -> None:
        taken["features"], taken["logits"] = given[0], states.detach()

    with layer.register_forward_hook(at_layer), head.register_forward_hook(at_head), torch.enable_grad():
        seen.model(input_ids=ids, attention_mask=mask)
    weight: Tensor = head.weight.detach()  # type: ignore[operator]
    return PrefixStates(
        given=taken["given"][rows, columns].double(),
        slope=_slopes(taken["features"], taken["made"], rows, columns),
        mean=taken["logits"][rows, columns].softmax(dim=1) @ weight,
        head=weight,
        head_squared=weight.square(),
    )


def _slopes(features: Tensor, start: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return (N, H, D): derivative of the head's input by the layer's output.

    Args:
        features: (B, T, H), computed from `start`.
        start: (B, T, D), the layer's output.
        rows: (N,) int64: row of each token.
        columns: (N,) int64: column of each token.
    """
    slopes = []
    for feature in range(features.shape[-1]):  # one pass for all: tokens do not mix behind this layer
        (slope,) = torch.autograd.grad(features[..., feature].sum(), start, retain_graph=True)
        slopes.append(slope[rows, columns])
    return torch.stack(slopes, dim=1)


def _paths(tokens: Sequence[int], parents: Sequence[int]) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Return the longest prefixes, and where each prefix ends.

    Returns:
        Token ids of the prefixes that no other one continues, and (row, column) of every prefix's last token in them.
    """
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
    """Return (K, D) float64: the gradient at a prefix for each target, times N."""
    return (states.mean[node] - states.head[targets]).double() @ states.slope[node].double()


@dataclass(frozen=True)
class Targets:
    """The targets that follow a prefix."""

    tokens: list[int]
    amounts: list[float]
    """How often each target follows, times 1/N and the clipping factor."""
    residual: float
    """Share of the gradient left unexplained."""


def explain(states: PrefixStates, node: int, gradient: Tensor, known: Sequence[int]) -> Targets:
    """Explain a prefix's gradient by targets.

    Args:
        states: of all prefixes.
        node: the prefix.
        gradient: (D,) float64: dy_i.
        known: tokens that are known to follow; others are added if the gradient needs them.
    """
    chosen = list(known)
    size = float(gradient.norm())
    while True:
        amounts, left = least_squares(states, node, gradient, chosen)
        residual = float(left.norm()) / max(size, 1e-300)
        if residual < EXPLAINED or len(chosen) >= MOST_TARGETS:
            return Targets(chosen, amounts, residual)
        best = _best_target(states, node, left, chosen)
        _, less = least_squares(states, node, gradient, [*chosen, best])
        if float(less.norm()) > 0.9 * float(left.norm()):  # no target explains the rest
            return Targets(chosen, amounts, residual)
        chosen.append(best)


def least_squares(
    states: PrefixStates, node: int, gradient: Tensor, targets: Sequence[int]
) -> tuple[list[float], Tensor]:
    """Return the best amounts of some targets, and (D,) the unexplained gradient."""
    if not targets:
        return [], gradient
    atoms = atoms_of(states, node, torch.tensor(targets, device=gradient.device))  # (K, D)
    amounts = solve_least_squares(atoms.T, gradient[:, None])[:, 0]
    return amounts.tolist(), gradient - amounts @ atoms


def _best_target(states: PrefixStates, node: int, left: Tensor, taken: Sequence[int]) -> int:
    """Return the token whose atom has the largest cosine with a residual.

    All inner products come from one product with the head. Lengths are estimated with the diagonal of J J^T, and the
    best `SHORTLIST` tokens are computed exactly.
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
    """Return (C,) inner products of all atoms with a gradient, and (C,) their lengths.

    The lengths are estimates.
    """
    slope, head, mean = states.slope[node], states.head, states.mean[node]
    pulled = slope @ gradient.to(slope)  # (H,)
    weight = slope.square().sum(dim=1)  # (H,)
    square = states.head_squared @ weight - 2 * (head @ (weight * mean)) + (weight * mean.square()).sum()
    return mean @ pulled - head @ pulled, square.clamp_min(1e-30).sqrt()
