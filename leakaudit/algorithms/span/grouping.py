"""Grouping of inputs into sequences, by attention.

`assemble` grows a sequence from each input in turn (`attention_evidence`) and accepts those that pass the exact test.
The remaining inputs are grouped as well as possible. `group_inputs` does the same from the update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from leakaudit.algorithms.span.attention_evidence import COMPLETE, AttentionEvidence, Group
from leakaudit.algorithms.span.factoring import AttentionFactors, factor
from leakaudit.algorithms.span.problem import SpanProblem
from leakaudit.plugins.budget import Budget

SPARE_DIMENSIONS = 2
"""Dimensions per head that a sequence must leave free so that its residual is a test.
Our choice: with twelve heads these are 24 equations that a wrong sequence would have to satisfy by chance."""


def assemble(
    factors: AttentionFactors, positions: Tensor, *, beam: int, budget: Budget, closing: Tensor | None = None
) -> list[Group]:
    """Split inputs into sequences, best first; every input is used once.

    Args:
        factors: keys, queries and their gradients of n inputs.
        positions: (n,) int64 position of each input; a sequence has one input at each position from 0.
        beam: hypotheses kept while a sequence grows.
        budget: checked before each seed.
        closing: as `AttentionEvidence` takes it.
    """
    assembly = _Assembly(factors, positions, beam, budget, closing)
    # The inputs with the largest gradients say most about their neighbours.
    seeds = factors.updates.square().sum((0, 2)).argsort(descending=True).tolist()
    incomplete = assembly.accept_complete(seeds)
    assembly.accept_incomplete(sorted(incomplete, key=lambda seed: incomplete[seed].residual))
    return sorted(assembly.groups, key=lambda group: group.residual)


class _Assembly:
    """Inputs that are free, and the sequences that were accepted so far."""

    def __init__(
        self, factors: AttentionFactors, positions: Tensor, beam: int, budget: Budget, closing: Tensor | None
    ) -> None:
        count = len(positions)
        everyone = torch.arange(count, device=positions.device)
        self.groups: list[Group] = []
        self._evidence = AttentionEvidence(
            factors.vectors, factors.updates, everyone, positions, factors.missing, closing
        )
        self._positions, self._beam, self._budget = positions, beam, budget
        self._free = torch.ones(count, dtype=torch.bool, device=positions.device)
        # d_h + 1 vectors per head explain any gradient, so the residual of such a long sequence is no test.
        given_up = 0 if factors.missing is None else factors.missing.shape[1]
        self._testable = factors.queries.shape[2] - SPARE_DIMENSIONS - given_up

    def accept_complete(self, seeds: Sequence[int]) -> dict[int, Group]:
        """Accept each sequence that passes its test.

        Returns:
            Seed -> best hypothesis, for the other seeds.
        """
        incomplete: dict[int, Group] = {}
        for seed in self._unused(seeds):
            group = self._grown(seed)
            if group.residual < COMPLETE and len(group.members) <= self._testable:
                self._accept(group)
            else:
                incomplete[seed] = group
        return incomplete

    def accept_incomplete(self, seeds: Sequence[int]) -> None:
        """Accept a sequence for each free seed, so that no input is lost.

        If the free inputs have one input at each position, they are one sequence by elimination.
        """
        for seed in self._unused(seeds):
            rest = self._free.nonzero().flatten()
            rest = rest[self._positions[rest].argsort()]
            if torch.equal(self._positions[rest], torch.arange(len(rest), device=rest.device)):
                residual = max((group.residual for group in self.groups), default=1.0)
                self._accept(Group(tuple(rest.tolist()), residual))
            else:
                self._accept(self._grown(seed))

    def _unused(self, seeds: Sequence[int]) -> Iterator[int]:
        for seed in seeds:
            if not bool(self._free[seed]):
                continue
            if self._budget.exhausted():
                return
            yield seed

    def _grown(self, seed: int) -> Group:
        longest = int(self._positions.max()) + 1
        return self._evidence.grow([seed], self._free, self._beam, longest)[0]

    def _accept(self, group: Group) -> None:
        self.groups.append(group)
        self._free[list(group.members)] = False


def by_position(positions: Tensor) -> list[Group]:
    """Return one group, the first pair at every position; it is used without evidence."""
    first: dict[int, int] = {}
    for index, position in enumerate(positions.tolist()):
        first.setdefault(position, index)
    return [Group(tuple(first[p] for p in sorted(first)), residual=1.0)]


def own_score_of(group: Group) -> float:
    """Return 1 minus the residual for a complete group, and half of that for others."""
    share = min(1.0, max(0.0, 1.0 - group.residual))
    return share if group.residual < COMPLETE else 0.5 * share


def group_inputs(
    problem: SpanProblem, positions: Tensor, inputs: Tensor, span: Tensor | None = None, closing: Tensor | None = None
) -> list[Group]:
    """Sort inputs that were found behind dropout masks into sequences.

    Every input is used once.

    Args:
        problem: the observation with its parts.
        positions: (n,) int64 position of each input.
        inputs: (n, D) float64, as the attention saw them.
        span: as `factor` takes it.
        closing: as `AttentionEvidence` takes it.
    """
    if len(torch.unique(positions)) == len(positions):  # no position occurs twice, so there is one sequence
        missing = max(0.0, 1.0 - len(positions) / problem.basis.rank)
        return [Group(tuple(positions.argsort().tolist()), residual=missing)]
    factors = factor(problem.seen.update, problem.weights, problem.anatomy, inputs, span)
    groups = (
        []
        if factors is None
        else assemble(factors, positions, beam=problem.beam, budget=problem.budget, closing=closing)
    )
    return groups or by_position(positions)
