"""The changes that a local search tries: other lengths, classes and words.

Words are proposed by two scores: nearness to the span, which does not depend on the sentence (`word_scores`), and the
filtered score given the gradients of the current sentence (`soft_ranking`), which improves with every word that is
right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakaudit.algorithms.span.explained_signal import ExplainedSignal
from leakaudit.algorithms.span.hypothesis_search import Hypothesis, changed
from leakaudit.algorithms.span.word_scores import WordScores

RESHAPED = 3
"""Most tokens by which one move may lengthen or shorten a sentence. Our choice."""


@dataclass(frozen=True)
class SentenceMoves:
    """The neighbours of a sentence."""

    scores: WordScores
    signal: ExplainedSignal
    labels: Sequence[int]
    """Classes to try."""

    def other_lengths(self, base: Hypothesis) -> list[Hypothesis]:
        """Return the sentence at other lengths: cut, or filled with the best words."""
        words, length = self.scores.frame.words_of(base), len(base.token_ids)
        return [
            self.scores.sentence(other, words, base.label)
            for other in range(length - RESHAPED, length + RESHAPED + 1)
            if other != length and self.scores.frame.size < other <= self.scores.positions
        ]

    def jumps(self, base: Hypothesis) -> list[Hypothesis]:
        """Return the sentence with other classes, and with several words changed.

        The words with the largest gain in score are changed: the best one, the best two, and so on.
        """
        found = [replace(base, label=label) for label in self.labels if label != base.label]
        if self.signal.projections:
            before, words = len(self.scores.frame.before), self.scores.frame.words_of(base)
            scores = self._both(base)[:, before : before + len(words)]
            best = scores.max(dim=0)
            gain = best.values - scores[torch.tensor(words, device=scores.device), torch.arange(len(words))]
            order = [p for p in gain.argsort(descending=True).tolist() if float(gain[p]) > 0]
            new = best.indices.tolist()
            found += [changed(base, {before + p: new[p] for p in order[:count]}) for count in range(1, len(order) + 1)]
        return found

    def propose(self, base: Hypothesis, width: int) -> list[list[int]]:
        """Return the `width` best tokens of each score at every position.

        Positions of the frame get no tokens.
        """
        length = len(base.token_ids)
        width = min(width, len(self.scores.pool))
        columns = [self.scores.soft[:, :length].topk(width, dim=0).indices.T.tolist()]
        if self.signal.projections:
            columns.append(self._both(base).topk(width, dim=0).indices.T.tolist())
        return [
            list(dict.fromkeys(token for column in columns for token in column[p]))
            if self.scores.frame.is_word(p, length)
            else []
            for p in range(length)
        ]

    def _both(self, base: Hypothesis) -> Tensor:
        """Return (V, T): the sum of both scores."""
        return self.scores.soft[:, : len(base.token_ids)] + self._filtered(base)

    def _filtered(self, base: Hypothesis) -> Tensor:
        """Return (V, T): the scores given the output gradients of the current sentence."""
        made = self.signal.simulation.activations([base], self.signal.projections)
        noise = self.signal.projection_noise
        gradients = torch.cat([d[0].double() / s for (_, d), s in zip(made, noise, strict=True)], dim=1)  # (T, F)
        x = made[0][0][0].double()  # (T, D)
        # The client may have scaled its gradient (clipping, batch size): the best factor is used.
        update, simulated = self.signal.update_in_noise, gradients.T @ x
        factor = float((simulated * update).sum() / simulated.square().sum().clamp_min(1e-300))
        if factor > 0:
            gradients = gradients * factor
        return self.scores.ranking.filtered(gradients, update)
