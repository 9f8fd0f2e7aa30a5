"""Likelihoods that a causal language model gives to sequences of its own tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from leakaudit.models.vocabulary import Vocabulary
from leakaudit.plugins.prior_protocol import frame_of, words_of

LOGITS = 1 << 25
"""Most logits of one pass, 128 MB in float32. Our choice: a few hundred short candidates then need only a few passes."""


@dataclass(frozen=True)
class TokenScorer:
    """A causal language model over the victim's own tokens."""

    model: nn.Module
    """In eval mode; left unchanged."""
    vocabulary: Vocabulary
    """Vocabulary of the sequences that are scored."""
    frame: Vocabulary | None = None
    """Vocabulary with the tokens that began and ended a text in the model's training. None takes `vocabulary`."""

    def nll(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return each sequence's mean negative log-likelihood per scored token, in nats."""
        totals = self.totals([words_of(sequence, self.vocabulary) for sequence in sequences])
        return [nats / scored if scored else math.log(self.vocabulary.size) for nats, scored in totals]

    def totals(self, texts: Sequence[Sequence[int]]) -> list[tuple[float, int]]:
        """Return each text's total nats, and its number of scored tokens.

        Args:
            texts: N texts without special tokens.
        """
        frame = self.frame or self.vocabulary
        start, end = frame_of(frame)
        given = max(1, len(start))  # tokens that begin a text are not scored; without any, the first token is not
        windows = [
            (row, *window)
            for row, text in enumerate(texts)
            for window in _windows([*start, *text, *end], given, frame.max_length)
        ]
        totals = [[0.0, 0.0] for _ in texts]
        for chunk in self._chunks([len(ids) for _, ids, _ in windows]):
            some = [windows[place] for place in chunk]
            for (row, ids, known), nats in zip(some, self._nats([ids for _, ids, _ in some]), strict=True):
                own = nats[known - 1 : max(0, len(ids) - 1)]
                totals[row][0] += float(own.sum())
                totals[row][1] += len(own)
        return [(nats, int(scored)) for nats, scored in totals]

    @torch.no_grad()
    def next_token_nll(self, prefixes: Sequence[Sequence[int]]) -> Tensor | None:
        """Return (N, V) nats of every token after each prefix.

        None if a prefix is empty and no token begins a text.
        """
        start, _ = frame_of(self.frame or self.vocabulary)
        framed = [[*start, *words_of(prefix, self.vocabulary)] for prefix in prefixes]
        if not all(framed):
            return None
        found = torch.full((len(prefixes), self.vocabulary.size), math.inf)
        for rows in self._chunks([len(text) for text in framed]):
            logits = self._logits([framed[row] for row in rows])  # (rows, T, V)
            last = torch.tensor([len(framed[row]) - 1 for row in rows], device=logits.device)
            nats = -logits[torch.arange(len(rows)), last].float().log_softmax(dim=1).cpu()  # (rows, V of the model)
            known = min(nats.shape[1], self.vocabulary.size)  # either may have more rows
            found[rows, :known] = nats[:, :known]
        return found

    def _chunks(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the rows of each pass, sorted by length to keep padding small."""
        order = sorted(range(len(lengths)), key=lambda row: lengths[row])
        chunks: list[list[int]] = []
        for row in order:
            if chunks and (len(chunks[-1]) + 1) * lengths[row] * self.vocabulary.size <= LOGITS:
                chunks[-1].append(row)
            else:
                chunks.append([row])
        return chunks

    @torch.no_grad()
    def _nats(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return for each text the nats of all tokens but the first.

        Values of padding follow after the text's own.
        """
        longest = max(map(len, texts))
        if longest < 2:
            return [torch.zeros(0) for _ in texts]
        logits = self._logits(texts)[:, :-1].float()  # (rows, T - 1, V)
        targets = self._padded(texts)[:, 1:]
        nats = functional.cross_entropy(logits.flatten(end_dim=1), targets.flatten(), reduction="none")
        return list(nats.view_as(targets).cpu())

    def _logits(self, texts: Sequence[Sequence[int]]) -> Tensor:
        ids = self._padded(texts)
        lengths = torch.tensor([len(text) for text in texts], device=ids.device)
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        logits: Tensor = self.model(input_ids=ids, attention_mask=mask.long()).logits
        return logits

    def _padded(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return (rows, T) ids, padded on the right.

        A causal model does not look at tokens to the right, so the padding changes nothing. A victim's table may have rows beyond its
        tokenizer's tokens. If the model has no such row, its last token replaces the id.
        """
        ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
        table: Tensor = self.model.get_input_embeddings().weight  # type: ignore[operator]
        return ids.clamp(max=len(table) - 1).to(table.device)


def _windows(ids: Sequence[int], given: int, longest: int) -> list[tuple[Sequence[int], int]]:
    """Cut a text into windows of at most `longest` tokens.

    Every token is scored once, in the first window that holds it. In all windows but the first, at least half a window precedes it.

    Returns:
        Windows, each with the number of its first tokens that are not scored in it.

    >>> _windows([1, 2, 3, 4, 5, 6, 7], given=1, longest=4)
    [([1, 2, 3, 4], 1), ([3, 4, 5, 6], 2), ([5, 6, 7], 2)]
    """
    found, at, known = [(ids[:longest], given)], 0, longest
    while known < len(ids):
        at = known - longest // 2
        found.append((ids[at : at + longest], known - at))
        known = at + longest
    return found
