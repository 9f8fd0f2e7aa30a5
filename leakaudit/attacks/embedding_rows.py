"""`embedding-rows`: the words of the batch, from the word embedding's update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from leakaudit.algorithms.bag.word_bag import can_read_bag, told_by, word_bag
from leakaudit.algorithms.embedding_rows import FALSE_ROWS, holds_earlier_rounds
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


@attack("embedding-rows")
@dataclass(frozen=True)
class EmbeddingRows:
    """Bag of tokens: the rows of the word embedding (V, D) that the batch touched.

    A row enters the forward pass only if its token is in the batch, so every other row's gradient is exactly 0. The
    rows give neither the order of words nor how often each occurs. Pruning can only hide rows, never add any. Tokens that a language
    model only predicted, such as the last ones of texts, have no such row; the rows of a shared head show them. The guess has each token once,
    because an untied head tells numbers for some clients only: the diagnostics say for how many tokens it did (`counted`) and how many positions were
    predicted (`targets`).

    If the word embedding is tied to an output head, the softmax changes all V rows. Then the attack takes the rows that do not look like the
    softmax's share (see `leakaudit.algorithms.bag.softmax_background`).

    Under noise every row is non-zero. If no row is zero, or if noise is declared, the attack takes the rows that hold
    more than noise alone explains (see `leakaudit.algorithms.above_noise`). It does not need to know the kind of noise,
    nor its size if the batch holds only a small part of the vocabulary.

    It reads the difference of weights of every optimizer after any number of local steps: a row without a gradient moves by
    weight decay alone, which is known and taken out. If the optimizer kept its moments, the rows of earlier rounds' words
    move, too, and are named; the diagnostic `earlier_rounds` is then 1.
    """

    false_rows: float = FALSE_ROWS
    """How many of the V rows may be named by chance, under noise or in a tied table.
    Our choice: one wrong word. With noise alone, 99 of 100 tables name no row."""

    label: ClassVar[str] = "embedding rows"
    meaning: ClassVar[str] = "Reads which words were in the batch from which rows of the embedding received a gradient."
    goal: ClassVar[Goal] = "words"
    reads: ClassVar[Reads] = "update"
    needs: ClassVar[Needs] = "named parts"
    source: ClassVar[str] = "Melis et al. 2019; first stage of FILM (Gupta et al. 2022, Sec. 4.2); tied tables: own"
    false_event_rate: ClassVar[float] = FALSE_EVENTS
    threat_model: ClassVar[str] = "Sees one client's update; the word embedding is trained."

    def __post_init__(self) -> None:
        """Refuse a number of rows that is not positive: it has no quantile."""
        if self.false_rows <= 0:
            raise ValueError(f"false_rows must be above 0, got {self.false_rows}")

    def applies(self, seen: Observation) -> Applicability:
        """Say whether the word embedding's update is shared and shows the words."""
        return can_read_bag(seen)

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Return the tokens without special ones, in ascending order of ids."""
        bag = word_bag(seen, self.false_rows)
        facts = {"rows": float(len(bag)), "noise": bag.noise, "earlier_rounds": float(holds_earlier_rounds(seen))}
        facts |= {"counted": float(len(bag.counts))} | ({} if bag.targets is None else {"targets": float(bag.targets)})
        told = told_by(seen, bag, self.false_rows)
        return Reconstruction(tokens=tuple(bag.tokens.tolist()), diagnostics=facts, told_by=told)
