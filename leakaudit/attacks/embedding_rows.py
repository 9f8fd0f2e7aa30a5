"""`embedding-rows`: which words are in the batch, from the update of the word embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from leakaudit.algorithms.above_noise import rows_above_noise
from leakaudit.client.snapshot import Observation
from leakaudit.plugins.attack import APPLIES, FALSE_EVENTS, Applicability, Reconstruction, not_applicable
from leakaudit.plugins.budget import Budget
from leakaudit.registry import attack


@attack("embedding-rows")
@dataclass(frozen=True)
class EmbeddingRows:
    """Bag of tokens: the rows of the word embedding (V, D) that received any update.

    A row enters the forward pass only if its token is in the batch, so every other row's gradient is exactly 0. It says
    neither order nor how often a word occurs. Pruning can only hide rows, never add any.

    Under noise every row is non-zero. Whoever sees a table without a single zero row, or knows of noise, asks which rows hold more than
    noise alone explains (see `above_noise`). That needs neither the noise's name nor, for a batch of few of all tokens, its size.

    Not true for an embedding tied to an output head, whose softmax touches all V rows.
    """

    false_rows: float = 1.0
    """Under noise: how many of the V rows may be named by chance, beside others that stand out. Our choice: one word too many. Where
    nothing but noise is there, 99 tables of 100 name no row at all."""

    goal: ClassVar[Literal["text", "words", "labels"]] = "words"
    needs: ClassVar[Literal["everything", "named parts"]] = "named parts"
    source: ClassVar[str] = "Melis et al. 2019; first stage of FILM (Gupta et al. 2022, Sec. 4.2)"
    false_event_rate: ClassVar[float] = FALSE_EVENTS
    threat_model: ClassVar[str] = (
        "Sees one client's update; the word embedding is trained and not tied to an output head."
    )

    def __post_init__(self) -> None:
        """Refuse a number of rows that no cut-off belongs to."""
        if self.false_rows <= 0:
            raise ValueError(f"false_rows must be above 0, got {self.false_rows}")

    def applies(self, seen: Observation) -> Applicability:
        """Say whether the word embedding's update is shared and is the input's alone."""
        name = word_embedding(seen)
        if name is None or name not in seen.update:
            return not_applicable(
                f"the word embedding {name!r} is frozen or its update is not shared"
                if name
                else "the model has no word embedding among its parameters"
            )
        if any(name in pair for pair in seen.facts.tied):
            return not_applicable(
                f"the word embedding {name!r} is tied to an output head, which touches every row of it"
            )
        return APPLIES

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Name the tokens, special ones left out, in ascending order of their ids."""
        name = word_embedding(seen)
        rows = seen.update[str(name)]  # (V, D)
        vocabulary = seen.facts.vocabulary
        around = vocabulary.wordless_ids
        touched, noise = (rows != 0).any(dim=1), 0.0  # (V,)
        if seen.noise_sigma > 0.0 or bool(touched.all()):
            touched, noise = rows_above_noise(rows, seen.noise_sigma, self.false_rows)
        ids = [token for token in touched.nonzero().flatten().tolist() if token not in around]
        return Reconstruction(tokens=tuple(ids), facts={"rows": float(touched.sum()), "noise": noise})


def word_embedding(seen: Observation) -> str | None:
    """Return the parameter name of the table that turns token ids into vectors, or None if it is no parameter."""
    table = seen.model.get_input_embeddings()  # type: ignore[operator]
    weight = getattr(table, "weight", None)
    return next((name for name, parameter in seen.model.named_parameters() if parameter is weight), None)
