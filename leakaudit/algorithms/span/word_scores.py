"""Scores of every word at every position of a sentence, against a noisy update.

The score of a word t at position p is the sum of two parts, both in standard deviations:

- how much nearer x(t, p) is to the weighted span than the other tokens are at p (`soft_ranking`);
- how much larger row t of the word embedding's update is than the median row, where that update is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.algorithms.embedding_rows import can_read_rows, rows_of_tokens
from leakaudit.algorithms.span.hypothesis_search import Hypothesis
from leakaudit.algorithms.span.problem import SpanProblem
from leakaudit.algorithms.span.sentence_frame import Frame, frame_of, likely_lengths
from leakaudit.algorithms.span.soft_ranking import Ranking
from leakaudit.algorithms.span.subspace import SoftSpan

SPARE_POSITIONS = 4
"""Positions beyond the longest likely length, so that a sentence can still grow.
Our choice."""

MOST_EVIDENCE = 10.0
"""Cap, in standard deviations, on what a row of the word embedding adds to a score.
Our choice: a row beyond it is certainly in the batch."""

POOL = 128
"""Words per position that later steps choose from.
Chosen on training sentences; see docs/decisions/span_constants.md."""


@dataclass(frozen=True)
class WordScores:
    """Scores of all V tokens at the first P positions of a sentence."""

    frame: Frame
    lengths: tuple[int, ...]
    """Likely lengths in tokens, most likely first."""
    ranking: Ranking
    """The ranking that gives the scores; it also scores words given a hypothesis."""
    soft: Tensor
    """(V, P) float32; minus infinity for special tokens."""
    pool: Tensor
    """(K, P) int64: the K words of highest score at each position."""
    best: tuple[int, ...]
    """The word of highest score at each position."""

    @classmethod
    def of(cls, problem: SpanProblem, span: SoftSpan) -> WordScores:
        """Score all words.

        Args:
            problem: the observation with its parts.
            span: weighted directions of the noisy span.
        """
        frame = frame_of(problem)
        lengths = likely_lengths(problem, span, frame)
        positions = min(problem.stage.max_length, max(lengths) + SPARE_POSITIONS)
        ranking = Ranking.of(problem.stage, span.vectors, span.weights, positions)
        soft = _words_only(problem, ranking.soft + _row_evidence(problem)[:, None])
        words = int((soft[:, 0] > float("-inf")).sum())
        pool = soft.topk(min(POOL, words), dim=0).indices
        return cls(frame, lengths, ranking, soft, pool, tuple(soft.argmax(0).tolist()))

    @property
    def positions(self) -> int:
        """P: the longest sentence, in tokens, that has scores."""
        return self.soft.shape[1]

    def sentence(self, length: int, words: Sequence[int] = (), label: int = 0) -> Hypothesis:
        """Return a sentence of some length from given words, filled with the best ones.

        Args:
            length: in tokens, with the frame.
            words: token ids, from the first word on; those that do not fit are left out.
            label: class of the sentence.
        """
        before, stop = len(self.frame.before), length - len(self.frame.after)
        words = [*words, *self.best[before + len(words) : stop]][: stop - before]
        return self.frame.around(words, label)


def _words_only(problem: SpanProblem, scores: Tensor) -> Tensor:
    """Return scores (V, P) that are minus infinity for special tokens.

    The token for unknown words keeps its score.
    """
    vocabulary = problem.seen.facts.vocabulary
    unknown = {vocabulary.special.get("unk", -1)}
    banned = sorted(i for i in vocabulary.wordless_ids - unknown if i < len(scores))
    return scores.index_fill(0, torch.tensor(banned, dtype=torch.long, device=scores.device), float("-inf"))


def _row_evidence(problem: SpanProblem) -> Tensor:
    """Return (V,): robust z-scores of the rows of the word embedding's update.

    A z-score is the row's norm minus the median norm, over 1.4826 times the median absolute deviation, which is one
    standard deviation for normal noise. All z-scores are zero if the update cannot be read.
    """
    seen, stage = problem.seen, problem.stage
    if not can_read_rows(seen):
        return torch.zeros(stage.vocabulary, device=stage.device)
    norms = rows_of_tokens(seen).norm(dim=1)
    middle = norms.median()
    spread = 1.4826 * (norms - middle).abs().median()
    if spread == 0:  # no noise: a row is zero or it is not
        return torch.where(norms > 0, MOST_EVIDENCE, -MOST_EVIDENCE)
    evidence: Tensor = ((norms - middle) / spread).clamp(-MOST_EVIDENCE, MOST_EVIDENCE)
    return evidence
