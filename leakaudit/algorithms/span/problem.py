"""`SpanProblem`: one observation with its parts, its span and the options."""

from __future__ import annotations

from collections.abc import Mapping
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
"""Largest ratio of a block's nearest distance to its median at which it holds a token.
A block is a range of positions. Chosen on training sentences; see docs/decisions/span_constants.md."""


@dataclass(frozen=True)
class SpanProblem:
    """One observation as the readers see it, made by `span_problem_of`."""

    seen: Observation
    """The observation."""
    anatomy: Anatomy
    """The layers that read the first attention input, with their heads and adapters."""
    stage: InputStage
    """The computation from (token, position) to attention input."""
    basis: Basis
    """The span of the attention inputs, read from the stacked update."""
    tokens: Tensor | None
    """(M,) int64: the tokens that the word embedding's update names, and special ones; None if it cannot be read."""
    keep: int
    """Tokens per position that are checked in float64."""
    beam: int
    """Hypotheses kept while a sequence grows."""
    rng: torch.Generator
    """Generator of every random choice."""
    budget: Budget
    """Time that is left."""

    @property
    def dropout(self) -> float:
        """Dropout rate that the attention inputs passed; 0 in eval mode."""
        if not self.seen.facts.training_mode:
            return 0.0
        modules = (*self.anatomy.dropout_before, *self.anatomy.dropout_after)
        return max((self.seen.facts.dropout.get(name, 0.0) for name in modules), default=0.0)

    @property
    def has_exact_span(self) -> bool:
        """Whether inputs lie in the span up to rounding and dropout masks.

        True for a gradient of whole layers without noise. False for a difference of weights, for an update of adapters
        alone, and for a noisy update.
        """
        if self.seen.facts.view == "delta" or only_adapters(self.seen.update, self.anatomy):
            return False
        return not self.basis.noisy

    @property
    def special(self) -> frozenset[int]:
        """Token ids that the tokenizer puts around every text; they are always tested."""
        return self.seen.facts.vocabulary.surrounding_ids

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """Parameter name -> weights before the step."""
        return {name: parameter.detach() for name, parameter in self.seen.model.named_parameters()}

    def scan(self) -> Candidates:
        """Return the pairs that are nearest to the span, nearest first.

        Positions are scanned in blocks. The scan stops after `EMPTY_BLOCKS` blocks in a row without a near pair, behind
        the longest possible sequence, or if the budget is used up.
        """
        scan = Scan(self.stage, self.basis.vectors, self.tokens, self.keep, tuple(self.special))
        parts: list[Candidates] = []
        empty = 0
        for start, stop in blocks(self.stage.max_length):
            block = scan.block(start, stop)
            # Most pairs of a block are not in the batch, so its median says what is far.
            far = float(block.distance.median())
            parts.append(block)
            near = float(block.distance.min())
            empty = empty + 1 if near > STANDS_OUT * far else 0
            # A sequence has no more positions than the span has directions.
            if empty >= EMPTY_BLOCKS or start > self.basis.rank + 16 or self.budget.exhausted():
                break
        return join(parts)


def positions_of(seen: Observation, max_positions: int) -> int:
    """Return how many positions to scan.

    Args:
        seen: the observation.
        max_positions: positions asked for; 0 takes the model's own limit.
    """
    longest = seen.facts.vocabulary.max_length
    return min(max_positions, longest) if max_positions else longest


def span_problem_of(
    seen: Observation, *, keep: int, beam: int, max_positions: int, rng: torch.Generator, budget: Budget
) -> SpanProblem:
    """Return the problem: parts, span and named tokens of one observation.

    Args:
        seen: the observation.
        keep: tokens per position that are checked in float64.
        beam: hypotheses kept while a sequence grows.
        max_positions: positions to scan; 0 takes the model's own limit.
        rng: generator of the attack.
        budget: of the attack.

    Raises:
        AnatomyError: a part of the model was not found.
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
    """Return the tokens that the word embedding's update names, and special tokens.

    None if that update cannot be read.
    """
    if not can_read_rows(seen):
        return None
    named = tokens_of(touched_rows(seen, FALSE_ROWS)[0], seen)
    vocabulary = seen.facts.vocabulary
    special = vocabulary.wordless_ids
    return torch.tensor(sorted({*named, *special}), device=next(seen.model.parameters()).device)


def only_adapters(update: Mapping[str, Tensor], anatomy: Anatomy) -> bool:
    """Return whether adapters, and no whole layers that read the inputs, are shared."""
    names = {name for adapter in anatomy.adapters for name in (adapter.down.weight, adapter.up.weight)}
    return bool(names & set(update)) and not any(p.weight in update for p in anatomy.projections)
