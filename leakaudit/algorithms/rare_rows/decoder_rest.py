"""What is left of the head's update when found sentences are taken out.

Letters: V vocabulary, D hidden size, N targets, n prefixes, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leakaudit.algorithms.rare_rows.decoder_prefixes import PrefixStates, TypicalStates
from leakaudit.algorithms.rare_rows.next_token_rows import NextTokenRows, whitener
from leakaudit.algorithms.rare_rows.sentence_rows import SentenceRows, WordTables, rows_of
from leakaudit.client.observation import Observation

SAMPLES = 64
"""Sentences that are drawn from the client's model to learn what states look like. Our choice: 64 of 20 tokens give 1,280 states."""

SAMPLE_LENGTH = 20
"""Tokens of a drawn sentence."""

SAMPLE_TOKENS = 600
"""Tokens with the longest rows, from which sentences are drawn. Our choice: about as many as a batch of 128 sentences has."""

IN_BAG = 0.05
"""Mean square of a whitened row above which its token may be in the batch. Our choice: the row of one state has 0.1 to 5."""

BACKGROUND_ERROR = 0.3
"""Relative error of the estimated background. Measured on training texts: 0.2 to 0.4."""

STATE_NOISE = 0.02
"""Variance of a row's noise in units of a state's that is always granted. Our choice: it absorbs rounding and the error of N."""

VOTES = 200
"""Pairs of a one-token prefix and a row that vote for the number of targets. Our choice."""

SAME_VOTE = 0.03
"""Relative width of a vote. Our choice."""

EXPLAINED = 0.9998
"""Cosine between a row and its simulation above which the row tells the number of targets. Our choice: an error of 2 %."""

FEW_TARGETS = 60
"""Found targets below which drawn sentences say better what states look like. Our choice."""


class Rest:
    """The head's update, the sentences taken out of it, and what states look like."""

    def __init__(self, seen: Observation, tables: WordTables, rng: torch.Generator) -> None:
        """Draw sentences from the client's model, and estimate the number of targets.

        Args:
            seen: `decoder_applies` to it.
            tables: the model's tables.
            rng: draws the sentences.
        """
        self.seen, self.tables = seen, tables
        self.states = PrefixStates(seen.model)
        self.head = seen.model.get_parameter(tables.head).detach().float()  # (V, D)
        self._update = seen.update[tables.head].float()
        self.taken = rows_of(seen, [], tables)
        samples = self._drawn(rng)
        self.typical = TypicalStates(seen.model, samples)
        self._learn(rows_of(seen, samples.tolist(), tables))
        self.targets = self._voted_targets()

    def starts(self) -> Tensor:
        """Return (n, T) the beginnings that sentences may have."""
        words = self.seen.update.get(self.tables.words)
        if words is None:
            tokens = torch.arange(len(self.head), device=self.head.device)
        elif self.tables.tied:
            tokens = self._update.norm(dim=1).topk(min(len(self.head), 4 * SAMPLE_TOKENS)).indices
        else:
            tokens = words.any(dim=1).nonzero().flatten()
        return torch.cat([self._before(len(tokens)), tokens[:, None]], dim=1)

    def take(self, sentences: list[tuple[int, ...]]) -> None:
        """Take out these sentences and no others, and learn from them."""
        self.taken = rows_of(self.seen, sentences, self.tables)
        if self.taken.targets >= FEW_TARGETS:
            self._learn(self.taken)
        self._refine_targets()

    def rows(self) -> NextTokenRows:
        """Return the rows that are left."""
        remaining = max(0.0, self.targets - self.taken.targets)
        background = remaining * self._background
        left = background - self.targets * self._update - self.taken.head
        white = left @ self._white  # (V, D)
        square = white.square().mean(dim=1)
        tokens = (square > IN_BAG).nonzero().flatten()
        counts = left[tokens] @ self._mass
        noise = STATE_NOISE * self._size + (BACKGROUND_ERROR * background[tokens] @ self._white).square().mean(dim=1)
        if self.tables.tied:  # the gradients at the inputs have no known size
            noise = torch.maximum(noise, square[tokens] - counts.clamp_min(0.0) * self._size)
        return NextTokenRows(tokens, self._white, white[tokens], counts, noise, self._size, self.head[tokens])

    def agreement(self) -> Tensor:
        """Return (V,) the relative error with which the taken sentences explain rows.

        It is infinite for the rows of tokens without a taken sentence.
        """
        remaining = max(0.0, self.targets - self.taken.targets)
        size = self.taken.head.norm(dim=1)
        error = (remaining * self._background - self.targets * self._update - self.taken.head).norm(dim=1)
        return torch.where(size > 0, error / size, torch.inf)

    def _before(self, count: int) -> Tensor:
        before = torch.tensor(self.seen.facts.vocabulary.starts_with, dtype=torch.long, device=self.head.device)
        return before.expand(count, -1)

    def _drawn(self, rng: torch.Generator) -> Tensor:
        """Return (SAMPLES, T) token ids, half from the model, half by the rows' lengths."""
        norms = self._update.norm(dim=1)
        tokens = norms.topk(min(len(norms), SAMPLE_TOKENS)).indices
        share = norms[tokens] / norms[tokens].sum()

        def draw(weights: Tensor) -> Tensor:
            return tokens[torch.multinomial(weights.cpu(), 1, generator=rng).flatten().to(tokens.device)]

        given = self.states.start(torch.cat([self._before(SAMPLES), draw(share.expand(SAMPLES, -1))[:, None]], dim=1))
        every = torch.arange(SAMPLES, device=self.head.device)
        for _ in range(SAMPLE_LENGTH - 1):
            own = (given @ self.head[tokens].T).softmax(dim=1)
            given = self.states.extend(every, draw(0.5 * own + 0.5 * share))
        return self.states.paths

    def _learn(self, known: SentenceRows) -> None:
        """Learn from sentences what states, input gradients and background look like."""
        moment = known.states.T @ known.states / known.targets
        if self.tables.tied:
            slopes = torch.cat([rows[:-1] for rows in known.inputs])
            moment = moment + slopes.T @ slopes / len(slopes)
        self._white = whitener(moment)
        exact = moment.double()
        ridge = 1e-7 * exact.diagonal().mean() * torch.eye(len(exact), device=exact.device, dtype=exact.dtype)
        self._mass = torch.linalg.solve(exact + ridge, known.states.mean(dim=0).double()).float()
        self._size = float((known.states @ self._white).square().mean())
        self._background = known.background / known.targets

    def _voted_targets(self) -> float:
        """Return N, by the rows that look like one state of a one-token prefix.

        If a row is the state x, the update is x / N plus its background.
        """
        mean = (self._background - self._update) @ self._white  # (V, D)
        rows = mean[mean.square().sum(dim=1).topk(min(len(mean), 4 * SAMPLE_TOKENS)).indices]
        x = self.states.alone(self.starts()) @ self._white
        dot = x @ rows.T
        cosine = dot / x.norm(dim=1, keepdim=True) / rows.norm(dim=1)
        best = cosine.flatten().topk(min(VOTES, cosine.numel()))
        votes = (x.square().sum(dim=1, keepdim=True) / dot).flatten()[best.indices].clamp_min(1.0).log()
        weights = -(1 - best.values.clamp(0.0, 0.999).square()).log()
        near = (-0.5 * ((votes[:, None] - votes[None]) / SAME_VOTE).square()).exp() * weights  # (votes, votes)
        chosen = near[int(near.sum(dim=1).argmax())]
        return float(((chosen * votes).sum() / chosen.sum()).exp())

    def _refine_targets(self) -> None:
        """Read N from the rows that the taken sentences explain."""
        made, sent = self.taken.head, -self._update
        dot = (made * sent).sum(dim=1)
        cosine = dot / (made.norm(dim=1) * sent.norm(dim=1)).clamp_min(1e-30)
        good = cosine > EXPLAINED
        if int(good.sum()) >= 3:
            self.targets = float((dot[good] / sent[good].square().sum(dim=1)).median())
