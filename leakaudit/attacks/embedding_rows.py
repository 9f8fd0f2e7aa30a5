"""`embedding-rows`: which words are in the batch, from the update of the word embedding."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar, Literal

import torch
from torch import Tensor

from leakaudit.attacks.reconstruction import APPLIES, Applicability, Reconstruction, not_applicable
from leakaudit.budget import Budget
from leakaudit.registry import attack
from leakaudit.snapshot import Observation

MAD_TO_DEVIATION = 1.4826
"""A normal distribution's standard deviation divided by its median absolute deviation, 1 / NormalDist().inv_cdf(0.75)."""


@attack("embedding-rows")
@dataclass(frozen=True)
class EmbeddingRows:
    """Bag of tokens: the rows of the word embedding (V, D) that received any update.

    A row enters the forward pass only if its token is in the batch, so every other row's gradient is exactly 0. It says
    neither order nor how often a word occurs. Pruning can only hide rows, never add any. Under declared noise every row is
    non-zero; then a row counts as touched if its norm lies further above the median row than chance allows.

    Not true for an embedding tied to an output head, whose softmax touches all V rows.
    """

    false_rows: float = 1.0
    """Under declared noise: how many of the V rows may be named by chance. Our choice: one word too many."""

    goal: ClassVar[Literal["text", "words", "labels"]] = "words"
    source: ClassVar[str] = "Melis et al. 2019; first stage of FILM (Gupta et al. 2022, Sec. 4.2)"
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
        touched = self._above_noise(rows) if seen.facts.declared("gaussian-noise") else (rows != 0).any(dim=1)  # (V,)
        ids = [token for token in touched.nonzero().flatten().tolist() if token not in around]
        return Reconstruction(tokens=tuple(ids), facts={"rows": float(touched.sum())})

    def _above_noise(self, rows: Tensor) -> Tensor:
        """Return (V,) whether each row's norm is an outlier among all rows.

        Rows without a token hold noise alone, and over D entries the norm of noise is nearly normal. Most rows are such, so
        median and median absolute deviation describe them, and the cut is the quantile that `false_rows` of V exceed.
        """
        norms = rows.norm(dim=1)  # (V,)
        median = norms.median()
        deviation = MAD_TO_DEVIATION * (norms - median).abs().median()
        cut = NormalDist().inv_cdf(max(0.5, 1 - self.false_rows / len(norms)))
        touched: Tensor = norms > median + cut * deviation
        return touched


def word_embedding(seen: Observation) -> str | None:
    """Return the parameter name of the table that turns token ids into vectors, or None if it is no parameter."""
    table = seen.model.get_input_embeddings()  # type: ignore[operator]
    weight = getattr(table, "weight", None)
    return next((name for name, parameter in seen.model.named_parameters() if parameter is weight), None)
