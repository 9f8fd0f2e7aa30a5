"""Exact recovery: pick the reader that fits an update, and run it.

`can_recover` says whether the span attack applies at all. `recover` builds the problem and asks the readers in the
order of `READERS`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from leakaudit.algorithms.span.problem import SpanProblem, only_adapters, positions_of, span_problem_of
from leakaudit.algorithms.span.readers import (
    adam_adapters,
    adaptive_steps,
    bag_of_words,
    decoder,
    dropout,
    early_dropout,
    encoder,
    first_adam_step,
    local_steps,
    lora,
    noisy,
)
from leakaudit.algorithms.span.subspace import span_of, stacked_update, told_by
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.models.structure import Anatomy, anatomy_of, input_stage_of
from leakaudit.plugins.attack_protocol import APPLIES, Applicability, Reconstruction, not_applicable
from leakaudit.plugins.budget import Budget

CANDIDATES = 64
"""Tokens per position that are checked in float64.
Chosen on training sentences; see docs/decisions/span_constants.md."""

BEAM = 8
"""Hypotheses that are kept while a sequence grows. Our choice."""


class Reader(Protocol):
    """A module that recovers the batch from one kind of update."""

    def fits(self, problem: SpanProblem) -> bool:
        """Say whether the problem is of this reader's kind; cheap."""
        ...

    def read(self, problem: SpanProblem) -> Reconstruction | None:
        """Return what was recovered, or None to leave the problem to the next reader."""
        ...


READERS: tuple[Reader, ...] = (
    adam_adapters,
    first_adam_step,
    local_steps,
    adaptive_steps,
    lora,
    early_dropout,
    dropout,
    decoder,
    encoder,
    bag_of_words,
    noisy,
)
"""Readers in the order in which they are asked. The last one fits every problem."""


def can_recover(seen: Observation, max_positions: int = 0) -> Applicability:
    """Say whether the span attack applies.

    It needs the first attention block, a non-zero shared update of that block, and directions that this update leaves
    empty. An update that fills all directions is accepted if a declared defence, low precision or local steps explain it.

    Args:
        seen: the observation.
        max_positions: positions to scan; 0 takes the model's own limit.
    """
    try:
        anatomy = anatomy_of(seen.model)
        input_stage_of(seen.model, positions_of(seen, max_positions))
    except AnatomyError as error:
        return not_applicable(str(error))
    if only_adapters(seen.update, anatomy):
        weights = {name: parameter.detach() for name, parameter in seen.model.named_parameters()}
        reason = lora.why_unreadable(seen.update, anatomy, weights)
        return not_applicable(reason) if reason else APPLIES
    present = [p for p in anatomy.projections if p.weight in seen.update]
    if not present:
        return not_applicable(
            f"none of the layers that read the first attention input is shared: {_names(anatomy)} are frozen or withheld"
        )
    if not any(bool(seen.update[p.weight].any()) for p in present):
        return not_applicable(f"the update of {_names(anatomy)} is all zero")
    basis = span_of(stacked_update(seen.update, anatomy))
    damaged = bool(seen.facts.defenses) or seen.facts.dtype != "float32" or seen.facts.view == "delta"
    if basis.noisy and not damaged:
        return not_applicable(
            f"the update fills all directions of the hidden size {anatomy.hidden}, and no declared defence or low precision "
            "explains it: the batch has at least as many tokens, so every input lies in the span and this test can tell nothing. "
            "That is no protection: attacks on the rows of trained embeddings or heads, and gradient matching, have no such limit"
        )
    return APPLIES


def recover(
    seen: Observation,
    rng: torch.Generator,
    budget: Budget,
    *,
    candidates: int = CANDIDATES,
    beam: int = BEAM,
    max_positions: int = 0,
) -> Reconstruction:
    """Return what the first reader that fits the update recovers.

    Args:
        seen: an observation for which `can_recover` is positive.
        rng: generator of every random choice.
        budget: time that may be used.
        candidates: tokens per position that are checked in float64.
        beam: hypotheses kept while a sequence grows.
        max_positions: positions to scan; 0 takes the model's own limit.
    """
    problem = span_problem_of(seen, keep=candidates, beam=beam, max_positions=max_positions, rng=rng, budget=budget)
    found = _read(problem)
    diagnostics = {"rank": float(problem.basis.rank), "gap": problem.basis.gap, "hidden": float(problem.anatomy.hidden)}
    return replace(
        found,
        diagnostics={**diagnostics, **found.diagnostics},
        stop="budget" if budget.exhausted() else found.stop,
        told_by=told_by(seen.update, problem.anatomy, problem.basis) if problem.has_exact_span else {},
    )


def _read(problem: SpanProblem) -> Reconstruction:
    """Return the result of the first reader that fits and finds something."""
    for reader in READERS:
        if reader.fits(problem) and (found := reader.read(problem)) is not None:
            return found
    raise AssertionError("the last reader fits every problem and always returns a guess")


def _names(anatomy: Anatomy) -> str:
    return ", ".join(p.weight for p in anatomy.projections)
