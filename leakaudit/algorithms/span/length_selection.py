"""First sentences for the search, at the best lengths.

The joint regression (`sparse_regression`) is first solved roughly for every likely length. Then the best length is
solved in full, and its neighbours as long as the score grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from leakaudit.algorithms.span.explained_signal import ExplainedSignal
from leakaudit.algorithms.span.hypothesis_search import Hypothesis, can_simulate, labels_of
from leakaudit.algorithms.span.problem import SpanProblem
from leakaudit.algorithms.span.sparse_regression import Joint, JointFit
from leakaudit.algorithms.span.word_scores import WordScores

SOLVE_SHARE = 0.2
"""Share of the remaining time for the joint regression of one length.
Our choice: about three lengths are solved, and the search needs time, too."""

STARTS = 2
"""Number of sentences from the joint regression from which the search starts.
Chosen on training sentences; see docs/decisions/span_constants.md."""


@dataclass(frozen=True)
class LengthSelection:
    """The joint regression over all likely lengths."""

    problem: SpanProblem
    scores: WordScores
    signal: ExplainedSignal

    def starts(self) -> list[Hypothesis]:
        """Return sentences to search from, most likely first.

        Each has the class that explains the update best, if sentences can be simulated.
        """
        budget, scores = self.problem.budget, self.scores
        simulates = can_simulate(self.problem.seen)
        lengths = [length for length in scores.lengths if length <= scores.positions]
        if self.signal.projections and not budget.exhausted():
            fits = {length: self._fit(length) for length in lengths}
            rough = {length: fit.sketch(budget) for length, fit in fits.items()}
            best = max(rough, key=lambda length: rough[length].score)
            if simulates:  # little noise: the rough solution is the sentence
                (first,) = self._labelled([Hypothesis(rough[best].token_ids)])
                if self.signal.is_explained(first):
                    return [first]
            plain = [Hypothesis(joint.token_ids) for joint in self._solved(best)[:STARTS]]
        else:
            plain = [scores.sentence(length) for length in lengths]
        return self._labelled(plain) if simulates and not budget.exhausted() else plain

    def _labelled(self, plain: Sequence[Hypothesis]) -> list[Hypothesis]:
        """Give each sentence the class that explains the update best."""
        tried = [replace(h, label=label) for h in plain for label in labels_of(self.problem.seen)]
        scores = self.signal.simulation.explains(tried, self.signal.compared).view(len(plain), -1)
        return [replace(h, label=int(row.argmax())) for h, row in zip(plain, scores, strict=True)]

    def _solved(self, length: int) -> list[Joint]:
        """Return full solutions, best first.

        They are solutions for one length, and for its neighbours as long as the score grows.
        """
        found: dict[int, Joint] = {}

        def score(n: int) -> float:
            if not self.scores.frame.shortest <= n <= self.scores.positions:
                return float("-inf")
            if n not in found:
                found[n] = self._fit(n).solve(self.problem.budget.part(SOLVE_SHARE))
            return found[n].score

        for step in (-1, 1):
            while score(length + step) > score(length) and not self.problem.budget.exhausted():
                length += step
        return sorted(found.values(), key=lambda joint: -joint.score)

    def _fit(self, length: int) -> JointFit:
        """Return the regression for one length.

        The frame's tokens are fixed. At each position between them the words of highest score are the candidates.
        """
        frame, stage = self.scores.frame, self.problem.stage
        known = (*frame.before, *[-1] * (length - frame.size), *frame.after)
        pools, inputs = [], []
        for position, token in enumerate(known):
            pool = torch.tensor([token], device=stage.device) if token >= 0 else self.scores.pool[:, position]
            pools.append(pool)
            inputs.append(stage.inputs(pool, torch.full_like(pool, position)))
        return JointFit(self._gram, len(self.signal.update_in_noise), pools, inputs)

    @cached_property
    def _gram(self) -> Tensor:
        """(D, D) float64: S^T S of the projections' updates S in units of their noise."""
        stacked = self.signal.update_in_noise
        return stacked.T @ stacked
