"""Refinement of sequences by their features alone, with known answers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leakaudit.algorithms.matching.feature_refinement import search_tokens
from leakaudit.plugins.budget import Budget

VOCABULARY, HIDDEN = 40, 32
TRUE = (0, 7, 11, 23, 9, 30, 1)


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class Toy:
    """A matcher whose feature is a sum of words, each turned by its position.

    The first and the last token are public; words below 5 occur in no text.
    """

    def __init__(self) -> None:
        self.table = torch.randn(VOCABULARY, HIDDEN, generator=rng())
        self.directions = torch.nn.functional.normalize(self.table, dim=1)
        self.directions[:5] = 0.0
        self._turns = torch.randn(len(TRUE), HIDDEN, HIDDEN, generator=rng()) / HIDDEN**0.5
        self.looked = 0
        self.feature = self.of(self.table[list(TRUE)][None])[0]

    def of(self, embeddings: Tensor) -> Tensor:
        return torch.nn.functional.normalize(torch.einsum("ntd,tde->ne", embeddings, self._turns).tanh(), dim=1)

    def free_places(self, row: int) -> list[int]:
        return list(range(1, len(TRUE) - 1))

    def feature_distances(self, row: int, number: int, embeddings: Tensor) -> Tensor:
        self.looked += len(embeddings)
        return 1 - self.of(embeddings) @ self.feature


@pytest.mark.parametrize(
    "guess",
    [(0, 7, 11, 23, 9, 31, 1), (0, 7, 23, 11, 9, 30, 1), (0, 11, 23, 9, 30, 7, 1), (0, 7, 12, 23, 30, 9, 1)],
    ids=["a word", "two exchanged", "a word moved", "both"],
)
def test_a_damaged_sequence_is_refined_by_its_feature(guess: tuple[int, ...]) -> None:
    """Public tokens stay, and words that stand in no text are never tried."""
    assert search_tokens(Toy(), 0, 0, guess, 4, rng(), Budget(600)).tokens == TRUE


def test_a_climb_from_the_truth_looks_at_nothing_else() -> None:
    toy = Toy()
    toy.looked = 0
    assert search_tokens(toy, 0, 0, TRUE, 4, rng(), Budget(600)).tokens == TRUE
    assert toy.looked == 1


def test_a_spent_budget_leaves_the_guess() -> None:
    spent = Budget(1.0, clock=iter(range(1000)).__next__)
    guess = (0, 7, 11, 23, 9, 31, 1)
    assert search_tokens(Toy(), 0, 0, guess, 4, rng(), spent).tokens == guess
