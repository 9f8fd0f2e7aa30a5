"""Known tokens of candidates: public ones, and those of solved sequences.

Letters: N candidates, B sequences, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from leakaudit.algorithms.matching.batch_shape import public_tokens
from leakaudit.algorithms.matching.candidates import Candidate
from leakaudit.models.vocabulary import Vocabulary


class KnownTokens:
    """Known tokens, which it puts at their positions in every candidate."""

    def __init__(self, vocabulary: Vocabulary, lengths: Sequence[int], table: Tensor) -> None:
        """Begin with the public tokens only.

        Args:
            vocabulary: gives the public tokens.
            lengths: (B,) tokens of each sequence.
            table: (V, D) word embedding.
        """
        self._vocabulary, self._lengths, self._table = vocabulary, tuple(lengths), table
        self._held: dict[int, tuple[int, ...]] = {}
        self._fixed, self._embeddings, self.ids = self._laid_out()

    def hold(self, tokens: Mapping[int, tuple[int, ...]]) -> None:
        """Treat these sequences as known from now on.

        Args:
            tokens: number of a sequence -> its token ids. All other sequences are unknown from now on.
        """
        self._held = dict(tokens)
        self._fixed, self._embeddings, self.ids = self._laid_out()

    def of(self, row: int) -> Mapping[int, int]:
        """Return position -> token for the known tokens of a sequence."""
        held = self._held.get(row)
        return public_tokens(self._vocabulary, self._lengths[row]) if held is None else dict(enumerate(held))

    def free_places(self, row: int) -> list[int]:
        """Return the positions of a sequence whose tokens are not known."""
        known = self.of(row)
        return [place for place in range(self._lengths[row]) if place not in known]

    def placed(self, candidates: Candidate) -> Candidate:
        """Return the candidates with the known tokens at their positions."""
        return candidates._replace(embeddings=torch.where(self._fixed, self._embeddings, candidates.embeddings))

    def _laid_out(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (B, T, 1) whether a token is known, its embedding, and its id.

        The embedding is (B, T, D). The id is (B, T) int64, and -1 for unknown tokens.
        """
        shape = (len(self._lengths), max(self._lengths))
        fixed = torch.zeros(*shape, 1, dtype=torch.bool, device=self._table.device)
        embeddings = torch.zeros(*shape, self._table.shape[1], device=self._table.device)
        ids = torch.full(shape, -1, device=self._table.device)
        for row in range(len(self._lengths)):
            for place, token in self.of(row).items():
                fixed[row, place] = True
                embeddings[row, place] = self._table[token]
                ids[row, place] = token
        return fixed, embeddings, ids
