"""`update-difference`: texts that the update made more likely to the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp
from typing import ClassVar

import torch
from torch import Tensor

from leakaudit.algorithms.language_models.likelihood_ratio import Search, Searched, likely_texts, model_after
from leakaudit.plugins import (
    APPLIES,
    FALSE_EVENTS,
    Applicability,
    Budget,
    Goal,
    GuessedSequence,
    Observation,
    Reads,
    Reconstruction,
    attack,
    not_applicable,
)

MARGIN = 4.0
"""Under declared noise: least ratio of the best score to the best score of the same search in noise alone.
Measured on a tiny GPT-2: in 48 updates of noise alone, from 0.1 to 10^4 times the update, the largest was 3.9."""


@attack("update-difference")
@dataclass(frozen=True)
class UpdateDifference:
    """Search texts whose likelihood rises from the old model to the updated one.

    It needs no gradient, so it reads the difference of weights of every optimizer after any number of local steps, of all
    weights or of adapters. The difference tells most about what the client repeated or trained on for long. After a few
    gentle steps on many texts the guesses are sentences in the client's style, with some of its words.

    Source: differential score and beams of Zanella-Beguelin et al. (CCS 2020), Sec. 4. Amplification, first words and ends
    of texts are ours; see `leakaudit.algorithms.language_models.likelihood_ratio`.

    Under declared noise the search is repeated with drawn noise of the declared size in place of the update. If the best
    text is not much better than the best one there, nothing is guessed.
    """

    amplification: float = 1.0
    """How many times the update is taken. Chosen on training texts; see docs/decisions/adam_deltas_decoders.md."""
    prior_weight: float = 0.5
    """Weight of the likelihood before the update. Chosen on training texts, together with `amplification`."""
    sentences: int = 16
    """Most texts to guess. Our choice: a minute of search on a small model."""
    beam: int = 4
    """Texts kept while one of them grows. Our choice."""
    length: int = 24
    """Most tokens of a text. Our choice: nine of ten training sentences of CoLA are shorter."""
    evidence: bool = True
    """False ignores the update and guesses what is likely before it, for comparison."""

    label: ClassVar[str] = "update difference"
    meaning: ClassVar[str] = "Searches texts that the model finds more likely after the update than before it."
    goal: ClassVar[Goal] = "text"
    slow: ClassVar[bool] = True
    reads: ClassVar[Reads] = "update"
    source: ClassVar[str] = "Zanella-Beguelin et al., CCS 2020, Sec. 4; amplification, first words, ends: own"
    false_event_rate: ClassVar[float] = FALSE_EVENTS
    threat_model: ClassVar[str] = "Sees one client's update of a causal language model and knows the weights before it."

    def __post_init__(self) -> None:
        """Refuse sizes below 1 and an amplification that is not positive."""
        if min(self.sentences, self.beam, self.length) < 1:
            raise ValueError(
                f"sentences, beam and length are at least 1, got {self.sentences}, {self.beam} and {self.length}"
            )
        if self.amplification <= 0:
            raise ValueError(f"amplification must be above 0, got {self.amplification:g}")

    def applies(self, seen: Observation) -> Applicability:
        """Say whether a whole causal language model and an update of it are there."""
        if seen.facts.task != "causal-lm":
            return not_applicable(f"it reads causal language models, and the task is {seen.facts.task}")
        if not seen.whole:
            return not_applicable("only the first blocks of this step were kept, and it runs the whole model")
        if not any(bool(tensor.any()) for tensor in seen.update.values()):
            return not_applicable("every entry of the update is zero, so the model is the same before and after it")
        return APPLIES

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Return the texts, the best first; nothing where noise explains them."""
        noisy = self.evidence and seen.noise_sigma > 0.0
        found = self._search(seen, seen.update, budget.part(0.5) if noisy else budget)
        control = self._search(seen, _noise_like(seen, rng), budget) if noisy else []
        best, chance = (max((one.ratio for one in texts), default=0.0) for texts in (found, control))
        facts = {"ratio": best, "ratio_of_noise": chance, "searched": float(len(found))}
        kept = [] if noisy and best < MARGIN * chance else found
        return Reconstruction(
            sequences=tuple(_guess(one, seen) for one in kept),
            stop="budget" if budget.exhausted() else "done",
            diagnostics=facts,
        )

    def _search(self, seen: Observation, update: Mapping[str, Tensor], budget: Budget) -> list[Searched]:
        most = (seen.facts.batch_size_bound or self.sentences) * seen.facts.local_steps
        search = Search(min(self.sentences, most), self.beam, self.length, self.prior_weight)
        after = model_after(seen, self.amplification, update) if self.evidence else None
        return likely_texts(model_after(seen, 0.0), after, seen.facts.vocabulary, search, budget)


def _noise_like(seen: Observation, rng: torch.Generator) -> dict[str, Tensor]:
    """Return noise of the declared size in place of the update."""
    level = seen.noise_level
    return {
        name: (level.of(name) * torch.randn(tensor.shape, generator=rng)).to(tensor)
        for name, tensor in seen.update.items()
    }


def _guess(found: Searched, seen: Observation) -> GuessedSequence:
    """Return a text with the tokens around it.

    Its own score rises with the ratio of each token.
    """
    vocabulary = seen.facts.vocabulary
    gain = max(0.0, found.ratio) / max(1, len(found.token_ids))
    return GuessedSequence(
        (*vocabulary.starts_with, *found.token_ids, *vocabulary.ends_with), own_score=1.0 - exp(-gain)
    )
