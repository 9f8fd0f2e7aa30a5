"""LAMP's discrete rounds: new token orders and positions during a descent.

Letters: N candidates, B sequences, T tokens, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leakaudit.algorithms.matching.candidates import Candidate
from leakaudit.algorithms.matching.descent import Run
from leakaudit.algorithms.matching.matcher import Matcher
from leakaudit.algorithms.matching.permutations import Permutation, draw_orders
from leakaudit.plugins.budget import Budget
from leakaudit.plugins.prior_protocol import Scorer


@dataclass(frozen=True)
class Rounds:
    """Settings of the discrete part."""

    every: int
    """n_c: steps between two rounds."""
    draws: int
    """n_d: random transformations of each sequence in a round."""
    when: Literal["alternate", "at-end"] = "alternate"
    after: float = 0.0
    """Share of the steps that are taken before the first round."""
    seats: bool = True
    """Also move embeddings together with their positions (`position_assignment`)."""
    prior: Scorer | None = None
    prior_weight: float = 0.0
    """alpha_lm."""
    patience: int = 0
    """A descent ends after this many rounds in a row without a change of tokens or orders; 0 for never."""
    stop_early: bool = True
    """End as soon as the tokens explain the update."""
    words: int = 0
    """Most nearest words that are tried at each position after the last step (`token_refinement`), with the words of
    dropped restarts; 0 takes the nearest word."""

    def count(self, steps: int) -> int:
        """Return the number of rounds for a number of steps.

        There is one round after every `every` steps, and one after the remaining steps. The steps before the first round do not count.
        """
        return math.ceil((1 - self.after) * steps / self.every)

    def due(self, taken: int, steps: int) -> bool:
        """Return whether a round follows after so many of all steps."""
        return self.when == "alternate" and taken % self.every == 0 and taken >= self.after * steps

    @property
    def positions_every(self) -> int:
        """Steps after which parallel restarts try other positions; 0 for never."""
        return self.every if self.seats and self.when == "alternate" else 0


class PermutationRounds:
    """LAMP's discrete rounds on the only candidate of a run.

    Algorithm 1, lines 7 to 18.
    """

    def __init__(self, matcher: Matcher, rounds: Rounds, rng: torch.Generator) -> None:
        """Prepare the rounds; nothing is permuted yet."""
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

    def run_round(self, run: Run, budget: Budget) -> None:
        """Try new orders of each sequence in turn, and keep the best one."""
        tokens, _ = self._matcher.tokens(run.now.embeddings[0], run.now.label_logits[0])
        moved = False
        unlikely = 0.0  # L_lm of the sequences so far; with it, the loss at the last sequence is that of the batch
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
            moved = (self.rounds.seats and run.assign_positions(row)) or moved
            if row == len(tokens) - 1:
                self._note(run, float(losses[choice]))
        self.facts["rounds"] += 1
        tokens, _ = self._matcher.tokens(run.now.embeddings[0], run.now.label_logits[0])
        self._still = self._still + 1 if not moved and tokens == self._last else 0
        if tokens != self._last:
            self.check_explained(run)
        self._last = tokens

    def check_explained(self, run: Run) -> None:
        """Store the present candidate as the best if its tokens explain the update."""
        if self.rounds.stop_early and run.explained():
            self.explained = True
            self._best = (-math.inf, run.now.detached())

    def _losses(self, one: Candidate, row: int, orders: Sequence[Permutation]) -> Tensor:
        """Return (N,) losses of the only candidate in each order of a sequence.

        Only as many candidates are made at a time as run at once.
        """
        at_once = self._matcher.at_once
        parts = (orders[start : start + at_once] for start in range(0, len(orders), at_once))
        device = one.embeddings.device
        return torch.cat(
            [self._matcher.losses(one.in_orders(row, torch.tensor(part, device=device))) for part in parts]
        )

    def result(self, run: Run, budget: Budget) -> Candidate:
        """Run the remaining rounds, and return the result of the search.

        With `at-end` all rounds remain. Otherwise one round remains if steps followed the last round, or if no round has stored a
        candidate; none, if the best of all steps is kept.
        """
        at_end, keep = self.rounds.when == "at-end", run.descent.keep
        if keep == "best-step" and not at_end and not self.explained:
            return run.end
        if at_end:
            run.now = run.end
        owed = (
            self.rounds.count(run.descent.steps) if at_end else int(self._best is None or self._steps_since_round(run))
        )
        for number in range(owed):
            if self.settled or (number and budget.exhausted()):
                break
            self.run_round(run, budget)
        if keep != "best" and not self.explained:
            return run.now.detached()
        return run.best.detached() if self._best is None else self._best[1]

    def _steps_since_round(self, run: Run) -> bool:
        """Return whether the run has taken steps since the last round."""
        return run.taken_now % self.rounds.every > 0

    def _note(self, run: Run, loss: float) -> None:
        if math.isfinite(loss) and (self._best is None or loss < self._best[0]):
            self._best = (loss, run.now.detached())
