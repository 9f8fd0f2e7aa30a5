"""GRAB's search: descents on embeddings and masks, beam searches on tokens.

GRAB (Feng et al., CCS 2024), Algorithms 1 to 3. A round is a descent on embeddings, labels and dropout masks,
followed by a beam search over the tokens that it gave. Line 10 of Algorithm 1, as printed, keeps the tokens of the
descent where their loss is the *higher* one. Here the lower one wins, and both sides are compared as tokens.

Letters: B sequences, T tokens, C classes, P mask entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from leakaudit.algorithms.matching.candidates import Candidate
from leakaudit.algorithms.matching.descent import Descent, Keep, Run
from leakaudit.algorithms.matching.dropout_distance import distances_by_dropout
from leakaudit.algorithms.matching.matcher import Matcher
from leakaudit.algorithms.matching.permutations import shuffled
from leakaudit.algorithms.matching.search import Found, Stop, advance, start_run
from leakaudit.algorithms.matching.starts import Start, permuted
from leakaudit.algorithms.matching.token_refinement import Batch, nearest_words, refine_tokens
from leakaudit.plugins.budget import Budget


@dataclass(frozen=True)
class Hybrid:
    """The settings of GRAB's rounds."""

    rounds: int
    """n_h."""
    permutations: int
    """n_p: random orders that are scored before the steps and before the beam search of a round."""
    sweeps: int
    """n_d: beam searches over all positions in a round; they end when one changes nothing."""
    beams: int
    """n_b: batches that are kept at each position."""
    words: int = 0
    """Nearest words at each position that are tried after the beam search (`token_refinement`); 0 for none, as in the
    paper."""
    keep_masks: bool = False
    """Score tokens, and begin the next round, with the learned masks, as the paper does; otherwise with masks at their
    mean."""
    seats: bool = True
    """Move embeddings together with their positions before the nearest tokens are taken (`position_assignment`)."""
    attempts: int = 1
    """Searches from random starts, while the best guess is farther off than dropout explains."""
    verdict_steps: int = 0
    """Steps on masks alone for the best guesses of all rounds in the end, each from masks at their mean; 0 for none."""
    apart: bool = False
    """Search from each of the `beams` best orders separately, as Algorithm 3 is printed, instead of once from all
    together."""
    keep: Keep = "best"
    """End with the best guess of all rounds, from which every round begins, too; or with the `last` round's, and stop
    when the beam search does not improve on the steps, as the paper does (Sec. 5.1)."""
    stop_early: bool = True
    """End as soon as the tokens explain the update."""


FINALISTS = 4
"""Guesses that compete in the end. Our choice: side by side they take about twice the time of one."""

PLAUSIBLE = 1.5
"""Factor of the expected distance up to which a guess is accepted. Our choice: on training sentences, searches that
found most words ended at 1.0 to 1.3 of the expected distance."""

DRAWS = 4
"""Draws of dropout masks that estimate this distance. Our choice: they differ by a tenth."""

VERDICT_MASK_STEP = 0.03
"""Adam's step for masks in the final comparison. Chosen on a training sentence: right words end clearly below wrong
ones."""

STILL = 1e-12
"""Adam's step for embeddings that must not move."""


@dataclass(frozen=True)
class _Guess:
    """The best tokens so far."""

    tokens: Batch
    loss: float
    likeness: list[float]
    candidate: Candidate
    """The embeddings they came from, their labels and masks."""


def hybrid_search(
    matcher: Matcher, descent: Descent, start: Start, hybrid: Hybrid, rng: torch.Generator, budget: Budget
) -> Found:
    """Find tokens whose gradient is nearest to the observed one.

    At least one guess is returned, however small the budget.
    """
    return _Search(matcher, descent, start, hybrid, rng, budget).run()


class _Search:
    """Attempts of several rounds from random starts, and a final comparison."""

    def __init__(
        self, matcher: Matcher, descent: Descent, start: Start, hybrid: Hybrid, rng: torch.Generator, budget: Budget
    ) -> None:
        self._matcher, self._descent, self._start, self._hybrid = matcher, descent, start, hybrid
        self._rng, self._budget = rng, budget
        counts = ("attempts", "hybrid_rounds", "beamed", "candidates", "seated", "steps", "restarted")
        self._facts = dict.fromkeys(counts, 0.0)
        self._finalists: dict[Batch, float] = {}
        """Batches that may compete in the end -> their distances."""
        self._stop: Stop = "done"
        """Why the last attempt ended."""

    def run(self) -> Found:
        """Search until a guess is as near as can be expected."""
        best = self._attempt()
        while self._facts["attempts"] < self._hybrid.attempts and not (
            self._budget.exhausted() or self._plausible(best)
        ):
            best = min(best, self._attempt(), key=lambda guess: guess.loss)
        tokens = list(best.tokens)
        masked = self._matcher.gradients.masks is not None
        if self._hybrid.verdict_steps and masked and not self._matcher.explained_by(best.loss):
            tokens = list(self._judged(best.candidate.label_logits[0]))
            self._facts["overruled"] = float(tuple(tokens) != best.tokens)
        facts = self._facts | {"halved": float(self._matcher.chunks.halvings)}
        facts |= {"loss": best.loss} if math.isfinite(best.loss) else {}
        return Found(best.candidate, tokens, best.likeness, self._stop, facts)

    def _attempt(self) -> _Guess:
        """Run rounds from a random start until one brings no improvement."""
        matcher, hybrid, facts, budget = self._matcher, self._hybrid, self._facts, self._budget
        run = start_run(matcher, self._descent, self._start, self._rng, budget)
        guess: _Guess | None = None
        self._stop = "done"
        for _ in range(hybrid.rounds):
            if guess is not None:
                masks = run.now.masks[0] if hybrid.keep_masks else None
                again = matcher.candidates.of_tokens([guess.tokens], run.now.label_logits, masks)
                again = permuted(matcher, again, hybrid.permutations, self._rng, budget)
                run.begin(self._descent, again, forget=True)
            advance(run, None, budget)
            run.settle()
            if hybrid.seats:
                for row in range(len(matcher.lengths)):
                    run.assign_positions(row)
            tokens, likeness = matcher.tokens(run.now.embeddings[0])
            known = [tuple(tokens)]
            if guess is not None and hybrid.keep == "best":
                known.append(guess.tokens)
            beams = _sequenced(matcher, run.now, known, hybrid, self._rng, budget)
            found, loss = beams.best
            facts["hybrid_rounds"] += 1
            facts["beamed"] += found != tuple(tokens)
            facts["candidates"] += beams.scored
            self._finalists |= dict(beams.ranked)
            if hybrid.keep == "best" and guess is not None and not loss < guess.loss:
                self._stop = "converged"
                break
            guess = _Guess(found, loss, likeness, run.now.detached())
            if (hybrid.stop_early and matcher.explained_by(loss)) or (hybrid.keep == "last" and found == tuple(tokens)):
                self._stop = "converged"
                break
            if budget.exhausted():
                self._stop = "budget"
                break
        assert guess is not None  # there is at least one round
        facts["attempts"] += 1
        facts["steps"] += run.taken
        facts["restarted"] += run.restarted
        facts["seated"] += run.position_moves
        return guess

    def _plausible(self, guess: _Guess) -> bool:
        """Return whether a guess is as near as the true words would be.

        The expected distance is that of the guess's own gradient behind drawn dropout masks. True where it is not
        known.
        """
        if self._matcher.explained_by(guess.loss):
            return True
        masks = guess.candidate.masks[0]
        logits = guess.candidate.label_logits[0]
        losses = distances_by_dropout(self._matcher, guess.tokens, logits, masks, DRAWS, self._rng)
        return not losses or guess.loss <= PLAUSIBLE * median(losses)

    def _judged(self, label_logits: Tensor) -> Batch:
        """Return the finalist that explains the update best with masks of its own."""
        matcher, steps = self._matcher, self._hybrid.verdict_steps
        batches = sorted(self._finalists, key=lambda batch: self._finalists[batch])[:FINALISTS]
        certain = matcher.certain(label_logits).expand(len(batches), -1, -1)
        descent = Descent(steps, STILL, mask_step=VERDICT_MASK_STEP)
        run = Run(matcher, descent, matcher.candidates.of_tokens(batches, certain), self._rng, optimise_labels=False)
        while run.taken < steps and not self._budget.exhausted():
            run.step()
        held = matcher.masks.penalty(run.now.masks).tolist()
        losses = [
            matcher.token_losses([batch], label_logits, masks)[0] + loss
            for batch, masks, loss in zip(batches, run.now.masks, held, strict=True)
        ]
        return batches[min(range(len(batches)), key=lambda number: losses[number])]


def _sequenced(
    matcher: Matcher, one: Candidate, known: Sequence[Batch], hybrid: Hybrid, rng: torch.Generator, budget: Budget
) -> Beams:
    """Return the result of a round's discrete part (Algorithm 3)."""
    logits = one.label_logits[0]
    beams = Beams(matcher, logits, one.masks[0] if hybrid.keep_masks else None, hybrid.beams)
    beams.offer([*known, *_orders(matcher, known[0], hybrid.permutations, rng)])
    if hybrid.apart:
        search_apart(beams, hybrid.sweeps, budget)
    else:
        for _ in range(hybrid.sweeps):
            if budget.exhausted() or not beams.sweep(budget):
                break
    if hybrid.words and not budget.exhausted():
        words = nearest_words(matcher, one.embeddings[0], hybrid.words)
        beams.offer([refine_tokens(matcher, beams.best[0], logits, words, rng, budget)])
    return beams


def search_apart(beams: Beams, sweeps: int, budget: Budget) -> None:
    """Search from each kept batch separately, and offer the results.

    Batch X_j is searched over its own words T_j (Algorithm 3, lines 2 to 8).

    A sweep that changes no X_j would only be repeated, so it is the last.
    """
    starts = [batch for batch, _ in beams.ranked]
    words = [beams.words(start) for start in starts]
    for _ in range(sweeps):
        before = list(starts)
        for number, own in enumerate(words):
            one = beams.alone(starts[number])
            one.sweep(budget, own)
            starts[number] = one.best[0]
            beams.scored += one.scored
        if starts == before or budget.exhausted():
            break
    beams.offer(starts)


def _orders(matcher: Matcher, tokens: Batch, count: int, rng: torch.Generator) -> list[Batch]:
    """Return random orders of each sequence's tokens."""
    found = []
    for _ in range(count):
        orders = [shuffled(matcher.free_places(row), length, rng) for row, length in enumerate(matcher.lengths)]
        pairs = zip(tokens, orders, strict=True)
        found.append(tuple(tuple(sequence[place] for place in order) for sequence, order in pairs))
    return found


class Beams:
    """The n_b token batches with the smallest distance (Algorithm 3).

    Each batch is scored once.
    """

    def __init__(self, matcher: Matcher, label_logits: Tensor, masks: Tensor | None, width: int) -> None:
        """Create an empty set of beams.

        Args:
            matcher: scores.
            label_logits: (B, C).
            masks: (P,) of dropout that all are scored with; None for masks at their mean.
            width: n_b.
        """
        self.scored = 0
        """Batches that were scored so far."""
        self._matcher = matcher
        self._logits, self._masks = label_logits, masks
        self._width = width
        self._losses: dict[Batch, float] = {}
        self._kept: list[Batch] = []

    @property
    def best(self) -> tuple[Batch, float]:
        """The best batch and its distance."""
        return self.ranked[0]

    @property
    def ranked(self) -> list[tuple[Batch, float]]:
        """The kept batches with their distances, best first."""
        return [(batch, self._losses[batch]) for batch in self._kept]

    def offer(self, batches: Sequence[Batch]) -> None:
        """Score the batches that are new, and keep the best."""
        new = [batch for batch in dict.fromkeys(batches) if batch not in self._losses]
        if new:
            losses = self._matcher.token_losses(new, self._logits, self._masks)
            self._losses |= {
                batch: loss if math.isfinite(loss) else math.inf for batch, loss in zip(new, losses, strict=True)
            }
            self.scored += len(new)
        everything = dict.fromkeys([*self._kept, *batches])
        self._kept = sorted(everything, key=lambda batch: self._losses[batch])[: self._width]

    def words(self, batch: Batch) -> Batch:
        """Return the different non-public tokens of each sequence of a batch."""
        places = map(self._matcher.free_places, range(len(batch)))
        return tuple(
            tuple(dict.fromkeys(sequence[place] for place in free))
            for sequence, free in zip(batch, places, strict=True)
        )

    def alone(self, batch: Batch) -> Beams:
        """Return beams with only one batch, and with all scores so far."""
        one = Beams(self._matcher, self._logits, self._masks, self._width)
        one._losses = self._losses
        one.offer([batch])
        return one

    def sweep(self, budget: Budget, words: Batch | None = None) -> bool:
        """Try each token of a sequence at all positions, once.

        Returns whether the best batch changed.

        Args:
            budget: checked before every place.
            words: tokens of each sequence to try; by default those of the kept batches.
        """
        before = self._kept[0]
        for row in range(len(self._matcher.lengths)):
            places = self._matcher.free_places(row)
            here = dict.fromkeys(batch[row][place] for batch in self._kept for place in places)
            tokens = tuple(here) if words is None else words[row]
            for place in places:
                if budget.exhausted():
                    return False
                self.offer([_put(batch, row, place, token) for batch in self._kept for token in tokens])
        return self._kept[0] != before


def _put(batch: Batch, row: int, place: int, token: int) -> Batch:
    """Return a batch with another token at a place."""
    sequence = batch[row]
    return (*batch[:row], (*sequence[:place], token, *sequence[place + 1 :]), *batch[row + 1 :])
