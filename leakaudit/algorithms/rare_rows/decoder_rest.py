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

FIRST_VOTE = 0.1
"""Relative error of the number of targets at which most rows hold one state. Our choice."""

ANY_VOTE = 0.05
"""Weight of a vote far from it, in units of a near one. Our choice: many exact votes of untied tables outweigh it."""

SAME_VOTE = 0.03
"""Relative width of a vote. Our choice."""

EXPLAINED = 0.9998
"""Cosine between rows and their simulation above which they tell the number of targets. Our choice: an error of 2 % of a row."""

MOST_EXPLAINED = 9
"""Best explained rows whose median tells the number of targets. Our choice: rare tokens, whose rows have hardly any background."""

TARGETS_ERROR = 0.003
"""Relative error of the number of targets that is granted. Our choice: one in 300."""


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
        self._tokens_taken = torch.zeros(0, dtype=torch.long)
        samples = self._drawn(rng)
        self.typical = TypicalStates(seen.model, samples)
        self._sample = rows_of(seen, samples.tolist(), tables)
        self._learn()
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
        self._tokens_taken = torch.tensor(sorted({t for one in sentences for t in one}), dtype=torch.long)
        self._learn()
        self._refine_targets()

    def rows(self) -> NextTokenRows:
        """Return the rows that are left."""
        remaining = max(0.0, self.targets - self.taken.targets)
        background = remaining * self._background
        left = background - self.targets * self._update - self.taken.head
        white = left @ self._white  # (V, D)
        square = white.square().mean(dim=1)
        in_bag = square > IN_BAG
        in_bag[self._tokens_taken] = True
        tokens = in_bag.nonzero().flatten()
        counts = left[tokens] @ self._mass
        noise = STATE_NOISE * self._size + (BACKGROUND_ERROR * background[tokens] @ self._white).square().mean(dim=1)
        noise += (TARGETS_ERROR * self.taken.head[tokens] @ self._white).square().mean(dim=1)
        if self.tables.tied:  # the gradients at the inputs have no known size
            noise = torch.maximum(noise, square[tokens] - counts.clamp_min(0.0) * self._size)
        return NextTokenRows(tokens, self._white, white[tokens], counts, noise, self._size, self.head[tokens])

    def unexplained(self) -> float:
        """Return the square of what taken sentences leave of the rows, times N."""
        return float((self.targets * self._update + self.taken.head).square().sum())

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
        tokens: Tensor = norms.topk(min(len(norms), SAMPLE_TOKENS)).indices
        share = norms[tokens] / norms[tokens].sum()

        def draw(weights: Tensor) -> Tensor:
            return tokens[torch.multinomial(weights.cpu(), 1, generator=rng).flatten().to(tokens.device)]

        given = self.states.start(torch.cat([self._before(SAMPLES), draw(share.expand(SAMPLES, -1))[:, None]], dim=1))
        every = torch.arange(SAMPLES, device=self.head.device)
        for _ in range(SAMPLE_LENGTH - 1):
            own = (given @ self.head[tokens].T).softmax(dim=1)
            given = self.states.extend(every, draw(0.5 * own + 0.5 * share))
        return self.states.paths

    def _learn(self) -> None:
        """Learn from drawn and taken sentences what states and input gradients look like.

        Taken sentences count the more, the more states there are for each of the D directions.
        """
        drawn, taken = self._sample, self.taken
        part = taken.targets / (taken.targets + drawn.states.shape[1])
        moment = (1 - part) * _moment(drawn, self.tables.tied)
        mean = (1 - part) * drawn.states.mean(dim=0)
        background = (1 - part) * drawn.background / drawn.targets
        if taken.targets:
            moment = moment + part * _moment(taken, self.tables.tied)
            mean = mean + part * taken.states.mean(dim=0)
            background = background + part * taken.background / taken.targets
        self._white, self._background = whitener(moment), background
        exact = moment.double()
        ridge = 1e-7 * exact.diagonal().mean() * torch.eye(len(exact), device=exact.device, dtype=exact.dtype)
        self._mass = torch.linalg.solve(exact + ridge, mean.double()).float()
        self._size = float((torch.cat([drawn.states, taken.states]) @ self._white).square().mean())

    def _voted_targets(self) -> float:
        """Return N, by the rows that look like one state of a one-token prefix.

        If a row is the state x, the update is x / N plus its background. Votes far from what most rows count weigh little.
        """
        first = self._targets_of_single_rows().log()
        mean = (self._background - self._update) @ self._white  # (V, D)
        rows = mean[mean.square().sum(dim=1).topk(min(len(mean), 4 * SAMPLE_TOKENS)).indices]
        x = self.states.alone(self.starts()) @ self._white
        dot = x @ rows.T
        cosine = dot / x.norm(dim=1, keepdim=True) / rows.norm(dim=1)
        best = cosine.flatten().topk(min(VOTES, cosine.numel()))
        votes = (x.square().sum(dim=1, keepdim=True) / dot).flatten()[best.indices].clamp_min(1.0).log()
        weights = -(1 - best.values.clamp(0.0, 0.999).square()).log()
        weights = weights * (ANY_VOTE + (-0.5 * ((votes - first) / FIRST_VOTE).square()).exp())
        near = (-0.5 * ((votes[:, None] - votes[None]) / SAME_VOTE).square()).exp() * weights  # (votes, votes)
        chosen = near[int(near.sum(dim=1).argmax())]
        return float(((chosen * votes).sum() / chosen.sum()).exp())

    def _targets_of_single_rows(self) -> Tensor:
        """Return N (scalar) at which most of the longest rows hold one state."""
        rows = self._background - self._update
        longest = rows.norm(dim=1).topk(min(len(rows), SAMPLE_TOKENS)).indices
        counted = rows[longest] @ self._mass  # count / N
        votes = -counted[counted > 0].log()
        near = (-0.5 * ((votes[:, None] - votes[None]) / SAME_VOTE).square()).exp().sum(dim=1)
        return votes[near.argmax()].exp()

    def _refine_targets(self) -> None:
        """Read N from the rows that the taken sentences explain."""
        made, sent = self.taken.head, -self._update
        dot = (made * sent).sum(dim=1)
        cosine = dot / (made.norm(dim=1) * sent.norm(dim=1)).clamp_min(1e-30)
        best = cosine.topk(min(MOST_EXPLAINED, len(cosine)))
        if float(best.values.median()) > EXPLAINED:
            chosen = best.indices
            self.targets = float((dot[chosen] / sent[chosen].square().sum(dim=1)).median())


def _moment(known: SentenceRows, tied: bool) -> Tensor:
    """Return the second moment (D, D) of states, and of input gradients if tied."""
    moment = known.states.T @ known.states / known.targets
    if tied:
        slopes = torch.cat([rows[:-1] for rows in known.inputs])
        norms = slopes.norm(dim=1, keepdim=True).clamp_min(1e-30)
        usual = slopes / norms * norms.median()  # a few slopes are many times as long as the others
        moment = moment + usual.T @ usual / len(usual)
    return moment
