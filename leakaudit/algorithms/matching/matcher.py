"""Losses, derivatives, tokens and random starts of candidate batches.

Every attack by gradient matching uses a `Matcher`. It combines `CandidateGradients` (the gradients of candidates),
`Comparison` (their distances to the observed gradient), the public tokens and the regulariser.

Letters: N candidates, B sequences, T tokens, D hidden size, V vocabulary, C classes, P entries of dropout masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leakaudit.algorithms.matching.candidate_gradients import CandidateGradients, Pairs
from leakaudit.algorithms.matching.candidate_maker import CandidateMaker
from leakaudit.algorithms.matching.candidates import Candidate, joined
from leakaudit.algorithms.matching.chunks import Chunks
from leakaudit.algorithms.matching.comparison import Comparison
from leakaudit.algorithms.matching.guessed_labels import Labels, labels_of
from leakaudit.algorithms.matching.known_tokens import KnownTokens
from leakaudit.algorithms.matching.learned_masks import LearnedMasks
from leakaudit.algorithms.matching.length_regulariser import LengthRegulariser
from leakaudit.algorithms.matching.objective import Matching, Objective, with_declared_defenses
from leakaudit.algorithms.matching.position_assignment import position_vectors
from leakaudit.algorithms.matching.word_table import WordTable
from leakaudit.client.observation import Observation

CHUNK_TOKENS = 1024
"""Tokens of all candidates that run at once. Our choice: matrix products on one core then have full speed, and the activations of
a base-size model take less than half a gigabyte."""

EXPLAINED = 1e-4
"""The search ends when the distance of a guess as tokens is at most this share of a zero gradient's distance. Measured (cosine,
MiniLM, one CoLA training sentence of 8 tokens): 1e-5 for the true sentence, and at least 0.04 for 43 other orders of its
words. `prove` then decides whether the guess is right."""

CHUNK_LOGITS = 2**24
"""Most logits of a language model's head in one pass. Our choice: a tensor of them takes 64 MiB, and a pass keeps about ten such tensors."""


class Matcher:
    """Compares candidate batches with the observed update."""

    def __init__(
        self,
        seen: Observation,
        lengths: Sequence[int],
        objective: Objective,
        how: Matching = Matching(),  # noqa: B008  frozen
    ) -> None:
        """Prepare the parts; `seen` is not changed, neither here nor by any method.

        Args:
            seen: the observation to match.
            lengths: (B,) tokens of each sequence.
            objective: the distance; `with_declared_defenses` adds what the protocol declares.
            how: what candidates are made of, and what is compared.

        Raises:
            AnatomyError: there is nothing to match.
        """
        self.lengths = tuple(lengths)
        self.words = WordTable(seen, self.lengths, bag=how.bag, lowest_id=how.lowest_id)
        self.known = KnownTokens(seen.facts.vocabulary, self.lengths, self.table)
        self.labels: Labels = labels_of(seen, self.lengths, self.words, self.known, how.next_tokens)
        """The labels of candidates."""
        self.gradients = CandidateGradients(seen, lengths, self.labels, how.patterns, dropout=how.dropout)
        self.objective = with_declared_defenses(objective, seen, how)
        self._comparison = Comparison(
            self.objective, self.gradients.matrices, self.gradients.vectors, seen.update, sum(self.lengths)
        )
        self.positions = position_vectors(seen, max(self.lengths))
        """(T, D) the vectors that the model adds to embeddings at each position; None if it does more than add."""
        self.unit = self.words.root_mean_square if how.relative else 1.0
        """Unit of Adam's step: the root mean square of the word embedding's entries, or 1."""
        opening = range(len(seen.facts.vocabulary.starts_with))
        self.masks = LearnedMasks(
            self.gradients.masks,
            [opening for _ in self.lengths],
            self.table.device,
            places=how.mask_places,
            weight=how.mask_weight,
        )
        scale = how.start_scale or self.words.mean_length / self.table.shape[1] ** 0.5
        self.candidates = CandidateMaker(
            self.table, self.lengths, self.labels.shape, self.masks, self.gradients.masks, scale
        )
        self._length_loss = LengthRegulariser(
            how.length_weight, how.start_norm or self.words.mean_length, self.lengths, self.table.device
        )
        at_once = CHUNK_TOKENS if seen.facts.task != "causal-lm" else min(CHUNK_TOKENS, CHUNK_LOGITS // len(self.table))
        self.chunks = Chunks(max(1, at_once // sum(self.lengths)))

    @property
    def table(self) -> Tensor:
        """(V, D) the word embedding."""
        return self.words.table

    @property
    def directions(self) -> Tensor:
        """(V, D) the word embedding's rows at norm 1.

        Zero for tokens that cannot stand at a free position.
        """
        return self.words.directions

    @property
    def parameters(self) -> int:
        """The number K of parameters that are compared."""
        return len(self.gradients.matrices) + len(self.gradients.vectors)

    @property
    def at_once(self) -> int:
        """The number of candidates that run at once.

        With more at once, a search needs more memory but is not faster.
        """
        return self.chunks.size

    @property
    def classes(self) -> int:
        """The number C of classes; 0 for a language model."""
        return self.labels.classes

    def free_places(self, row: int) -> list[int]:
        """Return the positions of a sequence whose tokens are not known."""
        return self.known.free_places(row)

    def losses(self, dummy: Candidate) -> Tensor:
        """Return (N,) float64 objective plus regulariser of each candidate."""
        return torch.cat(list(self.chunks.run(len(dummy.embeddings), lambda some: self._losses(dummy.take(some)))))

    def distances(self, dummy: Candidate) -> Tensor:
        """Return (N,) float64 objective of each candidate, without the regulariser."""
        return torch.cat(list(self.chunks.run(len(dummy.embeddings), lambda some: self._distances(dummy.take(some)))))

    def losses_and_derivatives(self, dummy: Candidate) -> tuple[Tensor, Candidate]:
        """Return (N,) losses and the derivatives of their sum by the candidates.

        The derivatives are zero for labels that are granted.
        """
        losses, slopes = zip(
            *self.chunks.run(len(dummy.embeddings), lambda some: self._losses_and_derivatives(dummy.take(some))),
            strict=True,
        )
        return torch.cat(losses), joined(slopes)

    def explain(self, tokens: Sequence[Sequence[int]], label_logits: Tensor) -> bool:
        """Return whether a guess has the observed gradient.

        The guess consists of tokens and their likeliest labels. The answer depends on the objective.

        Args:
            tokens: (B,) sequences of token ids.
            label_logits: of one candidate.
        """
        return self.explained_by(self.token_losses([tokens], label_logits)[0])

    def explained_by(self, loss: float) -> bool:
        """Return whether a distance is as small as that of the true tokens.

        The answer depends on the objective.
        """
        return loss <= EXPLAINED * self._comparison.of_nothing

    def token_losses(
        self, batches: Sequence[Sequence[Sequence[int]]], label_logits: Tensor, masks: Tensor | None = None
    ) -> list[float]:
        """Return the distances of N batches of tokens, without the regulariser.

        Each batch has its likeliest labels. A language model's labels are the tokens.

        Args:
            batches: N batches of B sequences of token ids.
            label_logits: of one candidate, (B, C) for classes.
            masks: (P,) of dropout, the same for all batches; None for masks at their mean.
        """
        found = self.chunks.run(
            len(batches), lambda some: self._comparison.losses(self.token_pairs(batches[some], label_logits, masks))
        )
        return [loss for part in found for loss in part.tolist()]

    def token_pairs(
        self, batches: Sequence[Sequence[Sequence[int]]], label_logits: Tensor, masks: Tensor | None = None
    ) -> Pairs:
        """Return the gradients of batches of tokens with their likeliest labels.

        The arguments are those of `token_losses`.
        """
        dummy = self.candidates.of_tokens(batches, self.certain(label_logits, len(batches)), masks)
        return self.gradients.pairs(self.known.placed(dummy), differentiable=False, tokens=self.candidates.ids(batches))

    def certain(self, label_logits: Tensor, candidates: int) -> Tensor:
        """Return (N, ...) logits that are certain of one candidate's likeliest labels."""
        certain = self.labels.certain(label_logits)
        return certain.expand(candidates, *certain.shape)

    def tokens(
        self, embeddings: Tensor, label_logits: Tensor | None = None
    ) -> tuple[list[tuple[int, ...]], list[float]]:
        """Return the tokens with the highest cosines, and mean cosines.

        The tokens are chosen as in LAMP (Algorithm 1). There is one mean cosine for each sequence. Special tokens stand only where the
        tokenizer puts them. The unknown-word token may stand anywhere.

        Args:
            embeddings: (B, T, D) of one candidate.
            label_logits: of the same candidate. They tell the last tokens if a language model's labels are optimised.
        """
        values, ids = (each.tolist() for each in self.words.nearest(embeddings))
        last = None if label_logits is None else self.labels.last_tokens(label_logits, self.lengths)
        found, likeness = [], []
        for row, length in enumerate(self.lengths):
            known = self.known.of(row)
            if last is not None:
                ids[row][length - 1] = last[row]
            found.append(tuple(known.get(place, ids[row][place]) for place in range(length)))
            free = [values[row][place] for place in range(length) if place not in known]
            likeness.append(min(1.0, max(0.0, sum(free) / len(free))) if free else 1.0)
        return found, likeness

    def _distances(self, dummy: Candidate) -> Tensor:
        placed = self.known.placed(dummy.detached())
        return self._comparison.losses(self.gradients.pairs(placed, differentiable=False))

    def _losses(self, dummy: Candidate) -> Tensor:
        losses = self._distances(dummy)
        if self._length_loss.weight:
            losses = losses + self._length_loss(self.known.placed(dummy.detached()).embeddings).double()
        return losses + self.masks.penalty(dummy.masks) if self.masks.weight else losses

    def _losses_and_derivatives(self, dummy: Candidate) -> tuple[Tensor, Candidate]:
        """Return the losses of some candidates and the derivatives of their sum.

        The objective's derivatives by the pairs have a closed form; one backward pass continues from them.
        """
        live = Candidate(*(part.detach().requires_grad_() for part in dummy))
        with torch.enable_grad():
            placed = self.known.placed(live)
            pairs = self.gradients.pairs(placed, differentiable=True)
            losses, slopes = self._comparison.compare(pairs)
            made = [*pairs.inputs, *pairs.output_gradients, *pairs.vectors]
            by_made = [*slopes.inputs, *slopes.output_gradients, *slopes.vectors]
            chosen = [n for n, tensor in enumerate(made) if tensor.requires_grad]
            outputs = [made[n] for n in chosen]
            weights: list[Tensor | None] = [by_made[n] for n in chosen]
            if self._length_loss.weight:
                length_loss = self._length_loss(placed.embeddings)
                losses = losses + length_loss.detach().double()
                outputs.append(length_loss.sum())
                weights.append(None)
            unknown = (True, self.labels.unknown, live.masks.shape[1] > 0)
            wanted = [part for part, open_ in zip(live, unknown, strict=True) if open_]
            if self.masks.weight and unknown[2]:
                mask_losses = self.masks.penalty(live.masks)
                losses = losses + mask_losses.detach()
                outputs.append(mask_losses.sum())
                weights.append(None)
            found = iter(torch.autograd.grad(outputs, wanted, grad_outputs=weights))
        derivatives = Candidate(
            *(next(found) if open_ else torch.zeros_like(part) for part, open_ in zip(dummy, unknown, strict=True))
        )
        return losses, derivatives._replace(masks=derivatives.masks * self.masks.learned)
