"""`span`: whole sentences by linear algebra, from the first attention's update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from leakaudit.algorithms.span.recover import BEAM, CANDIDATES, can_recover, recover
from leakaudit.plugins import (
    FALSE_EVENTS,
    Applicability,
    Budget,
    Goal,
    Needs,
    Observation,
    Reads,
    Reconstruction,
    attack,
)


@attack("span")
@dataclass(frozen=True)
class Span:
    """Recover every sentence of the batch from the first block's attention update.

    Source: the span check of DAGER (Petrov et al., NeurIPS 2024, Sec. 4). The rank by spectral gap, stacked
    projections, the whole-vocabulary product, dropout, assembly and proof are ours; see `leakaudit.algorithms.span`.
    """

    label: ClassVar[str] = "span"
    meaning: ClassVar[str] = (
        "Tests which sentences lie in the space that a layer's gradient spans. Where it applies it is exact."
    )
    goal: ClassVar[Goal] = "text"
    reads: ClassVar[Reads] = "update"
    needs: ClassVar[Needs] = "named parts"
    token_limit: ClassVar[bool] = True
    false_event_rate: ClassVar[float] = FALSE_EVENTS
    source: ClassVar[str] = "Petrov et al., DAGER, NeurIPS 2024, Sec. 4; dropout, assembly and proof: own derivation"
    threat_model: ClassVar[str] = (
        "sees the update of one block's query, key and value layers and the public weights; needs no labels, lengths, batch size "
        "or embedding update; says nothing about steps with as many tokens as the hidden size, which other attacks read"
    )

    candidates: int = CANDIDATES
    """Tokens per position that are checked in float64.
    Chosen on training sentences; see docs/decisions/span_constants.md."""
    beam: int = BEAM
    """Hypotheses kept while a sentence grows."""
    max_positions: int = 0
    """Positions to scan; 0 takes the model's own limit."""
    prior: str | None = None
    """Language model that chooses between similar words where the protocol replaces words, and that judges the perplexity of the guess; as
    `lamp-cos` takes it. None takes the client's model if it predicts next tokens, else the built-in `ngram`, and judges nothing."""

    def applies(self, seen: Observation) -> Applicability:
        """Say whether the first attention block can be read; see `can_recover`."""
        return can_recover(seen, self.max_positions)

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Recover the batch with the first reader that fits the update."""
        return recover(seen, rng, budget, candidates=self.candidates, beam=self.beam, max_positions=self.max_positions)
