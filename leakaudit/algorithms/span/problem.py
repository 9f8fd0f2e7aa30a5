"""What every stage of the span attack works on: one observation with its parts, its basis and the knobs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from leakaudit.algorithms.embedding_rows import FALSE_ROWS, can_read_rows, tokens_of, touched_rows
from leakaudit.algorithms.span.candidates import EMPTY_BLOCKS, Candidates, Scan, blocks, join
from leakaudit.algorithms.span.subspace import Basis, span_of, stacked_update
from leakaudit.client.observation import Observation
from leakaudit.models.structure import Anatomy, InputStage, anatomy_of, input_stage_of
from leakaudit.plugins.budget import Budget

STANDS_OUT = 0.8
"""A block of positions whose nearest pair is not below this share of its median holds nothing. Measured on a train split with
dropout 0.1: blocks with true pairs reach 0.6 or less, blocks without stay above 0.85."""


@dataclass(frozen=True)
class SpanProblem:
    """One observation as the stages see it. Made by `scene_of`."""

    seen: Observation
    anatomy: Anatomy
    stage: InputStage
    basis: Basis
    tokens: Tensor | None
    """(M,) the only token ids in question, where the word-embedding update names them; else None."""
    keep: int
    """Tokens per position that are checked in float64."""
    beam: int
    rng: torch.Generator
    budget: Budget

    @property
    def dropout(self) -> float:
        """Rate of the dropout that the attention inputs passed, 0 in eval mode."""
        if not self.seen.facts.training_mode:
            return 0.0
        modules = (*self.anatomy.dropout_before, *self.anatomy.dropout_after)
        return max((self.seen.facts.dropout.get(name, 0.0) for name in modules), default=0.0)

    @property
    def special(self) -> frozenset[int]:
        """Ids that the tokenizer puts around every text: they are in every sequence, so they are always tested."""
        return self.seen.facts.vocabulary.surrounding_ids

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """Parameter name -> weights before the step."""
        return {name: parameter.detach() for name, parameter in self.seen.model.named_parameters()}

    def scan(self) -> Candidates:
        """Scan positions until candidates run out: until two blocks in a row hold nothing that stands out of the rest."""
        scan = Scan(self.stage, self.basis.vectors, self.tokens, self.keep, tuple(self.special))
        parts: list[Candidates] = []
        empty = 0
        for start, stop in blocks(self.stage.max_length):
            block = scan.block(start, stop)
            # The last block seen so far without anything near is the measure of "far".
            far = float(block.distance.median())
            parts.append(block)
            near = float(block.distance.min())
            empty = empty + 1 if near > STANDS_OUT * far else 0
            # A sentence has no more positions than the span has directions.
            if empty >= EMPTY_BLOCKS or start > self.basis.rank + 16 or self.budget.exhausted():
                break
        return join(parts)


def positions_of(seen: Observation, max_positions: int) -> int:
    """Return how many positions to scan: the model's own limit, or less where that was asked for; 0 asks for nothing."""
    longest = seen.facts.vocabulary.max_length
    return min(max_positions, longest) if max_positions else longest


def span_problem_of(
    seen: Observation, *, keep: int, beam: int, max_positions: int, rng: torch.Generator, budget: Budget
) -> SpanProblem:
    """Find the parts, the basis and the evidence of one observation.

    Args:
        seen: the observation.
        keep: tokens per position that are checked in float64.
        beam: hypotheses kept while a sentence is assembled.
        max_positions: positions to scan; 0 takes the model's own limit.
        rng: of the attack.
        budget: of the attack.

    Raises:
        AnatomyError: a part is missing.
    """
    anatomy = anatomy_of(seen.model)
    return SpanProblem(
        seen=seen,
        anatomy=anatomy,
        stage=input_stage_of(seen.model, positions_of(seen, max_positions)),
        basis=span_of(stacked_update(seen.update, anatomy)),
        tokens=_evidence_tokens(seen),
        keep=keep,
        beam=beam,
        rng=rng,
        budget=budget,
    )


def _evidence_tokens(seen: Observation) -> Tensor | None:
    """Return the token ids that the word-embedding update names, with all special ones, or None where it names none."""
    if not can_read_rows(seen):
        return None
    named = tokens_of(touched_rows(seen, FALSE_ROWS)[0], seen)
    vocabulary = seen.facts.vocabulary
    special = vocabulary.wordless_ids
    return torch.tensor(sorted({*named, *special}), device=next(seen.model.parameters()).device)
