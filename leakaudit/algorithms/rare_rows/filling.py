"""The words at the holes of drafts, found by gradient ascent on weights.

Each hole holds a weighted mean of the words that are possible there. The weights move until the gradients at the rare words agree with their
rows. All words of a sentence are so found together, at the cost of some ten passes. (Own derivation; the weighted mean over a vocabulary is
that of Guo et al. 2021, Gradient-based Adversarial Attacks against Text Transformers, Sec. 3.)

Letters: N drafts, T places, H holes of all drafts, C candidate words, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.algorithms.rare_rows.agreement import Agreement
from leakaudit.algorithms.rare_rows.sentences import Draft, Laid

WEAK = 0.3
"""Share of the median agreement below which a rare word is weak. Chosen on training sentences; see docs/decisions/rare_rows.md."""

CHOICES = 4
"""Words of each hole that are tried later. Our choice."""

RATE = 0.5
"""Learning rate of Adam (Kingma and Ba 2015) on the weights' logits. Chosen on training sentences; see docs/decisions/rare_rows.md."""


@dataclass(frozen=True)
class Candidates:
    """Words that may stand at a hole."""

    words: Tensor
    """(C,) int64 token ids."""
    places: Tensor
    """(C,) int64: the only place of a word that occurs once; -1 for other words."""

    @classmethod
    def of(cls, agreement: Agreement) -> Candidates:
        """Return all words: frequent ones for every place, rare ones for their own."""
        rows, device = agreement.rows, agreement.simulator.device
        words = (*rows.frequent, *rows.rare)
        places = [rows.places.get(word, -1) for word in words]
        return cls(torch.tensor(words, device=device), torch.tensor(places, device=device))

    def anywhere(self, word: int) -> bool:
        """Return whether a word may stand at any place."""
        return bool((self.places[self.words == word] < 0).any())

    def at(self, place: int) -> list[int]:
        """Return the words that may stand at a place."""
        found: list[int] = self.words[self.allowed(torch.tensor([place], device=self.places.device))[0]].tolist()
        return found

    def allowed(self, places: Tensor) -> Tensor:
        """Return (H, C) bool for places (H,)."""
        return (self.places < 0) | (self.places == places[:, None])


@dataclass(frozen=True)
class Filled:
    """A draft whose holes have their most likely words."""

    draft: Draft
    agreement: float
    """Agreement that the weighted means reached."""
    choices: dict[int, tuple[int, ...]]
    """Place of a hole -> its most likely words, best first."""
    weak: tuple[int, ...] = ()
    """Places of rare words that agree much worse than the others: their sentence is probably another one."""


class Filling:
    """The weights of the words at the holes of some drafts."""

    def __init__(self, drafts: Sequence[Draft], agreement: Agreement, candidates: Candidates) -> None:
        """Begin with equal weights.

        Args:
            drafts: (N) each with at least one rare word.
            agreement: the rows to agree with.
            candidates: words for holes.
        """
        self.drafts, self.agreement, self.candidates = drafts, agreement, candidates
        self.simulator = agreement.simulator
        self.laid = self._laid()
        self.rows, self.columns = self._holes()
        places = self.laid.places[self.rows, self.columns]
        self.allowed = candidates.allowed(places)
        self.logits = torch.zeros_like(self.allowed, dtype=torch.float32).masked_fill(~self.allowed, -1e9)
        self.vectors = self.simulator.token_vectors[candidates.words]  # (C, D)
        self.numbers = agreement.row_numbers(self.laid)
        self.numbers[self.rows, self.columns] = -1

    def _laid(self) -> Laid:
        """Return the drafts with any word at their holes."""
        filler = int(self.candidates.words[0])
        return self.simulator.lay(
            [Draft({**dict.fromkeys(d.holes, filler), **d.words}, d.begin, d.end) for d in self.drafts]
        )

    def _holes(self) -> tuple[Tensor, Tensor]:
        """Return row and column (H,) of every hole in the laid drafts."""
        pairs = [(row, place) for row, draft in enumerate(self.drafts) for place in draft.holes]
        rows, columns = torch.tensor(pairs, dtype=torch.long, device=self.simulator.device).reshape(-1, 2).T
        return rows, columns

    def run(self, steps: int, choices: int = CHOICES) -> list[Filled]:
        """Move the weights and return the drafts with the best words.

        Args:
            steps: of Adam.
            choices: words to return for each hole.
        """
        reached = torch.zeros(self.numbers.shape)
        if len(self.rows):
            self.logits.requires_grad_()
            ascent = torch.optim.Adam([self.logits], lr=RATE)
            for _ in range(steps):
                reached = self._ascend(ascent)
            self.logits = self.logits.detach()
        return self._results(reached, choices)

    def _ascend(self, ascent: torch.optim.Optimizer) -> Tensor:
        with torch.enable_grad():
            ascent.zero_grad()
            shares = torch.softmax(self.logits, dim=1)
            inputs = self.simulator.inputs(self.laid).index_put(
                (self.rows, self.columns),
                shares @ self.vectors + self.simulator.place_vectors[self.laid.places[self.rows, self.columns]],
            )
            gradients = self.simulator.gradients(inputs, self.laid, differentiable=True)
            reached = self._agreements(gradients, shares)
            (self.logits.grad,) = torch.autograd.grad(-reached.sum(), self.logits)
        ascent.step()
        return reached.detach().cpu()

    def _agreements(self, gradients: Tensor, shares: Tensor) -> Tensor:  # noqa: ARG002  subclasses weigh the holes
        """Return (N, T): agreements at all places; those of holes are 0.

        Args:
            gradients: (K, N, T, D).
            shares: (H, C) of each word at each hole.
        """
        return self.agreement.of_places(gradients, self.numbers)

    def _results(self, reached: Tensor, choices: int) -> list[Filled]:
        order = self.logits.argsort(dim=1, descending=True)[:, :choices]
        likely = self.candidates.words[order].tolist()
        found: list[dict[int, tuple[int, ...]]] = [{} for _ in self.drafts]
        holes = zip(self.rows.tolist(), self.columns.tolist(), likely, self._possible(choices), strict=True)
        for row, place, words, count in holes:
            found[row][place] = tuple(words[:count])
        return [
            Filled(
                Draft({**draft.words, **{p: words[0] for p, words in at.items()}}, draft.begin, draft.end),
                float(scores.sum()),
                at,
                _weak(draft, scores),
            )
            for draft, at, scores in zip(self.drafts, found, reached, strict=True)
        ]

    def _possible(self, choices: int) -> list[int]:
        return [min(choices, count) for count in self.allowed.sum(dim=1).tolist()]


def _weak(draft: Draft, agreements: Tensor) -> tuple[int, ...]:
    """Return the places of rare words whose agreement (T,) is far below the others'."""
    places = sorted(draft.words)
    if len(places) < 3:
        return ()
    limit = WEAK * float(agreements[places].median())
    return tuple(place for place in places if float(agreements[place]) < limit)
