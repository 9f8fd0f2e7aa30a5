"""A damaged update (noise, rounding, pruning, signs): no pair lies in the span, so pairs are ranked and sentences simulated.

1. Every token at every position gets a score against the span, its directions weighted by how much of each is signal
   (`span_basis.soft_span_of`, `span_ranking`).
2. Lengths are tried: a sentence ends with what the tokenizer puts there, and that input must lie in the span at its position.
3. The best sentence of each length is simulated and improved word by word against the whole update (`span_refine`).

Nothing is thresholded and nothing is proved; the confidence says how much of the signal the sentence explains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist

import torch
from torch import Tensor

from leakaudit.algorithms.embedding_rows import can_read_rows
from leakaudit.algorithms.span.hypothesis_search import (
    Hypothesis,
    Layer,
    SearchResult,
    Simulation,
    can_simulate,
    changed,
    local_search,
)
from leakaudit.algorithms.span.problem import SpanProblem
from leakaudit.algorithms.span.reachability import PairReach, ranked_reach
from leakaudit.algorithms.span.soft_ranking import Ranking
from leakaudit.algorithms.span.sparse_regression import Joint, JointFit
from leakaudit.algorithms.span.subspace import PRUNED_SHARE, SoftSpan, soft_span_of
from leakaudit.plugins.attack_protocol import GuessedSequence, Reconstruction

LONGEST = 128
"""Positions that are looked at. Our choice: a longer sentence has more words than could be climbed in time."""

SPARE_POSITIONS = 4
"""Positions beyond the longest likely length, so that a sentence can still grow."""

POSITIONS_PER_DIRECTION = 3
"""Positions looked at for every direction that stands out of the noise. Our choice: every token fills one, most are visible."""

LADDER = 1.5
"""Step between lengths that are tried where no token marks the end. Our choice."""

RESHAPED = 3
"""By how many tokens one move may lengthen or shorten a sentence. Our choice."""

UNEXPLAINED = 0.004
"""Share of the first block's signal that a complete sentence may leave unexplained, beside what chance does to the estimate.
Measured on a train split: one wrong word leaves 0.02 at the very least, 0.1 to 0.6 mostly."""

MOST_EVIDENCE = 10.0
"""Deviations that a row of the word embedding can count at most: beyond, it is there."""

MOST_CONFIDENT = 0.99
"""Confidence of a damaged sentence that explains everything; 1 is for proofs."""

MOST_MARGIN = 1e6
"""Cap of the reported margin: without noise it has no unit."""

LEAST_SIGNAL = 1e-3
"""Least share of an update that counts as signal. Our choice: below, the estimate of what noise adds is as large."""

LENGTHS = 5
"""Lengths that are climbed from. Measured on a train split: at a tenth of the signal the true one is among the first two, at
three tenths among the first ten."""

MOST_SIMULATED = 400
"""Hypotheses that one climb may simulate, so that hopeless updates end. Our choice: about four seconds for twelve tokens on one core
with a six-layer encoder; where a climb succeeds it needs 10 to 200."""

SOLVE_SHARE = 0.2
"""Share of the time left that the joint regression of one length may take. Our choice: three lengths are solved, then climbed."""

STARTS = 2
"""Sentences of the joint regression that are climbed from. Measured on a train split: the true length or the next one leads."""

POOL = 128
"""Words a position that the joint regression chooses from. Measured on a train split: at a tenth of the signal the true one is
among the first 32 for 71 of 73, and always among 128."""

WIDTHS = (6, 16, 64)
"""Tokens a position that are tried from each of the two rankings, one after the other where nothing improves. Measured on a
train split: the true token is among the first 32 for 71 of 73 at a tenth of the signal."""

MOST_CLASSES = 16
"""Classes that are told apart by simulation. Our choice: beyond, the output layer's bias has to do."""

CLEAR = 100.0
"""Standard deviations that the first block alone should promise to climb on it. Its gradients depend most on single words (cosine
with one wrong word 0.6 to 0.9, with all wrong 0.2; over all layers 0.8 to 0.99 and 0.6; measured on a train split)."""


def read_damaged(problem: SpanProblem) -> Reconstruction:
    """Return the best sentence found, with a confidence."""
    sigma = problem.seen.noise_sigma or None
    reader = _Reader(problem, soft_span_of(problem.seen.update, problem.anatomy, sigma), sigma)
    return reader.read()


@dataclass(frozen=True)
class _Ranked:
    """The pairs that were ranked, for the question what could have been recovered."""

    tokens: Tensor
    positions: Tensor


@dataclass
class _Reader:
    """The stages over one scene."""

    problem: SpanProblem
    span: SoftSpan
    sigma: float | None

    def read(self) -> Reconstruction:
        """Run all stages, the best so far where the budget ends."""
        if not len(self.span.weights):
            return Reconstruction(sequences=(), diagnostics={"positions": 0.0})
        budget = self.problem.budget
        simulates = can_simulate(self.problem.seen) and not budget.exhausted()
        starts = self._starts()
        if not simulates or not self._compared:
            guess = GuessedSequence(starts[0].token_ids, confidence=0.0)
            return Reconstruction((guess,), diagnostics={"positions": float(len(guess.token_ids))}, reach=self._reach())
        best = self._best_of(starts)
        final = self._search(best.best, WIDTHS, lambda base: [*self._reshaped(base), *self._jumps(base)])
        explained = self._explained(final.best)
        margin = self._margin(final)
        facts = {
            "positions": float(len(final.best.token_ids)),
            "directions": float(len(self.span.weights)),
            "simulated": float(best.simulated + final.simulated),
            "explained": explained,
            "margin": margin,
        }
        sure = NormalDist().cdf(margin) * 2 - 1
        guess = GuessedSequence(final.best.token_ids, confidence=MOST_CONFIDENT * explained * sure)
        return Reconstruction((guess,), diagnostics=facts, reach=self._reach())

    def _best_of(self, starts: Sequence[Hypothesis]) -> SearchResult:
        """Climb a little from every start and return the highest."""
        best, simulated = None, 0
        for start in starts:
            found = self._search(start, WIDTHS[:1], self._jumps)
            simulated += found.simulated
            if best is None or found.score > best.score:
                best = found
            if self.problem.budget.exhausted() or self._is_explained(best.best):
                break
        assert best is not None
        best.simulated = simulated
        return best

    def _search(
        self, start: Hypothesis, widths: Sequence[int], moves: Callable[[Hypothesis], list[Hypothesis]]
    ) -> SearchResult:
        return local_search(
            self._simulation,
            start,
            moves=moves,
            propose=self._propose,
            widths=widths,
            done=self._is_explained,
            most=MOST_SIMULATED,
            budget=self.problem.budget,
            layers=self._compared,
        )

    def _is_explained(self, found: Hypothesis) -> bool:
        power, noise = self._energy(self._first_block)
        entries = sum(self.problem.seen.update[layer.weight].numel() for layer in self._first_block)
        # |noise|^2 deviates by sqrt(2 / entries) of itself
        chance = noise * (2 / entries) ** 0.5 / max(power - noise, LEAST_SIGNAL * power)
        return bool(self._explained(found) >= 1.0 - UNEXPLAINED - 3 * chance)

    @cached_property
    def _simulation(self) -> Simulation:
        return Simulation(self.problem.seen)

    @cached_property
    def _first_block(self) -> tuple[Layer, ...]:
        """Linear layers from the first block's projections to the second one's."""
        layers = self._simulation.layers
        names = {p.weight for p in self.problem.anatomy.projections}
        start = next((i for i, layer in enumerate(layers) if layer.weight in names), 0)
        kind = layers[start].weight.rsplit(".", 2)[-2:] if layers else []
        end = next(
            (i for i in range(start + 1, len(layers)) if layers[i].weight.rsplit(".", 2)[-2:] == kind), len(layers)
        )
        return layers[start:end]

    @cached_property
    def _compared(self) -> tuple[Layer, ...]:
        """Layers to climb on: the first block while its signal is clear, else all."""
        first = self._first_block
        if self.sigma is None:
            return first
        power, noise = self._energy(first)
        return first if (max(0.0, power - noise) ** 0.5) > CLEAR * self.sigma else self._simulation.layers

    def _energy(self, layers: Sequence[Layer]) -> tuple[float, float]:
        """Return |G|^2 over these layers, and what the noise is expected to add to it."""
        update = self.problem.seen.update
        power = sum(float(update[layer.weight].double().square().sum()) for layer in layers)
        entries = sum(update[layer.weight].numel() for layer in layers)
        if self.sigma is not None:
            return power, entries * self.sigma**2
        noise = sum(
            update[layer.weight].numel() * self.span.sigma[layer.weight] ** 2
            for layer in layers
            if layer.weight in self.span.sigma
        )
        return power, noise

    @cached_property
    def _frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        vocabulary = self.problem.seen.facts.vocabulary
        return vocabulary.starts_with, vocabulary.ends_with

    @cached_property
    def _positions(self) -> int:
        """Positions that a sentence may have: as far as the likely lengths go, and a little more."""
        return min(self.problem.stage.max_length, max(self._likely_lengths) + SPARE_POSITIONS)

    @cached_property
    def _likely_lengths(self) -> tuple[int, ...]:
        """Lengths at which what ends a text lies nearest to the span, best first; a ladder where nothing ends one."""
        before, after = self._frame
        stage = self.problem.stage
        shortest = len(before) + len(after) + 1
        longest = min(stage.max_length, LONGEST, POSITIONS_PER_DIRECTION * len(self.span.weights) + SPARE_POSITIONS + 4)
        longest = max(longest, shortest)
        if not after:
            return tuple(sorted({min(longest, shortest + round(LADDER**i)) for i in range(1, 2 * LENGTHS)}))
        lengths = torch.arange(shortest, longest + 1, device=stage.device)
        share = torch.zeros(len(lengths), dtype=torch.float64, device=stage.device)
        rows = self.span.weights.sqrt()[:, None] * self.span.vectors
        for back, token in enumerate(reversed(after)):
            x = stage.inputs(torch.full_like(lengths, token), lengths - 1 - back)
            share += (x @ rows.T).square().sum(1) / x.square().sum(1).clamp_min(1e-300)
        return tuple(lengths[share.argsort(descending=True)[:LENGTHS]].tolist())

    @cached_property
    def _ranking(self) -> Ranking:
        return Ranking.of(self.problem.stage, self.span.vectors, self.span.weights, self._positions)

    @cached_property
    def _soft(self) -> Tensor:
        """(V, P) scores, with what the word embedding's rows say, and no special tokens."""
        return self._words_only(self._ranking.soft + self._row_evidence[:, None])

    def _words_only(self, scores: Tensor) -> Tensor:
        vocabulary = self.problem.seen.facts.vocabulary
        unknown = {vocabulary.special.get("unk", -1)}
        banned = sorted(i for i in vocabulary.wordless_ids - unknown if i < len(scores))
        return scores.index_fill(0, torch.tensor(banned, dtype=torch.long, device=scores.device), float("-inf"))

    @cached_property
    def _row_evidence(self) -> Tensor:
        """(V,) by how many deviations each row of the word embedding's update stands out, where it is seen; else zeros."""
        seen = self.problem.seen
        if not can_read_rows(seen):
            return torch.zeros(self.problem.stage.vocabulary, device=self.problem.stage.device)
        norms = seen.update[self.problem.anatomy.word_embedding].norm(dim=1)
        middle = norms.median()
        spread = 1.4826 * (norms - middle).abs().median()
        if spread == 0:  # no noise: a row is zero or it is not
            return torch.where(norms > 0, MOST_EVIDENCE, -MOST_EVIDENCE)
        evidence: Tensor = ((norms - middle) / spread).clamp(-MOST_EVIDENCE, MOST_EVIDENCE)
        return evidence

    @cached_property
    def _top(self) -> list[int]:
        found: list[int] = self._soft.argmax(0).tolist()
        return found

    def _framed(self, words: Sequence[int], label: int) -> Hypothesis:
        before, after = self._frame
        return Hypothesis((*before, *words, *after), label)

    def _of_length(self, length: int, words: Sequence[int] = (), label: int = 0) -> Hypothesis:
        """Return a hypothesis of that length: these words as far as they go, then the best-ranked ones."""
        before, after = self._frame
        stop = length - len(after)
        words = [*words, *self._top[len(before) + len(words) : stop]][: stop - len(before)]
        return self._framed(words, label)

    def _labels(self) -> range:
        facts = self.problem.seen.facts
        return range(min(facts.num_labels or 1, MOST_CLASSES)) if facts.task == "classification" else range(1)

    def _starts(self) -> list[Hypothesis]:
        """Return one start for each of the best lengths, with the class that explains the update best."""
        budget = self.problem.budget
        if self._projections and not budget.exhausted():
            fits = {n: self._fit(n) for n in self._likely_lengths if n <= self._positions}
            sketches = {n: fit.sketch(budget) for n, fit in fits.items()}
            best = max(sketches, key=lambda n: sketches[n].score)
            if can_simulate(self.problem.seen):  # little damage: the sketch is the sentence
                (first,) = self._labelled([Hypothesis(sketches[best].token_ids)])
                if self._is_explained(first):
                    return [first]
            solved = self._solved(best)
            plain = [Hypothesis(joint.token_ids) for joint in solved[:STARTS]]
        else:
            plain = [self._of_length(length) for length in self._likely_lengths if length <= self._positions]
        return self._labelled(plain) if can_simulate(self.problem.seen) and not budget.exhausted() else plain

    def _labelled(self, plain: Sequence[Hypothesis]) -> list[Hypothesis]:
        """Give each sentence the class that explains the update best."""
        tried = [replace(h, label=label) for h in plain for label in self._labels()]
        scores = self._simulation.explains(tried, self._compared).view(len(plain), -1)
        return [replace(h, label=int(row.argmax())) for h, row in zip(plain, scores, strict=True)]

    def _solved(self, length: int) -> list[Joint]:
        """Return sentences solved in full, best first: at a length, and at neighbours as long as they are better."""
        found: dict[int, Joint] = {}

        def score(n: int) -> float:
            if not self._shortest <= n <= self._positions:
                return float("-inf")
            if n not in found:
                found[n] = self._fit(n).solve(self.problem.budget.part(SOLVE_SHARE))
            return found[n].score

        for step in (-1, 1):
            while score(length + step) > score(length) and not self.problem.budget.exhausted():
                length += step
        return sorted(found.values(), key=lambda joint: -joint.score)

    @property
    def _shortest(self) -> int:
        return len(self._frame[0]) + len(self._frame[1]) + 1

    def _fit(self, length: int) -> JointFit:
        """Return the joint regression for sentences of a length: known tokens at the ends, the best-ranked ones between."""
        before, after = self._frame
        stage = self.problem.stage
        pools, inputs = [], []
        for position in range(length):
            known = (*before, *[-1] * (length - len(before) - len(after)), *after)[position]
            pool = torch.tensor([known], device=stage.device) if known >= 0 else self._pool[:, position]
            pools.append(pool)
            inputs.append(stage.inputs(pool, torch.full_like(pool, position)))
        return JointFit(self._update_in_noise.T @ self._update_in_noise, len(self._update_in_noise), pools, inputs)

    @cached_property
    def _pool(self) -> Tensor:
        """(K, P) the best-ranked words at every position."""
        words = int((self._soft[:, 0] > float("-inf")).sum())
        return self._soft.topk(min(POOL, words), dim=0).indices

    def _reshaped(self, base: Hypothesis) -> list[Hypothesis]:
        """Return neighbours of other lengths."""
        before, after = self._frame
        words = base.token_ids[len(before) : len(base.token_ids) - len(after)]
        length = len(base.token_ids)
        return [
            self._of_length(other, words, base.label)
            for other in range(length - RESHAPED, length + RESHAPED + 1)
            if other != length and len(before) + len(after) < other <= self._positions
        ]

    def _jumps(self, base: Hypothesis) -> list[Hypothesis]:
        """Return the other classes, and the words that the filter prefers: the surest one, the surest two, and so on."""
        before, after = self._frame
        words = base.token_ids[len(before) : len(base.token_ids) - len(after)]
        found = [replace(base, label=label) for label in self._labels() if label != base.label]
        if self._projections:
            scores = self._both(base)[:, len(before) : len(before) + len(words)]
            best = scores.max(dim=0)
            ahead = best.values - scores[torch.tensor(words, device=scores.device), torch.arange(len(words))]
            order = [p for p in ahead.argsort(descending=True).tolist() if float(ahead[p]) > 0]
            new = best.indices.tolist()
            found += [
                changed(base, {len(before) + p: new[p] for p in order[:count]}) for count in range(1, len(order) + 1)
            ]
        return found

    def _both(self, base: Hypothesis) -> Tensor:
        """Return (V, T) scores of both rankings together."""
        return self._soft[:, : len(base.token_ids)] + self._filtered(base)

    def _propose(self, base: Hypothesis, width: int) -> list[list[int]]:
        """Return the best tokens of both rankings at every position that the tokenizer does not fill."""
        before, after = self._frame
        length = len(base.token_ids)
        width = min(width, len(self._pool))
        columns = [self._soft[:, :length].topk(width, dim=0).indices.T.tolist()]
        if self._projections:
            columns.append(self._both(base).topk(width, dim=0).indices.T.tolist())
        return [
            list(dict.fromkeys(token for column in columns for token in column[p]))
            if len(before) <= p < length - len(after)
            else []
            for p in range(length)
        ]

    @cached_property
    def _projections(self) -> tuple[Layer, ...]:
        """The first block's projections; none where one of them is not a plain linear layer."""
        by_name = {layer.weight: layer for layer in self._simulation.layers}
        names = [p.weight for p in self.problem.anatomy.projections if p.weight in self.span.sigma]
        return tuple(by_name[name] for name in names) if all(name in by_name for name in names) else ()

    @cached_property
    def _update_in_noise(self) -> Tensor:
        """(F, D) the projections' updates in units of their noise."""
        return torch.cat([self.span.update[x.weight] / self.span.sigma[x.weight] for x in self._projections])

    def _filtered(self, base: Hypothesis) -> Tensor:
        """Return (V, T) scores given the gradients that go with a hypothesis."""
        made = self._simulation.activations([base], self._projections)
        sigma = [self.span.sigma[layer.weight] for layer in self._projections]
        gradients = torch.cat([d[0].double() / s for (_, d), s in zip(made, sigma, strict=True)], dim=1)
        # The client's factor (clipping, batch size) is whatever fits best.
        x = made[0][0][0].double()
        simulated = gradients.T @ x
        factor = float((simulated * self._update_in_noise).sum() / simulated.square().sum().clamp_min(1e-300))
        if factor > 0:
            gradients = gradients * factor
        return self._ranking.filtered(gradients, self._update_in_noise)

    def _explained(self, found: Hypothesis) -> float:
        """Return the share of the first block's signal that a hypothesis explains, 0 to 1.

        cos^2 between the simulated and the observed update, over what it would be for the truth: signal over signal and noise. What the
        damage does to every update is done to the simulated one first: entries that are missing, sizes that are lost.
        """
        layers = self._first_block if self.sigma is not None else self._projections or self._first_block
        inner = own = 0.0
        pruned = False
        for layer, (x, d) in zip(layers, self._simulation.activations([found], layers), strict=True):
            gradient = torch.einsum("nto,nti->oi", d, x).double()
            seen = self.problem.seen.update[layer.weight]
            seen = (seen.T if layer.input_first else seen).double()
            if float((seen == 0).double().mean()) > PRUNED_SHARE:
                gradient, pruned = gradient * (seen != 0), True
            if self._simulation.signs:
                gradient = gradient.sign()
            inner += float((gradient * seen).sum())
            own += float(gradient.square().sum())
        power, noise = self._energy(layers)
        exact = self.sigma is None and (pruned or self._simulation.signs)
        signal = power if exact else max(power - noise, LEAST_SIGNAL * power)
        return 0.0 if inner <= 0 or own == 0 else min(1.0, inner**2 / (own * signal))

    def _margin(self, found: SearchResult) -> float:
        """Return by how many noise deviations the best hypothesis leads the next one.

        Scores are <g, G> / |g|; the difference of two has a deviation of at most sqrt(2) sigma.
        """
        sigma = self.sigma or max(self.span.sigma.values())
        lead = found.score - found.runner_up
        return min(MOST_MARGIN, lead / (2**0.5 * sigma)) if lead > 0 else 0.0

    def _reach(self) -> PairReach | None:
        """Return which pairs were ranked near enough to be tried."""
        width = min(WIDTHS[-1], self.problem.stage.vocabulary)
        before, after = self._frame
        tokens = self._soft.topk(width, dim=0).indices  # (W, P)
        around = torch.tensor([*before, *after], dtype=torch.long, device=tokens.device)
        tokens = torch.cat([tokens, around[:, None].expand(-1, tokens.shape[1])])
        where = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
        return ranked_reach(self.problem, _Ranked(tokens.flatten(), where.flatten()))
