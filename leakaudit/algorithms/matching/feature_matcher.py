"""A matcher of the observed update, and of features at the pooler's input.

Letters: N candidates, B sequences, T tokens, D hidden size, F features compared, K features read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Literal, NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional

from leakaudit.algorithms.matching.batch_shape import equal_lengths
from leakaudit.algorithms.matching.candidates import Candidate
from leakaudit.algorithms.matching.feature_refinement import search_tokens
from leakaudit.algorithms.matching.matcher import Matcher
from leakaudit.algorithms.matching.run import Recipe
from leakaudit.models.structure import find_pooler
from leakaudit.models.structure.trace import inputs_of
from leakaudit.plugins import Budget, Observation

Phase = Literal["continuous", "discrete", "both", "words", "none"]


MOST_ASSIGNED = 5
"""Most sequences for which all assignments of features to sequences are tried. With more sequences, the best pair is taken
repeatedly. Our choice: 120 assignments."""


class Completed(NamedTuple):
    """A batch whose sequences were refined by their features."""

    tokens: list[tuple[int, ...]]
    """(B,)"""
    right: set[int]
    """Numbers of the sequences that reproduce a feature."""


class FeatureMatcher(Matcher):
    """A matcher of the observed update, and of features at the pooler's input."""

    def __init__(
        self,
        seen: Observation,
        lengths: Sequence[int],
        recipe: Recipe,
        features: Tensor,
        phase: Phase,
        feature_weight: float,
    ) -> None:
        """Prepare the parts; `seen` is not changed, neither here nor by any method.

        Args:
            seen: the observation to match.
            lengths: (B,) tokens of each sequence.
            recipe: objective, regulariser and parameters for the distance of gradients.
            features: (K, F), at most one for each sequence.
            phase: the phase of the search in which the features count.
            feature_weight: weight of one minus the mean cosine with the features.
        """
        super().__init__(seen, lengths, recipe.objective, replace(recipe, bag=False))
        self._seen = seen
        self._dense = seen.model.get_submodule(find_pooler(seen.model, self.labels.classes).dense)
        self._features = functional.normalize(features, dim=1).float().to(self.table.device)
        self._weight = feature_weight
        self._continuous = phase in ("continuous", "both") and len(features) > 0
        self._discrete = phase in ("discrete", "both") and len(features) > 0

    def losses(self, dummy: Candidate) -> Tensor:
        """Return (N,) the losses by which starts and orders are chosen."""
        losses = super().losses(dummy)
        if not self._discrete:
            return losses
        with torch.no_grad():
            return losses + self._feature_losses(dummy.embeddings).to(losses)

    def losses_and_derivatives(self, dummy: Candidate) -> tuple[Tensor, Candidate]:
        """Return (N,) the losses that the descent minimises, and their derivatives."""
        losses, slopes = super().losses_and_derivatives(dummy)
        if not self._continuous:
            return losses, slopes
        with torch.enable_grad():
            live = dummy.embeddings.detach().requires_grad_()
            found = self._feature_losses(live)
            (by_features,) = torch.autograd.grad(found.sum(), live)
        return losses + found.detach().to(losses), slopes._replace(embeddings=slopes.embeddings + by_features)

    def feature_distances(self, row: int, number: int, embeddings: Tensor) -> Tensor:  # noqa: ARG002  as in `Compared`
        """Return (N,) the cosine distances of candidates to a feature.

        Args:
            row: the sequence.
            number: the feature.
            embeddings: (N, T, D), T its length.
        """
        own = self._passed(embeddings)[:, : self._features.shape[1]]
        return 1 - functional.normalize(own, dim=1) @ self._features[number]

    @property
    def features(self) -> int:
        """The number of features."""
        return len(self._features)

    def completed(
        self, tokens: Sequence[tuple[int, ...]], label_logits: Tensor, words: int, rng: torch.Generator, budget: Budget
    ) -> Completed:
        """Return the sequences, each refined by its own feature.

        The features are assigned to sequences so that they fit the guesses best. If a refined sequence does not reproduce its
        feature, it is only a local minimum of the search. It is then used only if it lowers the distance of the gradient.

        Args:
            tokens: (B,) sequences of token ids.
            label_logits: (B, C).
            words: number of words that are tried at each position.
            rng: draws orders.
            budget: checked in every search.
        """
        every = range(len(self._features))
        far = [[self._token_distance(row, number, ids) for row, ids in enumerate(tokens)] for number in every]
        found, right = list(tokens), set[int]()
        for number, row in zip(*linear_sum_assignment(far), strict=True):
            result = search_tokens(self, int(row), int(number), found[row], words, rng, budget)
            changed = [*found[:row], result.tokens, *found[row + 1 :]]
            before, after = self.token_losses([found, changed], label_logits)
            if after < before or result.found:
                found = changed
            if result.found:
                right.add(int(row))
        return Completed(found, right)

    def _token_distance(self, row: int, number: int, ids: Sequence[int]) -> float:
        with torch.no_grad():
            alone = self.table[torch.tensor([ids], device=self.table.device)]  # (1, T, D)
            return float(self.feature_distances(row, number, alone))

    def _feature_losses(self, embeddings: Tensor) -> Tensor:
        """Return (N,) the weighted distance of features and sequences.

        The distance is one minus the mean cosine under the best assignment of each feature to a sequence of its own.
        """
        own = self._pooler_inputs(embeddings)[..., : self._features.shape[1]]  # (N, B, F)
        cosine = functional.normalize(own, dim=2) @ self._features.T  # (N, B, K)
        return self._weight * (1 - best_assignment(cosine))

    def _pooler_inputs(self, embeddings: Tensor) -> Tensor:
        """Return (N, B, D) the inputs of the pooler."""
        candidates = len(embeddings)
        logits, masks = embeddings.new_zeros(candidates, len(self.lengths), 1), embeddings.new_zeros(candidates, 0)
        placed = self.known.placed(Candidate(embeddings, logits, masks)).embeddings
        parts: dict[int, Tensor] = {}
        for rows, length in equal_lengths(self.lengths):
            each = self._passed(placed[:, rows, :length].flatten(0, 1)).view(candidates, len(rows), -1)
            parts |= {row: each[:, place] for place, row in enumerate(rows)}
        return torch.stack([parts[row] for row in range(len(self.lengths))], dim=1)

    def _passed(self, embeddings: Tensor) -> Tensor:
        """Return (n, D) the pooler's inputs for (n, T, D) sequences of one length."""
        with inputs_of(self._dense) as taken:
            self._seen.model(
                inputs_embeds=embeddings, attention_mask=torch.ones(embeddings.shape[:2], device=embeddings.device)
            )
        return taken[0]


def best_assignment(cosine: Tensor) -> Tensor:
    """Return (N,) the largest mean cosine of features and sequences.

    Each feature has a sequence of its own.

    Args:
        cosine: (N, B, K), K at most B.
    """
    _, sequences, count = cosine.shape
    if sequences <= MOST_ASSIGNED:
        ways = torch.tensor(list(permutations(range(sequences), count)), device=cosine.device)  # (ways, K)
        return cosine[:, ways, torch.arange(count, device=cosine.device)].mean(dim=2).amax(dim=1)
    left, total = cosine, cosine.new_zeros(len(cosine))
    for _ in range(count):
        best, place = left.flatten(1).max(dim=1)
        total = total + best
        taken = torch.zeros_like(left, dtype=torch.bool)
        each = torch.arange(len(cosine), device=cosine.device)
        taken[each, place // count] = True
        taken[each, :, place % count] = True
        left = left.masked_fill(taken, -2.0)
    return total / count
