"""`span`: whole sentences by linear algebra, from the update of one block's query, key and value layers.

This module says when that works and picks the reading that fits what is seen; one module each holds

- what all readings share: the observation with its parts (`span_scene`), the subspace of the inputs (`span_basis`), which tokens
  at which positions lie near it (`span_candidates`), which of them form a sentence (`span_assembly`);
- the readings: a clean update (`span_clean`), that of a decoder (`span_causal`), dropout on (`span_masked`, or `span_premasked`
  where it sits before the first normalisation, by the regressions of `span_dropout`), inputs without positions (`span_bag`), a
  damaged update (`span_damaged`).

What comes out is re-simulated where that is possible (`proof`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from leakaudit.algorithms.span.problem import Scene, positions_of, scene_of
from leakaudit.algorithms.span.readers.bag_of_words import read_bag
from leakaudit.algorithms.span.readers.decoder import read_causal
from leakaudit.algorithms.span.readers.dropout import read_masked
from leakaudit.algorithms.span.readers.early_dropout import read_premasked
from leakaudit.algorithms.span.readers.encoder import read_clean
from leakaudit.algorithms.span.readers.local_steps import read_local
from leakaudit.algorithms.span.readers.lora import only_adapters, read_adapters, why_unreadable
from leakaudit.algorithms.span.readers.noisy import read_damaged
from leakaudit.algorithms.span.subspace import span_of, stacked_update
from leakaudit.client.snapshot import Observation
from leakaudit.errors import AnatomyError
from leakaudit.models.structure import Anatomy, anatomy_of, input_stage_of
from leakaudit.plugins.attack import APPLIES, FALSE_EVENTS, Applicability, Reconstruction, not_applicable
from leakaudit.plugins.budget import Budget
from leakaudit.registry import attack


@attack("span")
@dataclass(frozen=True)
class Span:
    """Recover every sentence of the batch from the first block's attention update.

    Source: the span check of DAGER (Petrov et al., NeurIPS 2024, Sec. 4); rank by spectral gap, stacked projections, the
    whole-vocabulary product, dropout, assembly and proof are ours (see the modules).
    """

    goal: ClassVar[Literal["text", "words", "labels"]] = "text"
    needs: ClassVar[Literal["everything", "named parts"]] = "named parts"
    false_event_rate: ClassVar[float] = FALSE_EVENTS
    source: ClassVar[str] = "Petrov et al., DAGER, NeurIPS 2024, Sec. 4; dropout, assembly and proof: own derivation"
    threat_model: ClassVar[str] = (
        "sees the update of one block's query, key and value layers and the public weights; works while the batch has fewer "
        "tokens than the hidden size; needs no labels, lengths, batch size or embedding update"
    )

    candidates: int = 64
    """Tokens per position that are checked in float64. Our choice: true tokens were always within the nearest 105 of 30,522
    with dropout on, and within the nearest few without."""
    beam: int = 8
    """Hypotheses kept while a sentence is assembled."""
    max_positions: int = 0
    """Positions to scan; 0 takes the model's own limit."""

    def applies(self, seen: Observation) -> Applicability:
        """Look for the parts, a non-zero update and an input that carries positions."""
        try:
            anatomy = anatomy_of(seen.model)
            input_stage_of(seen.model, positions_of(seen, self.max_positions))
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

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Pick the reading that fits and run it."""
        scene = scene_of(
            seen, keep=self.candidates, beam=self.beam, max_positions=self.max_positions, rng=rng, budget=budget
        )
        found = _read(scene)
        facts = {"rank": float(scene.basis.rank), "gap": scene.basis.gap, "hidden": float(scene.anatomy.hidden)}
        return replace(found, facts={**facts, **found.facts}, stop="budget" if budget.exhausted() else found.stop)


def _read(scene: Scene) -> Reconstruction:
    """Read a scene by the method that fits it; ranking never refuses."""
    found = None
    if scene.seen.facts.view == "delta":
        found = read_local(scene)
    elif only_adapters(scene.seen.update, scene.anatomy):
        found = read_adapters(scene)
    elif scene.basis.noisy or (scene.dropout and scene.stage.position_free):
        pass
    elif scene.dropout and scene.anatomy.dropout_before:
        found = read_premasked(scene)
    elif scene.dropout:
        found = read_masked(scene)
    else:
        found = read_causal(scene) if scene.anatomy.causal else None
        found = found or (None if scene.stage.position_free else read_clean(scene))
    return found or (read_bag(scene) if scene.stage.position_free else read_damaged(scene))


def _names(anatomy: Anatomy) -> str:
    return ", ".join(p.weight for p in anatomy.projections)
