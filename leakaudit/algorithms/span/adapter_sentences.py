"""The sentences of a decoder's batch from the rows of its adapters, whose words are known.

The pursuit of prefixes (`prefix_pursuit`) finds the tree of all prefixes, and `prefix_ends` the sentences that end in it. The whole step is
then computed again (`resimulation`); only a guess that agrees is proved. (Own derivation.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from leakaudit.algorithms.resimulation import Proof, prove
from leakaudit.algorithms.span.adapter_inputs import AdapterInputs
from leakaudit.algorithms.span.adapter_rows import AdapterRows, GradientRows
from leakaudit.algorithms.span.prefix_ends import Ends, PrefixEnds
from leakaudit.algorithms.span.prefix_pursuit import PrefixPursuit, typical_inputs
from leakaudit.algorithms.span.problem import SpanProblem
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.models.structure import Adapter, Tail, adapter_groups, find_tail
from leakaudit.plugins.attack_protocol import GuessedSequence

SHARE = 0.9
"""Share of the time for the search; the rest is for the proof. Our choice."""


@dataclass(frozen=True)
class AdapterSentences:
    """The parts of a decoder that adapters show, with their rows."""

    inputs: AdapterInputs
    rows: tuple[AdapterRows, ...]
    """One for each group of `inputs`."""
    tail: Tail
    """The head."""

    @classmethod
    def of(cls, problem: SpanProblem) -> AdapterSentences | None:
        """Return the parts, or None if the sentences cannot be read.

        They can in a language model with causal attention, without dropout, whose adapters share both updates.
        """
        seen = problem.seen
        masked = seen.facts.training_mode and any(rate > 0 for rate in seen.facts.dropout.values())
        if masked or not (seen.whole and problem.anatomy.causal and seen.facts.task == "causal-lm"):
            return None
        try:
            every, tail = adapter_groups(seen.model), find_tail(seen.model)
        except AnatomyError:
            return None
        groups = [group for group in (shared_adapters(seen, group) for group in every) if group]
        if len(groups) < 2:
            return None
        inputs = AdapterInputs(seen.model, groups)
        return cls(inputs, tuple(GradientRows.of(seen, group) for group in inputs.groups), tail)

    def found(self, problem: SpanProblem, words: Tensor) -> Ends | None:
        """Return the sentences of these words, or None if no prefix was found.

        Args:
            problem: the observation with its parts.
            words: (W,) token ids.
        """
        first, longest = problem.seen.facts.vocabulary.starts_with, problem.stage.max_length
        typical = typical_inputs(self.inputs, words, first, longest, problem.rng)
        layers = [rows.evidence(given) for rows, given in zip(self.rows, typical, strict=True)]
        pursuit = PrefixPursuit(self.inputs, layers, words, first, longest)
        pursuit.run(problem.budget.part(SHARE))
        if not pursuit.prefixes:
            return None
        ends = PrefixEnds(problem.seen, self.inputs, self.rows, self.tail, pursuit.prefixes)
        found = ends.sentences(problem.budget)
        return found if found.sentences else None


def shared_adapters(seen: Observation, group: Sequence[Adapter]) -> tuple[Adapter, ...]:
    """Return the adapters of a group with an update of A that is not zero."""
    return tuple(a for a in group if a.down.weight in seen.update and bool(seen.update[a.down.weight].any()))


def proved(problem: SpanProblem, ends: Ends) -> Proof:
    """Return the sentences, marked as proved if the step that they claim is the observed one."""
    confidence = min(ends.cosine, 0.99)
    return prove(problem.seen, [GuessedSequence(ids, confidence) for ids in ends.sentences], problem.budget)
