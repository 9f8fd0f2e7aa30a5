"""New candidates: random ones, from tokens, or from other candidates.

Letters: N candidates, B sequences, T tokens, D hidden size, C classes, P entries of dropout masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leakaudit.algorithms.matching.candidates import Candidate
from leakaudit.algorithms.matching.dropout_masks import MaskLayout
from leakaudit.algorithms.matching.learned_masks import LearnedMasks
from leakaudit.algorithms.matching.permutations import Permutation


class CandidateMaker:
    """Makes candidates of one batch shape."""

    def __init__(
        self,
        table: Tensor,
        lengths: Sequence[int],
        label_shape: tuple[int, ...],
        masks: LearnedMasks,
        layout: MaskLayout | None,
        scale: float,
    ) -> None:
        """Keep the data from which candidates are made.

        Args:
            table: (V, D) word embedding.
            lengths: (B,) tokens of each sequence.
            label_shape: shape of one candidate's label logits.
            masks: gives the start values of dropout masks.
            layout: layout of these masks; None if dropout is not modelled.
            scale: standard deviation of the entries of random embeddings.
        """
        self._table, self._shape, self._label_shape = table, (len(lengths), max(lengths)), label_shape
        self._masks, self._layout = masks, layout
        self.scale = scale

    def random(self, candidates: int, rng: torch.Generator) -> Candidate:
        """Draw normal candidates.

        The standard deviation of the entries is `scale`: 1 gives N(0, I), as in LAMP (Sec. 5); a smaller value can make rows as
        long as the word embedding's on average. If the word embedding's rows have length 1, rows of N(0, I) are twenty times
        longer, so that the position vectors that are added to them hardly count.
        """
        drawn = torch.randn(candidates, *self._shape, self._table.shape[1], generator=rng)
        logits = torch.randn(candidates, *self._label_shape, generator=rng)
        device = self._table.device
        return Candidate((self.scale * drawn).to(device), logits.to(device), self._masks.full(candidates))

    def of_tokens(
        self, batches: Sequence[Sequence[Sequence[int]]], label_logits: Tensor, masks: Tensor | None = None
    ) -> Candidate:
        """Return candidates whose embeddings are those of tokens.

        Args:
            batches: N batches of B sequences of token ids.
            label_logits: (N, ...).
            masks: (P,) of dropout, the same for all candidates; None for masks at their mean.
        """
        dropped = self._masks.full(1)[0] if masks is None else masks
        return Candidate(self._table[self.ids(batches)], label_logits, dropped.expand(len(batches), -1))

    def ids(self, batches: Sequence[Sequence[Sequence[int]]]) -> Tensor:
        """Return (N, B, T) int64 the tokens of N batches; 0 behind a sequence's end."""
        ids = torch.zeros(len(batches), *self._shape, dtype=torch.long)
        for number, batch in enumerate(batches):
            for row, sequence in enumerate(batch):
                ids[number, row, : len(sequence)] = torch.tensor(sequence)
        return ids.to(self._table.device)

    def rearranged(self, candidates: Candidate, row: int, order: Permutation) -> Candidate:
        """Return a copy with one sequence's tokens in another order.

        The dropout masks move with their tokens.

        Args:
            candidates: N candidates, or tensors of their shape.
            row: the sequence.
            order: the position from which the token at each position comes.
        """
        embeddings = candidates.embeddings.clone()
        embeddings[:, row, : len(order)] = candidates.embeddings[:, row, list(order)]
        logits = candidates.label_logits
        if logits.dim() == 4:  # of the token at each place
            logits = logits.clone()
            logits[:, row, : len(order)] = candidates.label_logits[:, row, list(order)]
        masks = candidates.masks if self._layout is None else self._layout.rearranged(candidates.masks, row, order)
        return Candidate(embeddings, logits, masks)
