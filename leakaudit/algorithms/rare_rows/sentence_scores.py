"""How well sentences explain the rows of a language model's word tables.

A sentence that is simulated alone says what it adds to the rows of its tokens: the states that they follow, and the gradients at their inputs. A row of the
head is judged by `next_token_rows`; a row of a word embedding of its own has no background, so that the row of a token that occurs once agrees to
rounding if the whole sentence is right. The beginning of a sentence explains much of its rows already, because a token's own loss is the
largest part of the gradient at its input.

Letters: n sentences, T tokens, k distinct tokens of a sentence, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from leakaudit.algorithms.rare_rows.decoder_rest import Rest
from leakaudit.algorithms.rare_rows.sentence_simulations import Simulations

MISSING = 30.0
"""Evidence in nats against a target that no row shows. Our choice: nearly all true targets have a row."""

NOT_AN_INPUT = 60.0
"""Evidence in nats against an input whose row is empty. Our choice: such a token was in no sentence that is left."""

HEAD_RANGE = (-200.0, 600.0)
"""Least and most evidence of one row of the head, in nats. Our choice: several sure rows outweigh a wrong one."""

INPUT_RANGE = (-100.0, 1000.0)
"""The same for a row of the word embedding."""

NEARLY_ALL = 1e-5
"""Part of an input row's square below which it counts as explained. Our choice: it bounds the evidence."""

ROUNDING = 1e-9
"""Part of an input row's square below which a simulated sentence is the right one. Chosen on training texts: at 1e-6 three
of 63 sentences that passed were wrong, at 1e-9 none of 64."""

AGREEING = 2e-4
"""Median part of the squares of rows of one state below which a sentence is found where only rows with a background tell it. Measured on training texts
at B = 64: true sentences leave up to 1e-7, the same ones with one token more 2e-6 and more, of which the better one is taken."""


@dataclass(frozen=True)
class Scored:
    """A sentence with what its simulation says."""

    tokens: tuple[int, ...]
    evidence: float
    """Log-odds in nats of its rows: it is in the batch, or nothing is known of them."""
    state: Tensor
    """(D,) the head's input at its last token."""
    proved: bool = False
    """Whether its rows agree to rounding."""
    targets: float = 0.0
    """N, the number of targets of the batch, as the row that agrees best tells it; 0 if none does."""
    left: float = math.inf
    """Part of the squares of its rows that it does not explain; infinity if it is not found."""

    @property
    def found(self) -> bool:
        """Whether its rows agree so well that it is the whole sentence."""
        return self.left < math.inf


class SentenceScores:
    """Scores sentences against the rows that are left."""

    def __init__(self, rest: Rest, simulations: Simulations) -> None:
        """Keep the rows as they are now.

        Args:
            rest: what is left of the update.
            simulations: simulates the sentences.
        """
        self.rest, self.rows, self._simulations = rest, rest.rows(), simulations
        self._null = self.rows.likelihood(
            torch.arange(len(self.rows.tokens), device=rest.head.device), self.rows.rows, self.rows.counts
        )
        inputs = rest.inputs()
        self._inputs = inputs
        if inputs is not None:
            self._white = rest.input_map()
            self._white_inputs = inputs @ self._white
        self._number = {token: number for number, token in enumerate(self.rows.tokens.tolist())}
        self._counts: dict[int, float] = dict(zip(self.rows.tokens.tolist(), self.rows.counts.tolist(), strict=True))

    def fits(self, used: dict[int, int], tokens: Sequence[int]) -> bool:
        """Return whether the rows hold enough states for a sentence.

        Args:
            used: token -> states that other sentences take.
            tokens: the sentence.
        """
        wanted: dict[int, int] = {}
        for token in tokens[1:]:
            wanted[token] = wanted.get(token, 0) + 1
        return all(used.get(token, 0) + count <= self.count(token) for token, count in wanted.items())

    def count(self, token: int) -> float:
        """Return how many states a token's row holds; infinity if it has no row."""
        return self._counts.get(token, math.inf)

    def score(self, sentences: Sequence[tuple[int, ...]]) -> list[Scored]:
        """Simulate sentences, each alone, and compare what they add with the rows.

        Args:
            sentences: token ids, at least one each.
        """
        return [
            self._scored(tokens, *made) for tokens, made in zip(sentences, self._simulations.of(sentences), strict=True)
        ]

    def _scored(self, tokens: tuple[int, ...], states: Tensor, inputs: Tensor) -> Scored:
        words = list(dict.fromkeys(tokens))
        place = {word: number for number, word in enumerate(words)}
        own = torch.tensor([place[token] for token in tokens], device=states.device)
        numbers = torch.tensor([self._number.get(word, -1) for word in words], device=states.device)
        targets = torch.bincount(own[1:], minlength=len(words)).to(states.dtype)  # (k,)
        added = states.new_zeros(len(words), states.shape[1]).index_add_(0, own[1:], states[:-1])
        if self.rest.tables.tied:
            added.index_add_(0, own, inputs)
        gains, agreement = self._head_gains(numbers, added, targets)
        proved = False
        if self._inputs is not None:
            single = torch.tensor([self.count(word) == 1 for word in words], device=states.device) & (targets == 1)
            summed = torch.zeros_like(added).index_add_(0, own, inputs)
            which = torch.tensor(words, device=states.device)
            more, agreement = self._input_gains(which, summed, own[:-1], single)
            gains, proved = gains + more, agreement is not None
        evidence, state = float(gains.sum()), states[-1].clone()  # a view would keep all states
        if agreement is None:
            return Scored(tokens, evidence, state)
        return Scored(tokens, evidence, state, proved, agreement.targets, agreement.left)

    def _head_gains(self, numbers: Tensor, added: Tensor, targets: Tensor) -> tuple[Tensor, _Agreement | None]:
        """Return (k,) evidence of the head's rows, and how they agree if they do."""
        gains = torch.zeros_like(targets)
        gains[(numbers < 0) & (targets > 0)] = -MISSING
        told = (numbers >= 0) & ((targets > 0) | torch.tensor(self.rest.tables.tied, device=targets.device))
        if not told.any():
            return gains, None
        which, made = numbers[told], added[told] @ self.rest.map
        left, counts = self.rows.rows[which] - made, self.rows.counts[which] - targets[told]
        gain = self.rows.likelihood(which, left, counts.clamp_min(0.0)) - self._null[which]
        gains[told] = gain.clamp(*HEAD_RANGE)
        single = (self.rows.counts[which] == 1) & (targets[told] == 1)
        parts, along = _unexplained(self.rows.rows[which][single], made[single])
        if not len(parts) or float(parts.median()) >= AGREEING:
            return gains, None
        return gains, _Agreement(float(parts.median()), self.rest.targets / float(along[parts.argmin()]))

    def _input_gains(
        self, words: Tensor, summed: Tensor, before_end: Tensor, single: Tensor
    ) -> tuple[Tensor, _Agreement | None]:
        """Return (k,) evidence of the input rows, and how they agree if they do.

        Tokens that are missing at the end change the rows before it most, so the last token that occurs once decides.

        Args:
            words: (k,) distinct tokens.
            summed: (k, D) what the sentence adds to their rows.
            before_end: (T - 1,) numbers of the words that stand before the last token.
            single: (k,) which of them occur once as a target, and once in the sentence.
        """
        assert self._inputs is not None
        rows, empty = self._white_inputs[words], ~self._inputs[words].any(dim=1)
        square = rows.square().sum(dim=1).clamp_min(1e-12)
        left = (rows - summed @ self._white).square().sum(dim=1)
        gains = 0.5 * rows.shape[1] * (square.log() - left.maximum(NEARLY_ALL * square).log())
        gains = gains.clamp(*INPUT_RANGE)
        used = torch.zeros(len(words), dtype=torch.bool, device=words.device)
        used[before_end] = True  # the last token of a sentence gets no gradient
        gains = torch.where(empty, -NOT_AN_INPUT, torch.where(used, gains, 0.0))
        told = used & ~empty
        parts, along = _unexplained(self._inputs[words][told], summed[told])
        if not len(parts):
            return gains, None
        last = single[told].nonzero().flatten()[-1:]
        part = float(parts[last] if len(last) else parts.min())
        if part >= ROUNDING:
            return gains, None
        return gains, _Agreement(part, self.rest.targets / float(along[parts.argmin()]))


class _Agreement(NamedTuple):
    """How the rows of a sentence agree with what it adds to them."""

    left: float
    """Part of the squares that it does not explain."""
    targets: float
    """N, the number of targets of the batch, as the row that agrees best tells it."""


def _unexplained(rows: Tensor, made: Tensor) -> tuple[Tensor, Tensor]:
    """Return (m,) parts of the rows' squares that are not along other rows.

    The second result, (m,), says how many times as long the rows are. The length does not matter for the first, so that an error in the number of targets does not.
    """
    rows, made = rows.double(), made.double()
    along = (rows * made).sum(dim=1) / made.square().sum(dim=1).clamp_min(1e-30)
    left = (rows - along[:, None] * made).square().sum(dim=1) / rows.square().sum(dim=1).clamp_min(1e-30)
    return left, along
