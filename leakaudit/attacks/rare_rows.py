"""`rare-rows`: whole sentences from rows that one occurrence of a word wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from leakaudit.algorithms.precision import in_single_precision
from leakaudit.algorithms.rare_rows.decoder_reader import decoder_applies, recover_decoder
from leakaudit.algorithms.rare_rows.encoder import can_read_sentences, recover_encoder
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


@attack("rare-rows")
@dataclass(frozen=True)
class RareRows:
    """Recover every sentence that has a word which occurs once in the batch.

    Such a word's row of the word embedding's update is the gradient at its place, whatever else is in the batch. So neither a large
    batch nor more tokens than the hidden size protects. A sentence whose simulated gradients agree with its rows to rounding is proved
    by itself; it is then taken out of all rows, and the search goes on.

    Source: own derivation; see docs/decisions/rare_rows.md.
    """

    label: ClassVar[str] = "rare rows"
    meaning: ClassVar[str] = (
        "Reads sentences from the embedding rows of words that occur once. A larger batch does not hide them."
    )
    goal: ClassVar[Goal] = "text"
    slow: ClassVar[bool] = True
    reads: ClassVar[Reads] = "gradient"
    needs: ClassVar[Needs] = "everything"
    false_event_rate: ClassVar[float] = FALSE_EVENTS
    source: ClassVar[str] = "own derivation"
    threat_model: ClassVar[str] = (
        "sees the whole update and the public weights; the word embedding is trained; needs no labels, lengths or batch size"
    )

    def applies(self, seen: Observation) -> Applicability:
        """Say whether the rows of words can be read and sentences can be simulated."""
        return decoder_applies(seen) if _predicts_tokens(seen) else can_read_sentences(seen)

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Recover sentences until none is found any more, or the budget is used up."""
        single = in_single_precision(seen)
        return recover_decoder(single, rng, budget) if _predicts_tokens(seen) else recover_encoder(single, rng, budget)


def _predicts_tokens(seen: Observation) -> bool:
    """Return whether the loss is about next tokens, which the head's rows tell."""
    return seen.facts.task == "causal-lm"
