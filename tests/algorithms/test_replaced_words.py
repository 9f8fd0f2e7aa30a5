"""Replaced words are restored as a search through all texts does it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from leakaudit.algorithms.language_models.replaced_words import TRUST, origins_of, restored
from leakaudit.client.facts import ReplacedWords
from leakaudit.plugins import Budget

WORDS, SPECIAL = 7, 0


@dataclass(frozen=True)
class Bigrams:
    """A language model of word pairs."""

    nats: Tensor
    """(V, V) nats of the second word after the first; row 0 begins a text."""

    def nll(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return mean nats."""
        return [self.total(ids) / len(ids) for ids in sequences]

    def total(self, ids: Sequence[int]) -> float:
        """Return the nats of a text."""
        return sum(float(self.nats[one, other]) for one, other in itertools.pairwise([SPECIAL, *ids]))

    def next_token_nll(self, prefixes: Sequence[Sequence[int]]) -> Tensor:
        """Return the row of the last word."""
        return torch.stack([self.nats[[SPECIAL, *prefix][-1]] for prefix in prefixes])


class Silent(Bigrams):
    """A language model that cannot score next words."""

    def next_token_nll(self, prefixes: Sequence[Sequence[int]]) -> None:  # type: ignore[override]
        """Return None."""


def random_problem(seed: int) -> tuple[Tensor, Bigrams]:
    """Return a table of words and a language model."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(WORDS, 3, generator=rng), Bigrams(
        -torch.randn(WORDS, WORDS, generator=rng).mul(2).log_softmax(1)
    )


def similar(table: Tensor, word: int, nearest: int) -> list[int]:
    """Return the words from which a client draws, by sorting all of them."""
    others = [other for other in range(len(table)) if other not in (word, SPECIAL)]
    return sorted(others, key=lambda other: -float(functional.cosine_similarity(table[word], table[other], dim=0)))[
        :nearest
    ]


@pytest.mark.parametrize("nearest", [1, 2, 4])
def test_the_origins_of_a_word_are_all_words_that_it_may_replace(nearest: int) -> None:
    """Similarity has no direction, but being among the nearest has one."""
    table, _ = random_problem(0)
    found = origins_of(table, [SPECIAL, *range(1, WORDS)], [SPECIAL], nearest)
    words = range(1, WORDS)
    assert found == {o: tuple(w for w in words if o in similar(table, w, nearest)) for o in words}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("replaced", [ReplacedWords(share=0.4, nearest=2), ReplacedWords(share=1.0, nearest=3)])
def test_the_restored_text_is_the_most_probable_of_all(seed: int, replaced: ReplacedWords) -> None:
    """Brute force over all texts of three words gives the same one."""
    table, language = random_problem(seed)
    read = tuple(similar(table, word, replaced.nearest)[0] for word in (2, 4, 6))
    same = 1 - replaced.share

    def cost(text: tuple[int, ...]) -> float:
        chances = [
            same * (w == o) + replaced.share / replaced.nearest * (o in similar(table, w, replaced.nearest))
            for w, o in zip(text, read, strict=True)
        ]
        return TRUST * language.total(text) - (math.log(math.prod(chances)) if all(chances) else -math.inf)

    best = min(itertools.product(range(1, WORDS), repeat=3), key=cost)
    origins = origins_of(table, read, [SPECIAL], replaced.nearest)
    assert restored(read, origins, replaced, language, beam=WORDS**3) == best


def test_without_a_judge_or_time_the_text_stays() -> None:
    """A guess that was read is better than none."""
    table, language = random_problem(1)
    origins = origins_of(table, (3, 1, 5), [SPECIAL], 3)
    replaced = ReplacedWords(share=1.0, nearest=3)
    over = Budget(1.0, iter((0.0, *[9.0] * 99)).__next__)
    assert restored((3, 1, 5), origins, replaced, Silent(language.nats)) == (3, 1, 5)
    assert restored((3, 1, 5), origins, replaced, language, budget=over) == (3, 1, 5)
    assert restored((SPECIAL,), origins, replaced, language) == (SPECIAL,)
