"""The sentences of a decoder's batch from its adapters, if the words are known.

The pursuit of prefixes (`prefix_pursuit`) finds the tree of all prefixes, and `prefix_ends` the sentences that end in it. The whole step is
then computed again (`resimulation`); only a guess that agrees is proved. (Own derivation.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from leakaudit.algorithms.adam_step import AdamStep
from leakaudit.algorithms.resimulation import Proof, prove
from leakaudit.algorithms.span.adapter_inputs import AdapterInputs
from leakaudit.algorithms.span.adapter_rows import AdapterRows, GradientRows, StepRows
from leakaudit.algorithms.span.prefix_ends import Ends, PrefixEnds
from leakaudit.algorithms.span.prefix_pursuit import PrefixPursuit, typical_inputs
from leakaudit.algorithms.span.problem import SpanProblem
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.models.structure import Adapter, Tail, adapter_groups, find_tail
from leakaudit.plugins.attack_protocol import GuessedSequence
from leakaudit.plugins.budget import Budget

SHARE = 0.9
"""Share of the time for the search; the rest is for the ends and the proof. Our choice."""


TURNS = 2
"""Times that imprecise rows are estimated again with the prefixes that were found.
Chosen on training texts: a third time missed no fewer prefixes."""

UNTESTED = 0.5
"""Own score of a classifier's sentences, whose ends nothing tests but the proof. Our choice."""


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

        They can if attention is causal, nothing is dropped out, and adapters of two layers and more have an update of A.
        """
        seen = problem.seen
        masked = seen.facts.training_mode and any(rate > 0 for rate in seen.facts.dropout.values())
        known = seen.facts.task in ("causal-lm", "classification")
        if masked or not (seen.whole and problem.anatomy.causal and known):
            return None
        try:
            every, tail = adapter_groups(seen.model), find_tail(seen.model)
        except AnatomyError:
            return None
        groups = [group for group in (shared_adapters(seen, group) for group in every) if group]
        if len(groups) < 2:
            return None
        inputs = AdapterInputs(seen.model, groups)
        step = AdamStep.of(seen)
        rows: tuple[AdapterRows, ...] = (
            tuple(GradientRows.of(seen, group) for group in inputs.groups)
            if step is None
            else tuple(StepRows(step, group) for group in inputs.groups)
        )
        return cls(inputs, rows, tail)

    def found(self, problem: SpanProblem, words: Tensor, budget: Budget) -> Ends | None:
        """Return the sentences of these words, or None if no prefix was found.

        Args:
            problem: the observation with its parts.
            words: (W,) token ids.
            budget: checked between prefixes, and between ends.
        """
        first, longest = problem.seen.facts.vocabulary.starts_with, problem.stage.max_length
        typical = typical_inputs(self.inputs, words, first, longest, problem.rng)
        ends = self._pursued(problem, typical, words, budget)
        for _ in range(TURNS):
            better = None if ends is None else self._refined(ends)
            if ends is None or better is None or budget.spent() > SHARE / 2 * budget.seconds:
                break
            before, ends = set(ends.prefixes), better._pursued(problem, typical, words, budget)
            if ends is None or set(ends.prefixes) == before:
                break
        if ends is None:
            return None
        if problem.seen.facts.task == "classification":  # the last token is an input, too
            return Ends(ends.leaves, (UNTESTED,) * len(ends.leaves))
        found = ends.sentences(budget)
        return found if found.sentences else None

    def _pursued(
        self, problem: SpanProblem, typical: Sequence[Tensor], words: Tensor, budget: Budget
    ) -> PrefixEnds | None:
        """Return the prefixes of one pursuit, or None if there are none."""
        first, longest = problem.seen.facts.vocabulary.starts_with, problem.stage.max_length
        layers = [rows.evidence(given) for rows, given in zip(self.rows, typical, strict=True)]
        pursuit = PrefixPursuit(self.inputs, layers, words, first, longest)
        pursuit.run(budget.part(SHARE))
        if not pursuit.prefixes:
            return None
        ends = PrefixEnds(problem.seen, self.inputs, self.rows, self.tail, pursuit.prefixes)
        return ends if ends.prefixes else None

    def _refined(self, ends: PrefixEnds) -> AdapterSentences | None:
        """Return this with rows that are estimated again, or None if they are exact."""
        rows = [each.refined(given) for each, given in zip(self.rows, ends.inputs, strict=True)]
        better = tuple(each for each in rows if each is not None)
        return replace(self, rows=better) if len(better) == len(self.rows) else None


def shared_adapters(seen: Observation, group: Sequence[Adapter]) -> tuple[Adapter, ...]:
    """Return the adapters of a group whose A has an update."""
    return tuple(a for a in group if a.down.weight in seen.update and bool(seen.update[a.down.weight].any()))


def proved(problem: SpanProblem, ends: Ends) -> Proof:
    """Return the sentences, marked as proved if their step is the observed one."""
    return prove(problem.seen, guessed(ends), problem.budget)


def guessed(ends: Ends, least: float = 0.0) -> list[GuessedSequence]:
    """Return the sentences whose last tokens explain their gradients.

    Args:
        ends: the sentences.
        least: cosine that a sentence must have.
    """
    pairs = zip(ends.sentences, ends.cosines, strict=True)
    return [GuessedSequence(ids, min(cosine, 0.99)) for ids, cosine in pairs if cosine >= least]
