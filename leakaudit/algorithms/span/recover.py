"""Exact recovery: pick the reader that fits an update, and run it.

The modules beside this one hold what all readers share: the observation with its parts (`problem`), the subspace of the inputs
(`subspace`), which tokens at which positions lie near it (`candidates`), and which of them form a sequence (`grouping`).
What comes out is re-simulated where that is possible (`leakaudit.algorithms.resimulation`).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from leakaudit.algorithms.span.problem import SpanProblem, positions_of, span_problem_of
from leakaudit.algorithms.span.readers.bag_of_words import read_bag
from leakaudit.algorithms.span.readers.decoder import read_causal
from leakaudit.algorithms.span.readers.dropout import read_masked
from leakaudit.algorithms.span.readers.early_dropout import read_premasked
from leakaudit.algorithms.span.readers.encoder import read_clean
from leakaudit.algorithms.span.readers.local_steps import read_local
from leakaudit.algorithms.span.readers.lora import only_adapters, read_adapters, why_unreadable
from leakaudit.algorithms.span.readers.noisy import read_damaged
from leakaudit.algorithms.span.subspace import span_of, stacked_update
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.models.structure import Anatomy, anatomy_of, input_stage_of
from leakaudit.plugins.attack_protocol import APPLIES, Applicability, Reconstruction, not_applicable
from leakaudit.plugins.budget import Budget

CANDIDATES = 64
"""Tokens per position that are checked in float64. Our choice: true tokens were always within the nearest 105 of 30,522
with dropout on, and within the nearest few without."""

BEAM = 8
"""Hypotheses kept while a sequence is assembled."""


def can_recover(seen: Observation, max_positions: int = 0) -> Applicability:
    """Look for the parts, a non-zero update and an input that carries positions."""
    try:
        anatomy = anatomy_of(seen.model)
        input_stage_of(seen.model, positions_of(seen, max_positions))
    except AnatomyError as error:
        return not_applicable(str(error))
    if only_adapters(seen.update, anatomy):
        weights = {name: parameter.detach() for name, parameter in seen.model.named_parameters()}
        reason = why_unreadable(seen.update, anatomy, weights)
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
            "explains it: the batch has at least as many tokens, and the span is everything"
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
    """Pick the reader that fits and run it.

    Args:
        seen: `can_recover` applies to it.
        rng: of every random choice.
        budget: seconds.
        candidates: tokens per position that are checked in float64.
        beam: hypotheses kept while a sequence is assembled.
        max_positions: positions to scan; 0 takes the model's own limit.
    """
    problem = span_problem_of(seen, keep=candidates, beam=beam, max_positions=max_positions, rng=rng, budget=budget)
    found = _read(problem)
    facts = {"rank": float(problem.basis.rank), "gap": problem.basis.gap, "hidden": float(problem.anatomy.hidden)}
    return replace(
        found, diagnostics={**facts, **found.diagnostics}, stop="budget" if budget.exhausted() else found.stop
    )


def _read(problem: SpanProblem) -> Reconstruction:
    """Read a scene by the method that fits it; ranking never refuses."""
    found = None
    if problem.seen.facts.view == "delta":
        found = read_local(problem)
    elif only_adapters(problem.seen.update, problem.anatomy):
        found = read_adapters(problem)
    elif problem.basis.noisy or (problem.dropout and problem.stage.position_free):
        pass
    elif problem.dropout and problem.anatomy.dropout_before:
        found = read_premasked(problem)
    elif problem.dropout:
        found = read_masked(problem)
    else:
        found = read_causal(problem) if problem.anatomy.causal else None
        found = found or (None if problem.stage.position_free else read_clean(problem))
    return found or (read_bag(problem) if problem.stage.position_free else read_damaged(problem))


def _names(anatomy: Anatomy) -> str:
    return ", ".join(p.weight for p in anatomy.projections)
