"""What is left of the word tables' update when found sentences are taken out.

Letters: V vocabulary, D hidden size, N targets, M rows, n prefixes, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leakaudit.algorithms.bag.target_counts import constant_direction
from leakaudit.algorithms.rare_rows.decoder_background import fitted_background
from leakaudit.algorithms.rare_rows.decoder_prefixes import PrefixStates
from leakaudit.algorithms.rare_rows.next_token_rows import NextTokenRows, coordinates
from leakaudit.algorithms.rare_rows.sentence_rows import SentenceRows, WordTables, rows_of
from leakaudit.algorithms.rare_rows.update_pull import UpdatePull
from leakaudit.client.observation import Observation

SAMPLES = 256
"""Sentences that are drawn from the client's model to learn what states look like. Chosen on training texts: with 64, one true token in ten has
another before it where tables are tied, with 256 one in twenty."""

SAMPLE_LENGTH = 20
"""Tokens of a drawn sentence."""

SAMPLE_TOKENS = 600
"""Tokens with the longest rows, from which sentences are drawn. Our choice: about as many as a batch of 128 sentences has."""

PART = 0.35
"""Least number of states in a row whose token may be a target. Chosen on training texts: rows of one state are counted to 0.1."""

FEW_ROWS = 20.0
"""How many rows what drawn sentences tell counts for, beside the batch's own rows. Our choice."""

TIED_SIZE = 3.0
"""Variance of the gradients at inputs, in units of their median, for the mean state of tied tables. Our choice: a few are much longer than
the others."""

UNLIKE = 0.05
"""Mean square of a whitened row above which its token may be in the batch where tables are tied. Our choice: the row of one state has
0.1 to 5."""

BACKGROUND_STATES, BACKGROUND_STARTS = 1200, 800
"""States of drawn sentences, and of beginnings of one token, whose sums make the background. Chosen on training texts: without beginnings, a sixth of an absent row's
square is left, with them a seventieth."""

STATE_NOISE = 0.003
"""Variance of a row's noise in units of a state's that is always granted. Our choice: it absorbs rounding and the error of N."""

VOTES = 200
"""Pairs of a one-token prefix and a row that vote for the number of targets. Our choice."""

FIRST_VOTE = 0.1
"""Relative error of the number of targets at which most rows hold one state. Our choice."""

ANY_VOTE = 0.05
"""Weight of a vote far from it, in units of a near one. Our choice: many exact votes of untied tables outweigh it."""

STANDS_OUT = 5.0
"""How many times the median a row's length must be, so that it votes for the number of targets. Our choice: most tokens are not in the batch."""

SHORTEST = 0.005
"""Part of the longest row's length that such a row must have. Our choice: the most frequent token of 128 sentences follows less than 200 prefixes."""

SAME_VOTE = 0.03
"""Relative width of a vote. Our choice."""

TARGETS_ERROR = 0.003
"""Relative error of the number of targets that is granted. Our choice: one in 300."""

INPUT_RIDGE = 1e-4
"""Part of the mean eigenvalue that is added before gradients at inputs are whitened. Our choice."""

GONE = 1e-4
"""Part of an input row's length below which nothing is left of it. Our choice: rounding leaves 1e-6."""


class Rest:
    """The tables' update, the sentences taken out of it, and what states look like."""

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
        words = None if tables.tied else seen.update.get(tables.words)
        self._words = None if words is None else words.float()
        self._taken_tokens: list[tuple[int, ...]] = []
        self.taken = rows_of(seen, [], tables)
        self._sample = rows_of(seen, self._drawn(rng, *self._long_rows()).tolist(), tables)
        self._first_states = self.states.alone(self._likely_starts()[:BACKGROUND_STARTS])
        self._counting = None if tables.tied else constant_direction(seen.model, self._sample.states.double())
        self.targets = 1.0  # until the votes, rows are means over targets
        self._learn()
        self.targets = self._voted_targets()
        self._background *= self.targets
        rows = self.rows()  # now that the tokens of the batch are known, sentences are drawn from them
        share = rows.counts / rows.counts.sum()
        if len(share):
            self._sample = rows_of(seen, self._drawn(rng, rows.tokens, share).tolist(), tables)
            self._learn()
        self.pull = UpdatePull(seen, self.states.paths)
        self.pull.learn(self.targets, [])

    def starts(self) -> list[tuple[int, ...]]:
        """Return the beginnings that sentences may have.

        A beginning is what stands before every text, and one token.
        """
        before = self.seen.facts.vocabulary.starts_with
        return [(*before, token) for token in self._first_tokens().tolist()]

    def take(self, sentences: list[tuple[int, ...]], targets: float) -> None:
        """Take out these sentences and no others, and learn from them.

        Args:
            sentences: token ids.
            targets: N, as the rows of these sentences tell it.
        """
        self.targets = targets
        self.taken, self._taken_tokens = rows_of(self.seen, sentences, self.tables), list(sentences)
        self._learn()
        self.pull.learn(targets, sentences)

    def left_targets(self) -> float:
        """Return how many targets the sentences have that were not taken out."""
        return self.targets - self.taken.targets

    def rows(self) -> NextTokenRows:
        """Return the head's rows that are left."""
        left = self._left()
        counts = self._counted(left)
        chosen = counts > PART
        if self.tables.tied:
            chosen |= (left @ self._both).square().mean(dim=1) > UNLIKE
        tokens = chosen.nonzero().flatten()
        noise = STATE_NOISE + self._error * (self._background[tokens] @ self.map).square().mean(dim=1)
        noise = noise + (TARGETS_ERROR * self.taken.head[tokens] @ self.map).square().mean(dim=1)
        slopes = self._slopes if self.tables.tied else torch.zeros_like(self._slopes)
        rows, counted = left[tokens] @ self.map, counts[tokens].round().clamp_min(1.0)
        mean, spread = self._moments(rows, counted)
        return NextTokenRows(
            tokens,
            rows,
            counted,
            mean,
            spread,
            noise,
            slopes,
            self.head[tokens],
        )

    def inputs(self) -> Tensor | None:
        """Return (V, D) what is left of the word embedding's own rows, times -N.

        None if it has no rows of its own, or does not share them.
        """
        if self._words is None:
            return None
        left = -self.targets * self._words
        for tokens, rows in zip(self._taken_tokens, self.taken.inputs, strict=True):
            left.index_add_(0, torch.tensor(tokens, device=left.device), -rows)
        gone = left.norm(dim=1) <= GONE * self.targets * self._words.norm(dim=1)
        return left.masked_fill(gone[:, None], 0.0)

    def input_map(self) -> Tensor:
        """Return (D, D) the map that makes gradients at inputs alike everywhere.

        Their second moment is the unit matrix in these coordinates, up to a ridge.
        """
        slopes = _usual_slopes(self._sample, self.taken).double()
        values, vectors = torch.linalg.eigh(slopes.T @ slopes / len(slopes))
        alike: Tensor = (vectors / (values.clamp_min(0.0) + INPUT_RIDGE * values.mean()).sqrt()).float()
        return alike

    def agreement(self) -> Tensor:
        """Return (V,) the relative error with which the taken sentences explain rows.

        It is infinite for the rows of tokens without a taken sentence.
        """
        size = self.taken.head.norm(dim=1)
        return torch.where(size > 0, self._left().norm(dim=1) / size, torch.inf)

    def _moments(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return (D,) the mean and (D,) the variances of the batch's own states.

        The rows of tied tables hold more than states, so they tell the mean alone.

        Args:
            rows: (M, D) what is left of rows, in `coordinates`.
            counts: (M,) states in each.
        """
        drawn = self._mean @ self.map
        known = 1 / (1 + TIED_SIZE * self._slopes) if self.tables.tied else torch.ones_like(drawn)
        mean = (rows.sum(dim=0) * known + FEW_ROWS * drawn) / (counts.sum() * known + FEW_ROWS)
        if self.tables.tied:
            return mean, torch.ones_like(mean)
        square = (rows - counts[:, None] * mean).square() / counts[:, None]
        return mean, (square.sum(dim=0) + FEW_ROWS) / (len(rows) + FEW_ROWS)

    def _left(self) -> Tensor:
        """Return (V, D) what is left of the head's rows, without the background."""
        return self._background - self.targets * self._update - self.taken.head

    def _first_tokens(self) -> Tensor:
        if (inputs := self.inputs()) is not None:
            return inputs.any(dim=1).nonzero().flatten()
        if self.tables.tied:
            return self.rows().tokens
        return torch.arange(len(self.head), device=self.head.device)

    def _counted(self, left: Tensor) -> Tensor:
        """Return (V,) how many states rows hold, estimated."""
        direction = self._mass if self._counting is None else self._counting.to(left)
        return left @ direction

    def _long_rows(self) -> tuple[Tensor, Tensor]:
        """Return (m,) tokens with the longest rows, and (m,) their shares."""
        norms = self._update.norm(dim=1)
        tokens: Tensor = norms.topk(min(len(norms), SAMPLE_TOKENS)).indices
        return tokens, norms[tokens] / norms[tokens].sum()

    def _drawn(self, rng: torch.Generator, tokens: Tensor, share: Tensor) -> Tensor:
        """Return (SAMPLES, T) token ids, half from the model, half by shares.

        Args:
            rng: draws them.
            tokens: (m,) token ids.
            share: (m,) their shares in the batch.
        """

        def draw(weights: Tensor) -> Tensor:
            return tokens[torch.multinomial(weights.cpu(), 1, generator=rng).flatten().to(tokens.device)]

        before = torch.tensor(self.seen.facts.vocabulary.starts_with, dtype=torch.long, device=self.head.device)
        first = torch.cat([before.expand(SAMPLES, -1), draw(share.expand(SAMPLES, -1))[:, None]], dim=1)
        given = self.states.start(first)
        every = torch.arange(SAMPLES, device=self.head.device)
        for _ in range(SAMPLE_LENGTH - 1):
            own = (given @ self.head[tokens].T).softmax(dim=1)
            given = self.states.extend(every, draw(0.5 * own + 0.5 * share))
        return self.states.paths

    def _learn(self) -> None:
        """Learn what states, gradients at inputs and the background look like.

        Drawn sentences tell it, and taken ones the more, the more of them there are.
        """
        drawn = self._sample.states
        states, slopes = torch.cat([drawn, self.taken.states]), _usual_slopes(self._sample, self.taken)
        self._mean = states.mean(dim=0)
        off = states - self._mean
        moment = off.T @ off / len(states) + torch.outer(self._mean, self._mean)
        self.map, self._slopes = coordinates(moment, slopes.T @ slopes / len(slopes))
        self._both = self.map / (1 + self._slopes).sqrt() if self.tables.tied else self.map
        known = torch.cat([drawn[:: max(1, len(drawn) // BACKGROUND_STATES)], self._first_states])
        self._background, self._error = fitted_background(
            self.targets * self._update + self.taken.head, known, self.states.head, self.map
        )
        self._mass = _mass(states, slopes if self.tables.tied else slopes[:0])

    def _voted_targets(self) -> float:
        """Return N, by the rows that look like one state of a one-token prefix.

        If a row is the state x, the update is x / N plus its background. Votes far from what most rows count weigh little.
        """
        first = self._targets_of_single_rows().log()
        rows = (self._background - self._update)[self._standing_out(4 * SAMPLE_TOKENS)] @ self._both
        x = self._first_states @ self._both
        dot = x @ rows.T
        cosine = dot / x.norm(dim=1, keepdim=True) / rows.norm(dim=1)
        best = cosine.flatten().topk(min(VOTES, cosine.numel()))
        votes = (x.square().sum(dim=1, keepdim=True) / dot).flatten()[best.indices].clamp_min(1.0).log()
        weights = -(1 - best.values.clamp(0.0, 0.999).square()).log()
        weights = weights * (ANY_VOTE + (-0.5 * ((votes - first) / FIRST_VOTE).square()).exp())
        near = (-0.5 * ((votes[:, None] - votes[None]) / SAME_VOTE).square()).exp() * weights  # (votes, votes)
        chosen = near[int(near.sum(dim=1).argmax())]
        return float(((chosen * votes).sum() / chosen.sum()).exp())

    def _likely_starts(self) -> Tensor:
        """Return (n, T) beginnings with tokens whose rows are not zero, or long."""
        rows = self._update if self._words is None else self._words
        count = min(4 * SAMPLE_TOKENS, int(rows.any(dim=1).sum()))
        tokens = rows.norm(dim=1).topk(count).indices
        before = torch.tensor(self.seen.facts.vocabulary.starts_with, dtype=torch.long, device=self.head.device)
        return torch.cat([before.expand(len(tokens), -1), tokens[:, None]], dim=1)

    def _standing_out(self, most: int) -> Tensor:
        """Return (m,) tokens whose rows are long without the background.

        Args:
            most: most tokens to return.
        """
        lengths = (self._background - self._update).norm(dim=1)
        longest: Tensor = lengths.topk(min(len(lengths), most)).indices
        least = torch.maximum(STANDS_OUT * lengths.median(), SHORTEST * lengths.max())
        present = longest[lengths[longest] > least]
        return present if len(present) else longest

    def _targets_of_single_rows(self) -> Tensor:
        """Return N (scalar) at which most of the longest rows hold one state."""
        rows = (self._background - self._update)[self._standing_out(SAMPLE_TOKENS)]
        counted = self._counted(rows)  # count / N
        votes = -counted[counted > 0].log()
        near = (-0.5 * ((votes[:, None] - votes[None]) / SAME_VOTE).square()).exp().sum(dim=1)
        most: Tensor = votes[near.argmax()].exp()
        return most


def _usual_slopes(*known: SentenceRows) -> Tensor:
    """Return (n, D) gradients at inputs, all with the median length.

    A few are many times as long as the others.
    """
    slopes = torch.cat([rows[:-1] for one in known for rows in one.inputs])
    lengths = slopes.norm(dim=1, keepdim=True).clamp_min(1e-30)
    usual: Tensor = slopes / lengths * lengths.median()
    return usual


def _mass(states: Tensor, slopes: Tensor) -> Tensor:
    """Return (D,) the direction that counts states.

    Its product with states is nearest to 1, and with gradients at inputs to 0.
    """
    moment = (states.T @ states / len(states)).double()
    if len(slopes):
        moment = moment + (slopes.T @ slopes / len(slopes)).double()
    ridge = 1e-7 * moment.diagonal().mean() * torch.eye(len(moment), device=moment.device, dtype=moment.dtype)
    direction: Tensor = torch.linalg.solve(moment + ridge, states.mean(dim=0).double()).float()
    return direction
