"""Ends of sequences with known prefixes, and the tokens at these ends.

A language model's last token is only a target: no attention that the loss depends on reads it. `target_gradients` gives
the targets of every prefix and how often each follows. If the prefix and a target together are no known prefix, the
target is a last token. If a prefix occurs more often than it is continued, sequences end there. So equal sequences are
counted, and a sequence that is the beginning of another one is found.

A classifier is read in the same way, with classes in place of tokens: dy_i is non-zero only at the end of a sequence.

With dropout on, the inputs a_i are known except for masks in every layer. The part of the known targets, computed
without masks, is subtracted from the update. Then ridge regression on the inputs at the ends estimates dy_i. The token
whose gradient is nearest is the guess. (Own derivation.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.algorithms.span.target_gradients import (
    EXPLAINED,
    SHORTLIST,
    PrefixStates,
    Targets,
    atoms_of,
    explain,
    inner_and_length,
    least_squares,
    run_prefixes,
    shared_tail,
)
from leakaudit.client.observation import Observation
from leakaudit.plugins.budget import Budget

NOTHING = 1e-3
"""Least ratio of |dy_i| to the largest one at which a classifier's prefix counts as an end.
Our choice: rounding gives 1e-5; the weakest end is a sentence whose class the model predicts with certainty."""

RIDGE = 0.1
"""Ridge parameter of the estimate behind dropout, in units of an input's mean squared length.
Chosen on training sentences; see docs/decisions/span_constants.md."""

UNEXPLAINED = 0.3
"""Own score of a sequence whose last gradient no target explains. Our choice."""

UNEVEN, MOSTLY = 0.1, 0.9
"""Relative tolerance for multiples of a unit (UNEVEN), and the share of amounts that must be within it (MOSTLY).
Our choice."""

SAME_INPUT = 1e-4
"""Largest relative difference of two inputs that count as the same.
Our choice: rounding is far below, another word far above."""


@dataclass(frozen=True)
class Ending:
    """Sequences that end at a prefix, or one token after it."""

    node: int
    """Index of the prefix."""
    last_token: int | None
    """The last token, if it is not part of any prefix."""
    count: int
    """Number of sequences that end there."""
    own_score: float
    """Share of the gradient at that prefix that its targets explain, 0 to 1."""


def endings(seen: Observation, tokens: Sequence[int], parents: Sequence[int], budget: Budget) -> list[Ending] | None:
    """Find the ends of the sequences whose prefixes are known.

    Args:
        seen: the observation.
        tokens: (N,) last token of each prefix.
        parents: (N,) index of the prefix without its last token, -1 for single tokens; parents come before children.
        budget: checked between prefixes.

    Returns:
        The ends, or None if the last layer's update gives no information or the budget ends.
    """
    tail = shared_tail(seen) if seen.facts.task in ("classification", "causal-lm") else None
    if tail is None:
        return None
    states = run_prefixes(seen, tail, tokens, parents)
    if states.given.shape[0] >= states.given.shape[1]:
        return None  # the layer has fewer inputs than there are prefixes, so the pseudoinverse is not exact
    update = tail.layer.by_output(seen.update[tail.layer.weight]).double()  # (D, F)
    duplicates = _duplicates(states.given, tokens, parents)
    distinct = sorted(set(duplicates))
    gradients = torch.zeros(len(tokens), update.shape[0], dtype=torch.float64, device=update.device)
    gradients[distinct] = (update @ torch.linalg.pinv(states.given[distinct])).T
    if seen.facts.task == "classification":
        return _ends_of_classifier(states, gradients)
    return _ends_of_language_model(states, gradients, tokens, parents, duplicates, budget)


def likely_last_tokens(
    seen: Observation, paths: Sequence[tuple[int, ...]], budget: Budget
) -> list[tuple[int, float]] | None:
    """Guess each sequence's last token behind unknown dropout masks.

    Args:
        seen: the observation of a language model.
        paths: token ids of the sequences without their last tokens.
        budget: checked once, before anything is computed.

    Returns:
        Token and own score for each path, or None if the last layer's update gives no information. The own score is
        the share by which the token's atom is nearer to the estimated gradient than the next one.
    """
    if seen.facts.task != "causal-lm" or not paths or budget.exhausted():
        return None
    tail = shared_tail(seen)
    if tail is None:
        return None
    tokens, parents, ends = _forest_of(paths)
    states = run_prefixes(seen, tail, tokens, parents)
    left = tail.layer.by_output(seen.update[tail.layer.weight]).double()  # (D, F)
    amount = 1.0 / len(tokens)
    inner = [child for child, parent in enumerate(parents) if parent >= 0]
    if inner:
        follows = torch.tensor([[tokens[child]] for child in inner], device=left.device)
        atoms = torch.cat([atoms_of(states, parents[child], t) for child, t in zip(inner, follows, strict=True)])
        expected = atoms.T @ states.given[[parents[child] for child in inner]]
        amount = max(float((left * expected).sum() / expected.square().sum().clamp_min(1e-300)), 1e-12)
        left = left - amount * expected
    rows = sorted(set(ends))
    given = states.given[rows]
    size = states.given.square().sum(1).mean()
    ridge = RIDGE * size * torch.eye(len(rows), dtype=given.dtype, device=given.device)
    gradients = dict(zip(rows, torch.linalg.solve(given @ given.T + ridge, given @ left.T), strict=True))
    return [_nearest_target(states, node, gradients[node], amount) for node in ends]


def _nearest_target(states: PrefixStates, node: int, gradient: Tensor, amount: float) -> tuple[int, float]:
    """Return the token whose atom is nearest to an estimated gradient, and its lead.

    The lead is the share by which its distance is smaller than the next one. Distances are better than angles: if the
    model expects the next token, the gradient is small and mostly noise.

    Args:
        states: of all prefixes.
        node: the prefix.
        gradient: (D,) float64, estimated.
        amount: factor of the atoms.
    """
    inner, length = inner_and_length(states, node, gradient)
    near = (amount**2 * length.square() - 2 * amount * inner).topk(min(SHORTLIST, len(inner)), largest=False).indices
    distance, order = (amount * atoms_of(states, node, near) - gradient).norm(dim=1).sort()
    beats = 1.0 - float(distance[0] / distance[1].clamp_min(1e-300)) if len(distance) > 1 else 1.0
    return int(near[order[0]]), beats


def _forest_of(paths: Sequence[tuple[int, ...]]) -> tuple[list[int], list[int], list[int]]:
    """Return tokens and parents of all prefixes, and the node where each path ends."""
    nodes: dict[tuple[int, ...], int] = {}
    parents: list[int] = []
    for path in paths:
        for length in range(1, len(path) + 1):
            if path[:length] not in nodes:
                nodes[path[:length]] = len(parents)
                parents.append(nodes.get(path[: length - 1], -1))
    return [prefix[-1] for prefix in nodes], parents, [nodes[path] for path in paths]


def _duplicates(given: Tensor, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Return for every prefix the prefix whose gradient it shares, mostly itself.

    If inputs carry no position, attention over copies of one token gives the same value for every number of copies. So
    prefixes of one repeated token have equal inputs in every layer.
    """
    duplicates: list[int] = []
    for node, parent in enumerate(parents):
        first = duplicates[parent] if parent >= 0 else node
        alike = parent >= 0 and tokens[node] == tokens[first] and parents[first] < 0
        same = alike and bool((given[node] - given[first]).norm() < SAME_INPUT * given[first].norm())
        duplicates.append(first if same else node)
    return duplicates


def _ends_of_classifier(states: PrefixStates, gradients: Tensor) -> list[Ending] | None:
    """Return the prefixes whose own gradient is not zero.

    A classifier reads the last token of each sequence only. None if all gradients are zero.
    """
    sizes = gradients.norm(dim=1)
    largest = float(sizes.max())
    if largest == 0.0:
        return None
    found: list[tuple[int, float, float]] = []
    for node in (sizes > NOTHING * largest).nonzero().flatten().tolist():
        fits = (least_squares(states, node, gradients[node], [label]) for label in range(len(states.head)))
        residual, amount = min(
            ((float(left.norm()) / float(sizes[node]), amounts[0]) for amounts, left in fits if amounts[0] > 0),
            default=(float("inf"), 0.0),
        )
        if residual < EXPLAINED:
            found.append((node, amount, residual))
    return _counted(found)


def _counted(found: Sequence[tuple[int, float, float]]) -> list[Ending]:
    unit = _unit([amount for _, amount, _ in found])
    return [
        Ending(node, None, max(1, round(amount / unit)), own_score=max(0.0, 1.0 - residual))
        for node, amount, residual in found
    ]


def _unit(amounts: Sequence[float]) -> float:
    """Return the amount of one sequence.

    It is the largest amount of which nearly all others are whole multiples.
    """
    positive = sorted(amount for amount in amounts if amount > 0)
    if not positive:
        return 1.0
    for least in reversed(positive):
        whole = [amount / round(amount / least) for amount in positive if amount > least / 2]
        exact = [unit for unit in whole if abs(unit / least - 1.0) < UNEVEN]
        if len(exact) >= MOSTLY * len(positive):
            return sorted(exact)[len(exact) // 2]
    return positive[len(positive) // 2]


def _ends_of_language_model(
    states: PrefixStates,
    gradients: Tensor,
    tokens: Sequence[int],
    parents: Sequence[int],
    duplicates: Sequence[int],
    budget: Budget,
) -> list[Ending] | None:
    """Return the ends of a language model's sequences, or None if the budget ends.

    If a prefix and a target together are no known prefix, the target is a last token. If a prefix occurs more often than
    it is continued, sequences end there.
    """
    children: list[dict[int, int]] = [{} for _ in tokens]  # token -> child, of a prefix and of all its duplicates
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[duplicates[parent]][tokens[node]] = node
    targets: list[Targets] = []
    for node, known in enumerate(children):
        if budget.exhausted():
            return None
        own = duplicates[node] == node
        targets.append(explain(states, node, gradients[node], list(known)) if own else Targets([], [], float("inf")))
    unit = _unit([amount for found in targets if found.residual < EXPLAINED for amount in found.amounts])
    counts = [[round(amount / unit) for amount in found.amounts] for found in targets]
    originals = [node for node in range(len(tokens)) if duplicates[node] == node]
    return [end for node in originals for end in _ends_after(node, targets, counts, children[node])]


def _ends_after(
    node: int, targets: Sequence[Targets], counts: Sequence[Sequence[int]], children: Mapping[int, int]
) -> Iterator[Ending]:
    """Yield the ends of sequences at one prefix, or one token after it.

    Args:
        node: the prefix.
        targets: of each prefix.
        counts: how often each of these targets follows its prefix.
        children: token -> the prefix with this token appended.
    """
    found = targets[node]
    if found.residual >= EXPLAINED:  # a wrong prefix, or one that rounding hides: its continuations are unknown
        if not children:
            yield Ending(node, None, 1, UNEXPLAINED)
        return
    own_score = 1.0 - found.residual
    for token, count, amount in zip(found.tokens, counts[node], found.amounts, strict=True):
        if token in children:
            child = children[token]
            stops = count - sum(counts[child]) if targets[child].residual < EXPLAINED else 0
            if stops > 0:
                yield Ending(child, None, stops, own_score)
        elif amount > 0:  # micro-batches of different sizes may leave no common unit, and so a count of 0
            yield Ending(node, token, max(1, count), own_score)
