"""GRAB's search: descents on embeddings and masks, beam searches on tokens.

GRAB (Feng et al., CCS 2024), Algorithms 1 to 3. A round is a descent on embeddings, labels and dropout masks,
and then a beam search over the tokens that the descent found. As printed, line 10 of Algorithm 1 keeps the tokens of the
descent if their loss is the *higher* one. Here the lower loss wins, and both losses are those of tokens.

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
    """n_p: random orders that are scored in each round, both before the steps and before the beam search."""
    sweeps: int
    """n_d: most beam searches over all positions in a round. They end when one changes nothing."""
    beams: int
    """n_b: number of batches that are kept at each position."""
    words: int = 0
    """Number of nearest words that are tried at each position after the beam search (`token_refinement`); 0 as in the paper."""
    keep_masks: bool = False
    """Use the learned masks to score tokens and to begin the next round, as the paper does. If false, use masks at their
    mean."""
    seats: bool = True
    """Move embeddings together with their positions before the nearest tokens are taken (`position_assignment`)."""
    attempts: int = 1
    """Most searches from random starts. Another one begins only if dropout does not explain the distance of the best guess."""
    verdict_steps: int = 0
    """Steps on masks alone, in a final comparison of the best guesses of all rounds. They start at the mean; 0 for no comparison."""
    apart: bool = False
    """Search separately from each of the `beams` best orders, as in Algorithm 3 as printed, and not once from all of them
    together."""
    keep: Keep = "best"
    """With `best`, every round begins from the best guess so far, and the search ends with it. With `last`, it ends with the
    guess of the last round, and stops when the beam search does not change the tokens, as the paper does (Sec. 5.1)."""
    stop_early: bool = True
    """End as soon as the tokens explain the update."""


FINALISTS = 4
"""Number of guesses in the final comparison. Our choice: together they take about twice the time of one."""

PLAUSIBLE = 1.5
"""A guess is accepted if its distance is at most this many times the expected distance. Our choice: on training sentences,
searches that found most words ended at 1.0 to 1.3 times the expected distance."""

DRAWS = 4
"""Draws of dropout masks that estimate this expected distance. Our choice: the draws differ by a tenth."""

VERDICT_MASK_STEP = 0.03
"""Adam's step for masks in the final comparison. Chosen on a training sentence: right words then have a clearly
lower distance than wrong words."""

STILL = 1e-12
"""Adam's step for embeddings that must not move. Not 0, because the step for masks is divided by it."""


@dataclass(frozen=True)
class _Guess:
    """The best tokens so far."""

    tokens: Batch
    loss: float
    likeness: list[float]
    candidate: Candidate
    """The embeddings from which the tokens were taken, with their labels and masks."""


def hybrid_search(
    matcher: Matcher, descent: Descent, start: Start, hybrid: Hybrid, rng: torch.Generator, budget: Budget
) -> Found:
    """Find tokens whose gradient is nearest to the observed one.

    The result is at least one guess, even if the budget is very small.
    """
    return _Search(matcher, descent, start, hybrid, rng, budget).run()


class _Search:
    """Several attempts from random starts, and a final comparison."""

    def __init__(
        self, matcher: Matcher, descent: Descent, start: Start, hybrid: Hybrid, rng: torch.Generator, budget: Budget
    ) -> None:
        self._matcher, self._descent, self._start, self._hybrid = matcher, descent, start, hybrid
        self._rng, self._budget = rng, budget
        counts = ("attempts", "hybrid_rounds", "beamed", "candidates", "seated", "steps", "restarted")
        self._facts = dict.fromkeys(counts, 0.0)
        self._finalists: dict[Batch, float] = {}
        """Batch that may enter the final comparison -> its distance."""
        self._stop: Stop = "done"
        """Why the last attempt ended."""

    def run(self) -> Found:
        """Repeat attempts until a guess is plausible, then compare the best guesses.

        The attempts also end when their number or the budget is used up.
        """
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
        """Run rounds from a random start, and return the best or the last guess."""
        matcher, hybrid, facts, budget = self._matcher, self._hybrid, self._facts, self._budget
        run = start_run(matcher, self._descent, self._start, self._rng, budget)
        guess: _Guess | None = None
        self._stop = "done"
        for _ in range(hybrid.rounds):
            if guess is not None:
                masks = run.now.masks[0] if hybrid.keep_masks else None
                again = matcher.candidates.of_tokens([guess.tokens], run.now.label_logits, masks)
                again = permuted(matcher, again, hybrid.permutations, self._rng, budget)
                run.begin(self._descent, again)
            advance(run, None, budget)
            run.settle()
            if hybrid.seats:
                for row in range(len(matcher.lengths)):
                    run.assign_positions(row)
            tokens, likeness = matcher.tokens(run.now.embeddings[0], run.now.label_logits[0])
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
            if (hybrid.stop_early and matcher.explained_by(loss)) or (hybrid.keep != "best" and found == tuple(tokens)):
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

        The expected distance is that which drawn dropout masks alone cause for this guess. If it is not known, the answer is
        true.
        """
        if self._matcher.explained_by(guess.loss):
            return True
        masks = guess.candidate.masks[0]
        logits = guess.candidate.label_logits[0]
        losses = distances_by_dropout(self._matcher, guess.tokens, logits, masks, DRAWS, self._rng)
        return not losses or guess.loss <= PLAUSIBLE * median(losses)

    def _judged(self, label_logits: Tensor) -> Batch:
        """Return the guess that explains the update best with masks of its own."""
        matcher, steps = self._matcher, self._hybrid.verdict_steps
        batches = sorted(self._finalists, key=lambda batch: self._finalists[batch])[:FINALISTS]
        certain = matcher.certain(label_logits, len(batches))
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

    The search from batch X_j tries only the words T_j of this batch (Algorithm 3, lines 2 to 8). After a sweep that changes no X_j the
    search ends, because further sweeps would be the same.
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
            masks: (P,) dropout masks with which all batches are scored; None for masks at their mean.
            width: n_b.
        """
        self.scored = 0
        """Number of batches scored so far."""
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
        """Try each token of a sequence at each of its positions.

        Return whether the best batch changed. Return False if the budget is used up before the end.

        Args:
            budget: checked before every position.
            words: tokens of each sequence to try; None for those of the kept batches.
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
    """Return a batch with another token at one position."""
    sequence = batch[row]
    return (*batch[:row], (*sequence[:place], token, *sequence[place + 1 :]), *batch[row + 1 :])
