"""`substitute-tokens`: train on similar words instead of some of the own ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from leakaudit.client.other_steps import with_substituted_tokens
from leakaudit.plugins import ClientStep, StepDefense, defense


@defense("substitute-tokens")
@dataclass(frozen=True)
class SubstituteTokens(StepDefense):
    """Replace a share of the tokens of the batch by tokens with similar embeddings.

    The update is that of the changed texts, and attacks are scored against the original ones. Attacks know share and number: what an attack
    reads is turned into the most probable original text (`leakaudit.algorithms.language_models.replaced_words`). An attacker with a better
    language model, such as one of texts like the client's, restores more.
    """

    share: float = 0.3
    """Chance that a token is replaced; with 0, the defence does nothing. Our choice of 0.3: most of a text stays as it was."""
    nearest: int = 10
    """Number of tokens with the most similar embeddings, one of which is drawn. Our choice: fewer are easy to undo, more are less similar."""

    label: ClassVar[str] = "substituted tokens"
    meaning: ClassVar[str] = "Trains on similar words in place of some words of the batch."
    identity: ClassVar[Mapping[str, Any]] = {"share": 0.0}
    source: ClassVar[str] = "proposed without an algorithm in GRAB (2024), Sec. 6; nearest neighbours are our choice"
    protects: ClassVar[str] = (
        "Hides which words stood at the replaced places, as far as a language model cannot guess them."
    )
    cost: ClassVar[str] = "The model learns from changed texts; names and numbers are lost first."

    def __post_init__(self) -> None:
        """Refuse a share that is no chance, and no choice of tokens."""
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must be from 0 to 1, got {self.share}")
        if self.nearest < 1:
            raise ValueError(f"nearest must be at least 1, got {self.nearest}")

    def changed_step(self, step: ClientStep, rng: torch.Generator) -> ClientStep:
        """Return the step on the changed texts."""
        return with_substituted_tokens(step, self.share, self.nearest, rng)
