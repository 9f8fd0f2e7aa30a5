"""How far a draft's simulated gradients agree with the rows of its rare words.

Letters: N drafts, T places, D hidden size, K directions of a draft (see `SentenceSimulator.gradients`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leakaudit.algorithms.rare_rows.rows import Rows
from leakaudit.algorithms.rare_rows.sentences import Draft, Laid, SentenceSimulator

PERFECT = 1e-5
"""Smallest squared sine that counts.
Our choice: simulated gradients in float32 reach 1e-12, and a draft that is right should not win by its rounding."""


EXACT = 9.0
"""Agreement of one row at which the sentence counts as right.
Our choice: a sine of 0.011; the nearest wrong sentences of training texts have 0.05."""


class Agreement:
    """Scores of drafts against the rows of words that occur once.

    A row counts -log(sin^2) of the angle between it and the simulated gradient at its place: the logarithm of a likelihood in which the
    simulation's error is Gaussian, with a size that is not known.
    """

    def __init__(self, simulator: SentenceSimulator, rows: Rows, words: Sequence[int] | None = None) -> None:
        """Keep the rows of some words as one table.

        Args:
            simulator: of sentences alone.
            rows: of the batch.
            words: the words that count; None for the rare ones.
        """
        self.simulator, self.rows = simulator, rows
        counted = rows.rare if words is None else words
        self._index = {word: turn for turn, word in enumerate(counted)}
        vectors = [rows.sums[word] / rows.sums[word].norm() for word in counted]
        self._table = torch.stack(vectors).float().to(simulator.device) if vectors else torch.zeros(0, 1)

    def scores(self, drafts: Sequence[Draft]) -> Tensor:
        """Return (N,) float32 on the processor: the agreement of each draft, 0 or more."""
        return self.judge(drafts)[0]

    def judge(self, drafts: Sequence[Draft]) -> tuple[Tensor, Tensor]:
        """Return agreements (N,) float32, and (N,) bool whether one row is exact.

        Both are on the processor.
        """
        found, exact = torch.zeros(len(drafts)), torch.zeros(len(drafts), dtype=torch.bool)
        for chunk, laid in self.simulator.chunks(drafts):
            gradients = self.simulator.gradients(self.simulator.inputs(laid), laid).detach()
            each = self.each(gradients, self.row_numbers(laid))
            found[chunk] = each.sum(dim=2).amax(dim=0).cpu()
            exact[chunk] = (each > EXACT).any(dim=2).any(dim=0).cpu()
        return found, exact

    def rare_words(self, draft: Draft) -> int:
        """Return how many rare words stand at their places."""
        return sum(self.rows.places.get(word) == place for place, word in draft.words.items())

    def of_places(self, gradients: Tensor, numbers: Tensor) -> Tensor:
        """Return (N, T): agreements of rows in each draft's best direction and sign.

        Args:
            gradients: (K, N, T, D).
            numbers: (N, T) of `row_numbers`.
        """
        each = self.each(gradients, numbers)  # (K', N, T)
        best = each.sum(dim=2).argmax(dim=0)
        return each[best, torch.arange(each.shape[1], device=each.device)]

    def each(self, gradients: Tensor, numbers: Tensor) -> Tensor:
        """Return (K', N, T): the agreement of every row, for all directions and signs."""
        return self._signed(self.cosines(gradients, numbers))

    def at_holes(self, gradients: Tensor, words: Tensor) -> Tensor:
        """Return (K', H, C): the agreement of every word at every hole.

        Args:
            gradients: (K, H, D).
            words: (C,) token ids that count.
        """
        rows = self._table[[self._index[word] for word in words.tolist()]]  # (C, D)
        return self._signed(torch.nn.functional.normalize(gradients, dim=2) @ rows.T)

    def _signed(self, cosines: Tensor) -> Tensor:
        return agreement(cosines if self.simulator.labels else torch.cat([cosines, -cosines]))

    def cosines(self, gradients: Tensor, numbers: Tensor) -> Tensor:
        """Return (K, N, T): cosines with the rows of words that count, elsewhere 0."""
        known = self._table[numbers.clamp_min(0)]  # (N, T, D)
        cosines: Tensor = torch.nn.functional.cosine_similarity(gradients, known[None], dim=3)
        return cosines * (numbers >= 0)

    def row_numbers(self, laid: Laid) -> Tensor:
        """Return (N, T): the row's number in the table, -1 where there is none.

        A word without a known place counts wherever it stands. If it occurs several times, its row agrees with none of its places, or
        nearly with the strongest.
        """
        pairs = zip(laid.tokens.flatten().tolist(), laid.places.flatten().tolist(), strict=True)
        numbers = [self._index.get(w, -1) if self.rows.places.get(w, place) == place else -1 for w, place in pairs]
        return torch.tensor(numbers, device=self._table.device).view_as(laid.tokens)


def agreement(cosines: Tensor) -> Tensor:
    """Return -log(1 - c^2) for positive cosines c, and 0 for others."""
    return -torch.log((1.0 - cosines.clamp(0.0, 1.0).square()).clamp_min(PERFECT))
