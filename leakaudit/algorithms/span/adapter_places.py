"""The places of an encoder's words, from the rows of the first layer's adapters.

Least squares gives the weight of every word and of every place in each row (`matching_pursuit`). A place weighs what its words weigh there,
and a word that occurs once weighs the same as at its place. So a place that only holds such words weighs the sum of a few words. All small
sums are compared with every place; rows have so many entries that a wrong sum does not agree.

A place that holds a word which stands elsewhere, too, stays open: the share of such a word at a place is unknown. (Own derivation.)

Letters: M words, P places, F rows of all adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakaudit.algorithms.span.matching_pursuit import Words, used_positions

ROUNDING = 30.0
"""Largest weight that counts as zero, as a multiple of the weights of unused places, which are rounding.
Our choice; a place of training texts weighs 1e3 times as much and more."""

SPENT = 1e-3
"""Largest share of a word's weight that may remain after its sentences are taken out. Our choice: float32 leaves 1e-5."""

MOST_PAIRED = 100
"""Most words for which sums of three and four are formed. Our choice: a table of 5,000 times 5,000 sums for each place."""

ROWS_AT_ONCE = 1_000
"""Sums of two words that are compared with all others at once. Our choice: 64 MB."""


@dataclass(frozen=True)
class WordSums:
    """What the rows hold of the sentences that are not known yet."""

    tokens: tuple[int, ...]
    """The M words."""
    words: Tensor
    """(M, F) float64: weight of each word, in units of each row's size."""
    places: Tensor
    """(P, F) float64: weight of each used place."""
    scale: Tensor
    """(F,) float64: size of each row."""
    zero: float
    """L2 norm up to which a weight counts as zero."""

    @classmethod
    def of(cls, words: Words) -> WordSums | None:
        """Return the weights of words, or None if all places may be used.

        Args:
            words: with a place for each tried position; texts are shorter than half of them.
        """
        used = used_positions(words.places)
        if used is None:
            return None
        scale = words.weights.norm(dim=0).clamp_min(1e-300)
        unused = (words.places[len(words.places) // 2 :] / scale).norm(dim=1)
        zero = ROUNDING * float(unused.median())
        return cls(tuple(words.tokens.tolist()), words.weights / scale, words.places[:used] / scale, scale, zero)

    @property
    def table(self) -> dict[int, Tensor]:
        """Return token id -> (F,) weight."""
        return dict(zip(self.tokens, self.words, strict=True))

    def settled(self) -> dict[int, tuple[int, ...]]:
        """Return place -> token ids, for the places that only hold words which occur once."""
        pairs, sums = _pair_sums(self.words)
        found: dict[int, tuple[int, ...]] = {}
        for place, weight in enumerate(self.places):
            if float(weight.norm()) > self.zero:
                some = self._subset(weight, pairs, sums)
                found |= {place: tuple(self.tokens[index] for index in some)} if some else {}
        return found

    def _subset(self, weight: Tensor, pairs: Tensor, sums: Tensor) -> tuple[int, ...]:
        """Return the indices of at most four words that weigh as much, or ()."""
        alone = (self.words - weight).norm(dim=1)
        if len(alone) and float(alone.min()) < self.zero:
            return (int(alone.argmin()),)
        two = (sums - weight).norm(dim=1)
        if len(two) and float(two.min()) < self.zero:
            return tuple(pairs[int(two.argmin())].tolist())
        if len(self.tokens) > MOST_PAIRED:
            return ()
        rest = weight - sums
        return _nearest(rest, pairs, self.words, torch.arange(len(self.words))[:, None], self.zero) or _nearest(
            rest, pairs, sums, pairs, self.zero
        )

    def without(self, written: Sequence[tuple[int, int, Tensor]]) -> WordSums:
        """Return what remains after known sentences are taken out.

        Args:
            written: token id, place and (F,) weight of each of their tokens.
        """
        words, places = self.words.clone(), self.places.clone()
        index = {token: number for number, token in enumerate(self.tokens)}
        for token, place, weight in written:
            if token in index:
                words[index[token]] -= weight
            places[place] -= weight
        left = words.norm(dim=1)
        kept = ((left > self.zero) & (left > SPENT * self.words.norm(dim=1))).nonzero()[:, 0]
        return replace(self, tokens=tuple(self.tokens[i] for i in kept.tolist()), words=words[kept], places=places)

    def as_words(self) -> tuple[Words, int]:
        """Return the words with their places, and the number of used places."""
        used = (self.places.norm(dim=1) > self.zero).nonzero()[:, 0]
        length = int(used.max()) + 1 if len(used) else 0
        return Words(torch.tensor(self.tokens), self.words, self.places), length


def once(settled: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Return token id -> place for the words of settled places."""
    return {word: place for place, words in settled.items() for word in words}


def _pair_sums(words: Tensor) -> tuple[Tensor, Tensor]:
    """Return (N, 2) int64 indices of all pairs of words, and (N, F) their sums."""
    pairs = torch.combinations(torch.arange(len(words)), 2).to(words.device)
    return pairs, words[pairs[:, 0]] + words[pairs[:, 1]]


def _nearest(rest: Tensor, pairs: Tensor, sums: Tensor, members: Tensor, zero: float) -> tuple[int, ...]:
    """Return the words of a pair and of a sum that make up a weight, or ().

    Args:
        rest: (N, F) what each pair leaves of the weight.
        pairs: (N, 2) words of the pairs.
        sums: (K, F) what may fill the rest.
        members: (K, 1) or (K, 2) words of the sums.
        zero: largest distance.
    """
    for start in range(0, len(rest), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        distance = torch.cdist(rest[part], sums)
        for row, column in (distance < zero).nonzero().tolist():
            found = {*pairs[start + row].tolist(), *members[column].tolist()}
            if len(found) == 2 + members.shape[1]:
                return tuple(sorted(found))
    return ()
