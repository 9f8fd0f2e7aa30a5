"""Words that occur once in the batch, with their places and gradients.

An encoder normalises the sum u = w + d of a token vector and a place's vector, and nothing else reads the sum. A normalisation's output
does not change with the length of its centred input, so the gradient at u is orthogonal to u without its mean. A row of the word
embedding that one occurrence wrote is orthogonal to u at that occurrence's place, and at no other. A row that several occurrences wrote is
a sum of gradients, which is orthogonal to none of them but by chance. So the rows tell which words occur once, and where. Dropout after
the normalisation changes nothing of this. (Own derivation.)

Letters: U words of the batch, D hidden size, P places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.models.structure import InputStage

ORTHOGONAL, MOST_ORTHOGONAL = 2e-7, 3e-6
"""Largest |cosine| between a row and the normalisation's input that counts as 0, in a row as it was sent and in any row.
A sum in float32 leaves up to 3e-8 (largest of 700 rows of training texts); the next best place has 1e-6 or more, mostly 1e-4."""

ROUNDING = 1e-6
"""Share of a simulated gradient that is rounding in float32, for a row from which it is subtracted.
Measured on training texts with 6 layers: 2e-7 to 9e-7."""

ACCOUNTED = 1e-4
"""Largest share of a row that may remain after known sentences are taken out of it, if they are all that wrote it.
Rounding leaves 1e-6; one occurrence more leaves more than 0.05. Our choice between them."""


@dataclass(frozen=True)
class Rows:
    """What the word embedding's update holds of the sentences that are not known yet."""

    sums: Mapping[int, Tensor]
    """Token id -> (D,) float64: the sum of the gradients at all occurrences of the word."""
    places: Mapping[int, int]
    """Token id -> place, for the words that occur once."""
    subtracted: Mapping[int, float]
    """Token id -> L2 norm of all gradients that were taken out of the row."""

    @classmethod
    def of(cls, sums: Mapping[int, Tensor], subtracted: Mapping[int, float], stage: InputStage, longest: int) -> Rows:
        """Return the rows with the places of the words that occur once.

        Args:
            sums: token id -> (D,) float64.
            subtracted: token id -> L2 norm of what was taken out of a row; words without an entry lost nothing.
            stage: additive, with a normalisation that subtracts the mean.
            longest: number of places to look at.
        """
        words = sorted(sums)
        if not words:
            return cls({}, {}, {})
        best, where = _off_orthogonal(torch.stack([sums[word] for word in words]), words, stage, longest).min(dim=1)
        limits = [_limit(float(sums[word].norm()), subtracted.get(word, 0.0)) for word in words]
        found = zip(words, where.tolist(), best.tolist(), limits, strict=True)
        return cls(sums, {word: place for word, place, off, limit in found if off < limit}, subtracted)

    @property
    def rare(self) -> tuple[int, ...]:
        """Return the words that occur once, in ascending order of ids."""
        return tuple(sorted(self.places))

    @property
    def frequent(self) -> tuple[int, ...]:
        """Return the other words in ascending order of ids."""
        return tuple(sorted(set(self.sums) - set(self.places)))

    def without(self, gradients: Mapping[int, Tensor], stage: InputStage, longest: int) -> Rows:
        """Return what remains after the gradients of a known sentence are taken out.

        Args:
            gradients: token id -> (D,) float64 sum of the sentence's gradients at that word.
            stage: of the model.
            longest: number of places to look at.
        """
        left = {word: row - gradients[word] if word in gradients else row for word, row in self.sums.items()}
        kept = {
            word: row
            for word, row in left.items()
            if word not in gradients or float(row.norm()) > ACCOUNTED * float(self.sums[word].norm())
        }
        taken = dict(self.subtracted)
        for word, gradient in gradients.items():
            taken[word] = taken.get(word, 0.0) + float(gradient.norm())
        return Rows.of(kept, taken, stage, longest)


def _limit(size: float, subtracted: float) -> float:
    """Return the largest |cosine| that counts as 0 in a row of this size."""
    return min(MOST_ORTHOGONAL, ORTHOGONAL + ROUNDING * subtracted / max(size, 1e-300))


def _off_orthogonal(rows: Tensor, words: Sequence[int], stage: InputStage, longest: int) -> Tensor:
    """Return (U, P) float64: |cosine| of rows and their words' inputs at places."""
    vectors = _centred(stage.token_vectors[torch.tensor(words, device=stage.device)].double())  # (U, D)
    places = _centred(stage.position_vectors[:longest].to(vectors))  # (P, D)
    inner = (rows * vectors).sum(dim=1, keepdim=True) + rows @ places.T
    squared = vectors.square().sum(dim=1, keepdim=True) + 2 * vectors @ places.T + places.square().sum(dim=1)
    sizes: Tensor = rows.norm(dim=1, keepdim=True) * squared.clamp_min(0.0).sqrt()
    return inner.abs() / sizes.clamp_min(1e-300)


def _centred(vectors: Tensor) -> Tensor:
    """Return vectors (N, D) without their means."""
    return vectors - vectors.mean(dim=1, keepdim=True)
