"""The search that DLG, TAG and LAMP share.

LAMP (Balunovic et al., NeurIPS 2022), Algorithm 1: starts, Adam, restarts, discrete rounds, and when to stop. DLG and
TAG are the same search without the discrete rounds, the prior and the regulariser.

Letters: N candidates, B sequences, T tokens, D hidden size, C classes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from leakaudit.algorithms.matching.candidate_gradients import Candidate, joined
from leakaudit.algorithms.matching.matcher import CERTAIN, Matcher
from leakaudit.algorithms.matching.permutations import Permutation, draw_orders, shuffled
from leakaudit.algorithms.matching.position_assignment import seat
from leakaudit.algorithms.matching.token_refinement import mend, nearest_words, pooled
from leakaudit.plugins.budget import Budget
from leakaudit.plugins.prior_protocol import Scorer

IMPROVEMENT = 1e-3
"""Relative fall of the loss that counts as progress. Our choice."""

LABEL_STEP = 0.1
"""Adam's step for unknown label logits where nothing else is said. Our choice: a label can change sides within twenty steps."""

REDRAWN = 0.25
"""Share of a sequence's places that are drawn anew. Our choice."""

MOST_LABELLINGS = 64
"""Assignments of classes to sequences that are all tried where labels are enumerated. Our choice: six sequences of two classes."""

SAME = 0.05
"""Relative rise of the loss that a move to other places may cost. Our choice: the gradient stays the same, the regulariser does not."""

Stop = Literal["done", "converged", "budget"]

Keep = Literal["best", "last"]


@dataclass(frozen=True)
class Descent:
    """Settings of the continuous part."""

    steps: int
    learning_rate: float
    """Adam's step at the start, in units of the root mean square of the word embedding's entries."""
    decay: float = 1.0
    """Factor on the step every `decay_every` steps; 1 for none."""
    decay_every: int = 50
    linear: bool = False
    """Let the step fall to zero on a straight line instead (BERT-large in LAMP, Sec. 5)."""
    weight_decay: float = 0.0
    """Of AdamW."""
    clip: float = 0.0
    """Norm that the derivative by a candidate's embeddings is cut to; 0 for none (BERT-large in LAMP, App. D)."""
    patience: int = 0
    """Steps without a lower loss after which the search stops; 0 for never."""
    label_step: float | None = None
    """Adam's step for unknown label logits at the start, which falls with the embeddings'; None takes `LABEL_STEP` throughout."""
    mask_step: float = 0.0
    """Adam's step for dropout masks at the start; it falls with the other."""
    keep: Keep = "best"
    """End with the candidate that had the lowest loss, or with the last, as LAMP's Algorithm 1 does."""

    def label_rate(self, taken: int) -> float:
        """Return the step for labels after so many steps."""
        return LABEL_STEP if self.label_step is None else self.label_step * self.rate(taken) / self.learning_rate

    def mask_rate(self, taken: int) -> float:
        """Return the step for masks after so many steps."""
        return self.mask_step * self.rate(taken) / self.learning_rate

    def rate(self, taken: int) -> float:
        """Return the step after so many steps."""
        if self.linear:
            return self.learning_rate * (1 - taken / self.steps)
        return self.learning_rate * self.decay ** (taken // self.decay_every)


@dataclass(frozen=True)
class Start:
    """Settings of the first candidate."""

    samples: int = 1
    """n_init: normal samples that are scored."""
    permutations: int = 0
    """Random orders of the best sample that are scored."""
    restarts: int = 1
    """Best samples that go on side by side for `trial_steps`."""
    trial_steps: int = 0
    given: tuple[tuple[int, ...] | None, ...] = ()
    """Tokens of each sequence to start from, where another attack read any; the rest is drawn."""
    labels: Literal["joint", "enumerate"] = "joint"
    """Unknown labels: optimised with the embeddings (DLG), or each assignment a restart of its own."""
    masks: Literal["mean", "bernoulli"] = "mean"
    """Dropout masks, where they are learned: all at 1 - p, as in a pass without dropout, or drawn (GRAB, Algorithm 1)."""


@dataclass(frozen=True)
class Rounds:
    """Settings of the discrete part."""

    every: int
    """n_c: steps between two rounds."""
    draws: int
    """n_d: random transformations for each sequence of a round."""
    when: Literal["alternate", "at-end"] = "alternate"
    seats: bool = True
    """Move embeddings together with their positions, too (`matching_seats`)."""
    prior: Scorer | None = None
    prior_weight: float = 0.0
    """alpha_lm."""
    patience: int = 0
    """Rounds that changed no token and moved none after which a descent ends; 0 for never."""
    stop_early: bool = True
    """End as soon as the tokens explain the update."""
    words: int = 0
    """Nearest words at each place that are tried as tokens after the last step (`matching_words`), with those of restarts that fell out; 0 takes
    the nearest."""
    redraws: int = 0
    """How often the places furthest from any word are drawn anew, and another descent begins from the best so far."""
    redraw_steps: int = 0
    """Steps of each of these descents."""

    def count(self, steps: int) -> int:
        """Return the number of rounds that belong to so many steps.

        There is one after every `every` steps, and one after the remaining steps.
        """
        return math.ceil(steps / self.every)

    @property
    def seats_every(self) -> int:
        """Steps after which parallel restarts get other positions; 0 for never."""
        return self.every if self.seats and self.when == "alternate" else 0


class Found(NamedTuple):
    """The result of a search."""

    best: Candidate
    """One candidate."""
    tokens: list[tuple[int, ...]]
    """(B,) sequences."""
    likeness: list[float]
    """(B,) mean cosine of a sequence's embeddings with their nearest tokens'."""
    stop: Stop
    facts: dict[str, float]


def search(
    matcher: Matcher,
    descent: Descent,
    start: Start,
    rounds: Rounds | None,
    rng: torch.Generator,
    budget: Budget,
) -> Found:
    """Find embeddings whose gradient is the observed one.

    At least one candidate is returned, however small the budget.
    """
    run = begun(matcher, descent, start, rng, budget, seats_every=0 if rounds is None else rounds.seats_every)
    shuffles = None if rounds is None else _Shuffler(matcher, rounds, rng)
    if shuffles is not None and start.given:
        shuffles.shuffle(run, budget)
    elif shuffles is not None and run.taken:
        shuffles.look(run)
    stop = "converged" if shuffles is not None and shuffles.explained else advance(run, shuffles, budget)
    best = run.end if shuffles is None else shuffles.best(run, budget)
    if shuffles is not None:
        again = replace(descent, steps=shuffles.rounds.redraw_steps)
        for _ in range(shuffles.rounds.redraws):
            if shuffles.explained or budget.exhausted():
                break
            run.begin(again, shuffles.redrawn(best))
            stop = advance(run, shuffles, budget)
            best = shuffles.best(run, budget)
    tokens, likeness = matcher.tokens(best.embeddings[0])
    if rounds is not None and rounds.words and shuffles is not None and not shuffles.explained:
        tokens = _mended(matcher, [best, *run.fallen], rounds.words, rng, budget)
    facts = run.facts(float(run.best_losses[0]))
    if shuffles is not None:
        facts |= shuffles.facts | {"seated": float(run.seated)}
    return Found(best, tokens, likeness, stop, facts)


def _mended(
    matcher: Matcher, candidates: Sequence[Candidate], most: int, rng: torch.Generator, budget: Budget
) -> list[tuple[int, ...]]:
    """Return the nearest of some candidates as tokens, refined with all words.

    Args:
        matcher: compares.
        candidates: one or more in each; the labels are those of the first of all.
        most: words a place that are tried of the first candidate. Of every other it is the nearest.
        rng: draws orders.
        budget: looked at on the way.
    """
    logits = candidates[0].label_logits[0]
    embeddings = [one for some in candidates for one in some.embeddings]
    words = [nearest_words(matcher, one, most if number == 0 else 1) for number, one in enumerate(embeddings)]
    guesses = [matcher.tokens(one)[0] for one in embeddings]
    losses = matcher.token_losses(guesses, logits)
    nearest = guesses[min(range(len(guesses)), key=lambda number: losses[number])]
    return list(mend(matcher, nearest, logits, pooled(words), rng, budget))


def begun(
    matcher: Matcher, descent: Descent, start: Start, rng: torch.Generator, budget: Budget, *, seats_every: int = 0
) -> Run:
    """Return a run of the best candidate after a trial of all starts.

    The trial takes `trial_steps` steps of all candidates side by side.

    Args:
        matcher: compares.
        descent: the steps.
        start: the candidates.
        rng: draws them.
        budget: looked at before every step.
        seats_every: steps after which all of them get other places (`matching_seats`), and after the last of the descent; one whose tokens then
            explain the update is the best. 0 for never.
    """
    first = _starts(matcher, start, rng, budget)
    run = Run(matcher, descent, first, rng, optimise_labels=start.labels == "joint")
    trial = min(start.trial_steps, descent.steps) if len(first.embeddings) > 1 else 0
    while run.taken < trial and not budget.exhausted():
        run.step()
        if not seats_every or (run.taken % seats_every and run.taken < descent.steps):
            continue
        for number, row in itertools.product(range(len(first.embeddings)), range(len(matcher.lengths))):
            run.seat(row, number)
        through = [number for number in run.order() if run.explained(number)]
        if through:
            run.keep(through[:1])
            return run
    run.keep(run.order()[:1])
    return run


def advance(run: Run, shuffles: _Shuffler | None, budget: Budget) -> Stop:
    """Take the remaining steps, with rounds in between; return why they ended."""
    while run.taken_now < run.descent.steps:
        if budget.exhausted():
            return "budget"
        if run.stalled:
            return "converged"
        run.step()
        if shuffles is None or shuffles.rounds.when == "at-end" or run.taken_now % shuffles.rounds.every:
            continue
        shuffles.shuffle(run, budget)
        if shuffles.settled:
            return "converged"
    return "done"


def _starts(matcher: Matcher, start: Start, rng: torch.Generator, budget: Budget) -> Candidate:
    """Return the `restarts` best of `samples` random candidates, best first.

    The best is permuted, or repeated with every labelling, if asked for.

    At least one comes back, however small the budget is. Candidates are made a portion at a time, as many as run at once.
    """
    found = _drawn(matcher, start, 1, rng)
    if start.samples > 1:
        losses = matcher.losses(found) if not budget.exhausted() else None
        for count in _portions(start.samples - 1, matcher):
            if losses is None or budget.exhausted():
                break
            drawn = _drawn(matcher, start, count, rng)
            found, losses = _best(joined([found, drawn]), torch.cat([losses, matcher.losses(drawn)]), start.restarts)
    if start.permutations and not start.given and not budget.exhausted():
        found = permuted(matcher, found, start.permutations, rng, budget)
    if start.labels == "enumerate" and not matcher.knows_labels:
        found = _with_every_labelling(found.take([0]))
    return found


def _drawn(matcher: Matcher, start: Start, count: int, rng: torch.Generator) -> Candidate:
    """Return random candidates, with the given tokens at their positions."""
    drawn = matcher.random(count, rng)
    if start.masks == "bernoulli":
        drawn = drawn._replace(masks=matcher.drawn_masks(count, rng))
    for row, ids in enumerate(start.given):
        if ids is not None:
            drawn.embeddings[:, row, : len(ids)] = matcher.table[list(ids)]
    return drawn


def permuted(matcher: Matcher, found: Candidate, permutations: int, rng: torch.Generator, budget: Budget) -> Candidate:
    """Return the candidates, the first one in the best of some random orders."""
    first = found.take([0])
    best, losses = first, matcher.losses(first)
    for count in _portions(permutations, matcher):
        if budget.exhausted():
            break
        orders = [
            [shuffled(matcher.free_places(row), max(matcher.lengths), rng) for row in range(len(matcher.lengths))]
            for _ in range(count)
        ]
        tried = joined([_rearranged(first, row_orders) for row_orders in orders])
        best, losses = _best(joined([best, tried]), torch.cat([losses, matcher.losses(tried)]), 1)
    return joined([best, found.take(slice(1, None))])


def _portions(total: int, matcher: Matcher) -> Iterator[int]:
    """Yield how many candidates to make at a time, up to `total` in all."""
    while total > 0:
        count = min(total, matcher.at_once)
        yield count
        total -= count


def _best(candidates: Candidate, losses: Tensor, count: int) -> tuple[Candidate, Tensor]:
    """Return the best candidates and their losses, best first."""
    order = losses.nan_to_num(nan=math.inf).argsort()[:count]
    return candidates.take(order), losses[order]


def _with_every_labelling(one: Candidate) -> Candidate:
    """Return a candidate once for each assignment of classes to sequences.

    There are at most `MOST_LABELLINGS`.
    """
    _, sequences, classes = one.label_logits.shape
    labellings = list(itertools.islice(itertools.product(range(classes), repeat=sequences), MOST_LABELLINGS))
    certain = torch.nn.functional.one_hot(torch.tensor(labellings), classes) * CERTAIN
    return Candidate(
        one.embeddings.expand(len(labellings), -1, -1, -1).clone(),
        certain.to(one.label_logits),
        one.masks.expand(len(labellings), -1).clone(),
    )


class Run:
    """Candidates that Adam moves side by side, and the best state of each."""

    def __init__(
        self,
        matcher: Matcher,
        descent: Descent,
        first: Candidate,
        rng: torch.Generator,
        *,
        optimise_labels: bool = True,
    ) -> None:
        """Start from `first`, (N, ...)."""
        self.descent = descent
        self.now = first.detached()
        self.best = first.detached()
        self.best_losses = torch.full((len(first.embeddings),), math.inf, dtype=torch.float64)
        self.taken = 0
        """Steps in all."""
        self.taken_now = 0
        """Steps of the present descent."""
        self.last_progress = 0
        """Step at which the loss last fell noticeably."""
        self.restarted = 0
        """Candidates that were drawn anew because their loss was no number."""
        self.seated = 0
        """How often the embeddings of a sequence got other places."""
        self.fallen: list[Candidate] = []
        """Candidates that others were preferred to, as they were then."""
        self._matcher = matcher
        self._rng = rng
        self._optimise_labels = optimise_labels
        self.means = Candidate(*(torch.zeros_like(part) for part in first))
        self.squares = Candidate(*(torch.zeros_like(part) for part in first))
        self._ages = torch.zeros(len(first.embeddings), device=first.embeddings.device)
        self._mark = math.inf

    @property
    def stalled(self) -> bool:
        """Whether the loss has not fallen for as many steps as patience lasts."""
        return 0 < self.descent.patience < self.taken - self.last_progress

    @property
    def end(self) -> Candidate:
        """The candidates that the descent ends with."""
        return (self.best if self.descent.keep == "best" else self.now).detached()

    def facts(self, loss: float) -> dict[str, float]:
        """Return the diagnostics of the run.

        The loss of the result is among them if it is finite.
        """
        facts = {
            "steps": float(self.taken),
            "restarted": float(self.restarted),
            "halved": float(self._matcher.halvings),
        }
        return facts | ({"loss": loss} if math.isfinite(loss) else {})

    def step(self) -> None:
        """Take one step, and keep candidates from before it that were the best yet."""
        losses, slopes = self._matcher.losses_and_derivatives(self.now)
        losses = losses.cpu()
        finite = losses.isfinite() & slopes.embeddings.flatten(1).isfinite().all(dim=1).cpu()
        better = (losses < self.best_losses) & finite
        if bool(better.any()):
            where = better.nonzero().flatten().to(self.now.embeddings.device)
            for kept, part in zip(self.best, self.now, strict=True):
                kept[where] = part[where]
            self.best_losses = torch.where(better, losses, self.best_losses)
        if float(self.best_losses.min()) < self._mark * (1 - IMPROVEMENT):
            self._mark, self.last_progress = float(self.best_losses.min()), self.taken
        self._adam(slopes)
        self.taken += 1
        self.taken_now += 1
        if not bool(finite.all()):
            self._draw_anew((~finite).nonzero().flatten())

    def begin(self, descent: Descent, first: Candidate, *, forget: bool = False) -> None:
        """Begin another descent with a fresh optimizer state.

        Args:
            descent: its settings.
            first: where to start.
            forget: the best of earlier descents does not count any more.
        """
        self.descent, self.taken_now = descent, 0
        if forget:
            self.best, self.best_losses = first.detached(), torch.full_like(self.best_losses, math.inf)
            self._mark, self.last_progress = math.inf, self.taken
        self.now = first.detached()
        self.means, self.squares = (Candidate(*(torch.zeros_like(part) for part in first)) for _ in range(2))
        self._ages = torch.zeros_like(self._ages)

    def keep(self, rows: Sequence[int]) -> None:
        """Continue with some candidates only."""
        index = torch.tensor(rows, device=self.now.embeddings.device)
        others = [row for row in range(len(self.best_losses)) if row not in rows]
        if others:
            self.fallen.append(self.now.take(others))
        self.now, self.best = self.now.take(index), self.best.take(index)
        self.means, self.squares = self.means.take(index), self.squares.take(index)
        self._ages = self._ages[index]
        self.best_losses = self.best_losses[index.cpu()]

    def order(self) -> list[int]:
        """Return the candidates' numbers, best first."""
        return [int(number) for number in self.best_losses.argsort()]

    def rearrange(self, row: int, order: Permutation, number: int = 0) -> None:
        """Give the tokens of one sequence another order, with Adam's moments."""
        for parts in (self.now, self.means, self.squares):
            for part, moved in zip(parts, self._matcher.rearranged(parts.take([number]), row, order), strict=True):
                part[number] = moved[0]

    def seat(self, row: int, number: int = 0) -> bool:
        """Assign a candidate's embeddings to other positions, if they are nearer there.

        Nearer to words, that is. The move is taken back if the gradient changes. Returns whether it was taken.
        """
        matcher = self._matcher
        length, places = matcher.lengths[row], matcher.free_places(row)
        if matcher.positions is None or not places:
            return False
        one = self.now.take([number])
        seated = seat(one.embeddings[0, row, :length], places, matcher.positions[:length], matcher.directions)
        if seated.gain <= 0 or seated.order == tuple(range(length)):
            return False
        moved = matcher.rearranged(one, row, seated.order)
        moved.embeddings[0, row, :length] = seated.embeddings
        before, after = matcher.losses(joined([one, moved])).tolist()
        # where both gradients are the observed one as well as floats can tell, their difference is noise
        if not (after <= before + SAME * abs(before) or matcher.explained_by(after)):
            return False
        self.rearrange(row, seated.order, number)
        self.now.embeddings[number] = moved.embeddings[0]
        self.seated += 1
        return True

    def explained(self, number: int = 0) -> bool:
        """Return whether a candidate's tokens have the observed gradient."""
        tokens, _ = self._matcher.tokens(self.now.embeddings[number])
        return self._matcher.explain(tokens, self.now.label_logits[number])

    def settle(self) -> None:
        """Return to the best state of the present descent, unless the last is kept."""
        if self.descent.keep == "best" and bool(self.best_losses.isfinite().all()):
            self.now = self.best.detached()

    def _adam(self, slopes: Candidate) -> None:
        """Take a step of Adam (Kingma and Ba 2015, Algorithm 1).

        The constants are the paper's defaults. Each candidate counts its own steps.
        """
        self._ages += 1
        rate = self.descent.rate(self.taken_now) * self._matcher.unit
        by_embeddings = slopes.embeddings
        if self.descent.clip:
            norms = by_embeddings.flatten(1).norm(dim=1)[:, None, None, None]
            by_embeddings = by_embeddings * (self.descent.clip / norms.clamp_min(1e-12)).clamp(max=1.0)
        by_parts = slopes._replace(embeddings=by_embeddings)
        by_labels = self.descent.label_rate(self.taken_now) if self._optimise_labels else 0.0
        steps = (rate, by_labels, self.descent.mask_rate(self.taken_now))
        parts = zip(self.now, by_parts, self.means, self.squares, steps, strict=True)
        for value, slope, mean, square, step in parts:
            if step == 0.0:
                continue
            age = self._ages.view(-1, *[1] * (value.dim() - 1))
            mean.lerp_(slope, 0.1)
            square.lerp_(slope.square(), 0.001)
            if self.descent.weight_decay and value is self.now.embeddings:
                value.mul_(1 - step * self.descent.weight_decay)
            value.sub_(step * (mean / (1 - 0.9**age)) / ((square / (1 - 0.999**age)).sqrt() + 1e-8))
        self.now.masks.clamp_(0.0, 1.0)  # GRAB, Algorithm 2, line 6

    def _draw_anew(self, rows: Tensor) -> None:
        """Replace candidates whose loss is not finite."""
        self.restarted += len(rows)
        fresh = self._matcher.random(len(rows), self._rng)
        rows = rows.to(self.now.embeddings.device)
        if not self._optimise_labels:
            fresh = fresh._replace(label_logits=self.now.label_logits[rows])
        for value, drawn, mean, square in zip(self.now, fresh, self.means, self.squares, strict=True):
            value[rows], mean[rows], square[rows] = drawn, 0.0, 0.0
        self._ages[rows] = 0.0


class _Shuffler:
    """LAMP's discrete rounds on the only candidate of a run.

    Algorithm 1, lines 7 to 18.
    """

    def __init__(self, matcher: Matcher, rounds: Rounds, rng: torch.Generator) -> None:
        self.rounds = rounds
        self.facts = {"rounds": 0.0, "accepted": 0.0, "candidates": 0.0}
        self._matcher = matcher
        self._rng = rng
        self._best: tuple[float, Candidate] | None = None
        self._last: list[tuple[int, ...]] = []
        self._still = 0
        self.explained = False
        """Whether the best candidate's tokens have the observed gradient."""

    @property
    def settled(self) -> bool:
        """Whether the tokens explain the update, or patience is used up.

        Patience counts rounds in a row that changed nothing.
        """
        return self.explained or 0 < self.rounds.patience <= self._still

    def shuffle(self, run: Run, budget: Budget) -> None:
        """Try new orders of each sequence in turn; take the best if it is better."""
        tokens, _ = self._matcher.tokens(run.now.embeddings[0])
        moved = False
        unlikely = 0.0  # L_lm summed over the sequences that have had their turn, so that the last one's loss is the whole batch's
        for row, sequence in enumerate(tokens):
            if budget.exhausted():
                break
            places = self._matcher.free_places(row)
            orders = draw_orders(places, len(sequence), self.rounds.draws, self._rng)
            tried = [tuple(range(len(sequence))), *orders]
            losses = self._losses(run.now, row, tried).cpu()
            likely = torch.zeros_like(losses)
            if self.rounds.prior is not None:
                texts = [tuple(sequence[order[place]] for place in places) for order in tried]
                likely = torch.tensor(self.rounds.prior.nll(texts), dtype=torch.float64)
                losses += self.rounds.prior_weight * (likely + unlikely) / len(tokens)
            choice = int(losses.nan_to_num(nan=math.inf).argmin())
            self.facts["candidates"] += len(orders)
            unlikely += float(likely[choice])
            if choice:
                run.rearrange(row, tried[choice])
                self.facts["accepted"] += 1
                moved = True
            moved = (self.rounds.seats and run.seat(row)) or moved
            if row == len(tokens) - 1:
                self._note(run, float(losses[choice]))
        self.facts["rounds"] += 1
        tokens, _ = self._matcher.tokens(run.now.embeddings[0])
        self._still = self._still + 1 if not moved and tokens == self._last else 0
        if tokens != self._last:
            self.look(run)
        self._last = tokens

    def look(self, run: Run) -> None:
        """Keep the present candidate as the best if its tokens explain the update."""
        if self.rounds.stop_early and run.explained():
            self.explained = True
            self._best = (-math.inf, run.now.detached())

    def _losses(self, one: Candidate, row: int, orders: Sequence[Permutation]) -> Tensor:
        """Return (N,) losses of the only candidate in each order of a sequence.

        Candidates are made a portion at a time.
        """
        at_once = self._matcher.at_once
        parts = (orders[start : start + at_once] for start in range(0, len(orders), at_once))
        return torch.cat([self._matcher.losses(_with_orders(one, row, part)) for part in parts])

    def best(self, run: Run, budget: Budget) -> Candidate:
        """Return the result of the search, after the remaining rounds.

        With `at-end` all rounds remain; otherwise one, if steps followed the last round.
        """
        at_end = self.rounds.when == "at-end"
        if at_end:
            run.now = run.end
        owed = self.rounds.count(run.descent.steps) if at_end else int(self._best is None or self._unshuffled(run))
        for number in range(owed):
            if self.settled or (number and budget.exhausted()):
                break
            self.shuffle(run, budget)
        if run.descent.keep == "last" and not self.explained:
            return run.now.detached()
        return run.best.detached() if self._best is None else self._best[1]

    def _unshuffled(self, run: Run) -> bool:
        """Return whether the run has taken steps since the last round."""
        return run.taken_now % self.rounds.every > 0

    def redrawn(self, best: Candidate) -> Candidate:
        """Return a candidate with its least certain positions drawn again.

        These are the positions whose embeddings are furthest from any word: two positions share a word there, or none
        was found.
        """
        fresh = self._matcher.random(1, self._rng)
        likeness, _ = self._matcher.nearest(best.embeddings[0])
        changed = best.detached()
        for row in range(len(self._matcher.lengths)):
            places = sorted(self._matcher.free_places(row), key=lambda place: float(likeness[row, place]))
            for place in places[: math.ceil(REDRAWN * len(places))]:
                changed.embeddings[0, row, place] = fresh.embeddings[0, row, place]
        self._still, self._last = 0, []
        self.facts["redrawn"] = self.facts.get("redrawn", 0.0) + 1
        return changed

    def _note(self, run: Run, loss: float) -> None:
        if math.isfinite(loss) and (self._best is None or loss < self._best[0]):
            self._best = (loss, run.now.detached())


def _with_orders(one: Candidate, row: int, orders: Sequence[Permutation]) -> Candidate:
    """Return the only candidate once for each order of one of its sequences."""
    index = torch.tensor(orders, device=one.embeddings.device)  # (N, length)
    embeddings = one.embeddings.repeat(len(orders), 1, 1, 1)
    embeddings[:, row, : index.shape[1]] = one.embeddings[0, row][index]
    return Candidate(embeddings, one.label_logits.expand(len(orders), -1, -1), one.masks.expand(len(orders), -1))


def _rearranged(one: Candidate, orders: Sequence[Permutation]) -> Candidate:
    """Return the only candidate with its sequences in these orders."""
    embeddings = torch.stack([one.embeddings[0, row][list(order)] for row, order in enumerate(orders)])
    return one._replace(embeddings=embeddings[None])
