"""The labels that a candidate's loss is compared with: classes, or next tokens.

A classifier has one class for each sequence, which is granted, optimised or enumerated. A causal language model has none: its labels
are the tokens of the text itself, each one place earlier. So a candidate that consists of tokens has exact labels. A candidate that
consists of embeddings has no tokens yet, and no paper says what its labels are (TAG and LAMP attack classifiers). `NextTokens` has
three answers, `NextTokenLabels`.

Letters: N candidates, B sequences, R sequences that run together, T tokens, D hidden size, V vocabulary, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from leakaudit.algorithms.matching.candidates import Candidate
from leakaudit.algorithms.matching.known_tokens import KnownTokens
from leakaudit.algorithms.matching.word_table import WordTable
from leakaudit.client.observation import Observation

NextTokenLabels = Literal["similar", "joint", "nearest"]
"""Labels of embeddings under a causal language model.

`similar`: a softmax over the cosines of the next place's embedding with all tokens, so that labels follow the embeddings, and the loss
tells the embeddings which labels fit. `joint`: logits of their own at every place, optimised together with the embeddings, as DLG
optimises labels. `nearest`: the token nearest to the next place's embedding; the loss tells that embedding nothing about labels."""

CERTAIN = 30.0
"""Logit of a class that is taken as certain; each other class keeps a probability of 1e-13."""

SHARPNESS = 30.0
"""Factor on cosines in the softmax of `similar`. Chosen on training sentences."""


class Labels(Protocol):
    """How candidates are labelled."""

    shape: tuple[int, ...]
    """Shape of one candidate's label logits."""
    classes: int
    """C; 0 for a language model."""
    unknown: bool
    """Whether label logits are optimised."""
    enumerable: bool
    """Whether all labels can be tried in turn."""
    in_text: bool
    """Whether the labels are the text's own tokens."""

    def losses(self, logits: Tensor, dummy: Candidate, rows: Sequence[int], tokens: Tensor | None) -> Tensor:
        """Return (N,) the summed cross-entropy of some sequences of each candidate.

        Args:
            logits: (N R, C) or (N R, T, V) the model's answer.
            dummy: the candidates.
            rows: the R sequences, all of one length T.
            tokens: (N, B, T) int64 tokens of candidates that consist of tokens; None for embeddings.
        """

    def terms(self, lengths: Sequence[int]) -> int:
        """Return the number of labels of a batch, by which the sum is divided."""

    def certain(self, label_logits: Tensor) -> Tensor:
        """Return the logits of one candidate with all probability on the likeliest labels."""

    def likeliest(self, label_logits: Tensor) -> list[int]:
        """Return (B,) classes from one candidate's logits; empty for a language model."""

    def last_tokens(self, label_logits: Tensor, lengths: Sequence[int]) -> list[int] | None:
        """Return (B,) the last tokens that one candidate's logits tell, or None."""


class ClassLabels:
    """One class for each sequence: granted, or from the candidate's logits."""

    unknown: bool
    enumerable: bool
    in_text = False

    def __init__(self, granted: Tensor | None, classes: int, sequences: int) -> None:
        """Keep what is known.

        Args:
            granted: (B,) int64 classes; None if they are not granted.
            classes: C.
            sequences: B.
        """
        self._granted = granted
        self.classes = classes
        self.shape: tuple[int, ...] = (sequences, classes)
        self.unknown = self.enumerable = granted is None

    def losses(self, logits: Tensor, dummy: Candidate, rows: Sequence[int], tokens: Tensor | None) -> Tensor:  # noqa: ARG002  the tokens do not tell the class
        """Return (N,) the summed cross-entropy of some sequences."""
        candidates = len(dummy.embeddings)
        if self._granted is not None:
            target: Tensor = self._granted[rows].repeat(candidates)
        else:
            target = dummy.label_logits[:, rows].flatten(0, 1).softmax(dim=1)
        return functional.cross_entropy(logits, target, reduction="none").view(candidates, -1).sum(dim=1)

    def terms(self, lengths: Sequence[int]) -> int:
        """Return B."""
        return len(lengths)

    def certain(self, label_logits: Tensor) -> Tensor:
        """Return (B, C) logits with all probability on the likeliest class."""
        return functional.one_hot(label_logits.argmax(dim=1), self.classes).to(label_logits) * CERTAIN

    def likeliest(self, label_logits: Tensor) -> list[int]:
        """Return (B,) the granted classes, or the likeliest of (B, C) logits."""
        return [int(label) for label in (label_logits.argmax(dim=1) if self._granted is None else self._granted)]

    def last_tokens(self, label_logits: Tensor, lengths: Sequence[int]) -> None:
        """Return None, because classes tell no token."""


class NextTokens:
    """The labels of a causal language model: at each place the next token."""

    classes = 0
    enumerable = False
    in_text = True

    def __init__(self, words: WordTable, known: KnownTokens, lengths: Sequence[int], how: NextTokenLabels) -> None:
        """Choose how embeddings are labelled.

        Args:
            words: the word embedding.
            known: tokens whose places have certain labels.
            lengths: (B,) tokens of each sequence.
            how: see `NextTokenLabels`.
        """
        self._words, self._known, self._how = words, known, how
        self.unknown = how == "joint"
        longest, size = max(lengths), len(words.table)
        self.shape: tuple[int, ...] = (len(lengths), longest, size) if self.unknown else (len(lengths), 0)

    def losses(self, logits: Tensor, dummy: Candidate, rows: Sequence[int], tokens: Tensor | None) -> Tensor:
        """Return (N,) the summed cross-entropy of the next tokens of some sequences."""
        candidates, length = len(dummy.embeddings), logits.shape[1]
        answers = logits[:, :-1]  # (N R, T - 1, V)
        if tokens is not None:
            return self._against(answers, tokens[:, rows, 1:length], candidates)
        places = slice(1, length)
        known = self._known.ids[rows, places].repeat(candidates, 1)  # (N R, T - 1)
        inputs = self._words.inputs[rows, places].repeat(candidates, 1)
        guessed = dummy.embeddings[:, rows, places].flatten(0, 1)  # (N R, T - 1, D)
        if self._how == "nearest":
            _, near = self._words.nearest(guessed.detach(), inputs)
            return self._against(answers, torch.where(known < 0, near, known), candidates)
        if self._how == "joint":
            shares = dummy.label_logits[:, rows, places].flatten(0, 1).softmax(dim=2)
        else:
            shares = (SHARPNESS * self._words.cosines(guessed, inputs)).softmax(dim=2)
        likely = answers.log_softmax(dim=2)
        soft = -(shares * likely).sum(dim=2)  # (N R, T - 1)
        certain = -likely.gather(2, known.clamp_min(0)[..., None])[..., 0]
        return torch.where(known < 0, soft, certain).view(candidates, -1).sum(dim=1)

    def terms(self, lengths: Sequence[int]) -> int:
        """Return the number of tokens that follow another one."""
        return sum(length - 1 for length in lengths)

    def certain(self, label_logits: Tensor) -> Tensor:
        """Return no logits, because tokens tell their labels."""
        return label_logits.new_zeros(len(label_logits), 0)

    def likeliest(self, label_logits: Tensor) -> list[int]:  # noqa: ARG002  there are no classes
        """Return an empty list."""
        return []

    def last_tokens(self, label_logits: Tensor, lengths: Sequence[int]) -> list[int] | None:
        """Return (B,) the likeliest last tokens; None if labels are not optimised.

        No loss follows the last token, so its embedding has no gradient: only the label before it tells it.
        """
        if not self.unknown:
            return None
        allowed = label_logits.masked_fill(~self._words.allowed, -torch.inf)
        return [int(allowed[row, length - 1].argmax()) for row, length in enumerate(lengths)]

    def _against(self, answers: Tensor, ids: Tensor, candidates: int) -> Tensor:
        """Return (N,) the summed cross-entropy of (N R, T - 1, V) logits with token ids."""
        each = functional.cross_entropy(answers.flatten(0, 1), ids.flatten(), reduction="none")
        return each.view(candidates, -1).sum(dim=1)


def labels_of(
    seen: Observation, lengths: Sequence[int], words: WordTable, known: KnownTokens, how: NextTokenLabels = "similar"
) -> Labels:
    """Return how the candidates of an observation are labelled.

    Args:
        seen: its task and its granted labels.
        lengths: (B,) tokens of each sequence.
        words: the word embedding.
        known: tokens whose places have certain labels.
        how: labels of embeddings under a causal language model.
    """
    if seen.facts.task == "causal-lm":
        return NextTokens(words, known, lengths, how)
    granted = seen.facts.granted.labels
    on = None if granted is None else torch.tensor(granted, device=words.table.device)
    return ClassLabels(on, int(seen.facts.num_labels or 0), len(lengths))
