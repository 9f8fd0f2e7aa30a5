"""Simulations of sentences that are kept from one round of a search to the next.

What a sentence adds to the rows does not depend on what is left of them, and each round of a search simulates mostly the sentences of the last one.

Letters: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from leakaudit.algorithms.padding import padded_batch
from leakaudit.algorithms.rare_rows.sentence_rows import simulated
from leakaudit.client.observation import Observation

CHUNK = 128
"""Sentences of one forward and backward pass. Our choice: their predicted distributions take 0.1 GB for ten tokens and 20,000 words."""

MOST_BYTES = 2**30
"""Most memory of the sentences of one round. Our choice: 25,000 sentences of 14 tokens at D = 384."""

Simulated = tuple[Tensor, Tensor]
"""(T, D) inputs of the head, and (T, D) -dL/dx at each place's word vector, with L the summed loss."""


class Simulations:
    """Simulates sentences, each alone, and keeps them for a round and the next."""

    def __init__(self, seen: Observation) -> None:
        """Start without sentences.

        Args:
            seen: its model is left as it was.
        """
        self._seen = seen
        self._last: dict[tuple[int, ...], Simulated] = {}
        self._now: dict[tuple[int, ...], Simulated] = {}
        self._bytes = 0

    def next_round(self) -> None:
        """Forget what the last round did not ask for."""
        self._last, self._now, self._bytes = self._now, {}, 0

    def of(self, sentences: Sequence[tuple[int, ...]]) -> list[Simulated]:
        """Return the simulations of sentences, in their order.

        Args:
            sentences: token ids, at least one each.
        """
        known = {tokens: kept for tokens in sentences if (kept := self._now.get(tokens) or self._last.get(tokens))}
        new = sorted({tokens for tokens in sentences if tokens not in known}, key=len)
        for start in range(0, len(new), CHUNK):
            known.update(self._simulated(new[start : start + CHUNK]))
        for tokens, made in known.items():
            self._keep(tokens, made)
        return [known[tokens] for tokens in sentences]

    def _keep(self, tokens: tuple[int, ...], made: Simulated) -> None:
        size = sum(each.nbytes for each in made)
        if tokens not in self._now and self._bytes + size <= MOST_BYTES:
            self._now[tokens] = made
            self._bytes += size

    def _simulated(self, part: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Simulated]:
        ids, mask = padded_batch(self._seen, part)
        states, _, slopes = simulated(self._seen.model, ids, mask)
        return {
            tokens: (states[row, : len(tokens)].clone(), -slopes[row, : len(tokens)]) for row, tokens in enumerate(part)
        }
