"""The continuous part of the search: Adam on several candidates at once.

Letters: N candidates, B sequences, T tokens, D hidden size, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leakaudit.algorithms.matching.candidates import Candidate, joined
from leakaudit.algorithms.matching.matcher import Matcher
from leakaudit.algorithms.matching.permutations import Permutation
from leakaudit.algorithms.matching.position_assignment import assign_positions

IMPROVEMENT = 1e-3
"""Relative fall of the loss that counts as progress. Our choice."""


LABEL_STEP = 0.1
"""Adam's step for unknown label logits by default. Our choice: a label can change within twenty steps."""


SAME = 0.05
"""Largest relative rise of the loss at a move to other positions. Our choice: such a move does not change the gradient, but it
changes the regulariser."""


Keep = Literal["best", "best-step", "last"]


@dataclass(frozen=True)
class Descent:
    """Settings of the continuous part."""

    steps: int
    learning_rate: float
    """Adam's step at the start, in units of `Matcher.unit`: the root mean square of the word embedding's entries, or 1."""
    decay: float = 1.0
    """Factor on the step every `decay_every` steps; 1 for none."""
    decay_every: int = 50
    linear: bool = False
    """Let the step fall linearly to zero instead (BERT-large in LAMP, Sec. 5)."""
    weight_decay: float = 0.0
    """Weight decay of AdamW."""
    clip: float = 0.0
    """Norm to which the derivative by a candidate's embeddings is clipped; 0 for no clipping (BERT-large in LAMP, App. D)."""
    patience: int = 0
    """The search stops after more than this many steps without a lower loss; 0 for never."""
    label_step: float | None = None
    """Adam's step for unknown label logits at the start; it falls with that of the embeddings. None takes `LABEL_STEP` in all steps."""
    mask_step: float = 0.0
    """Adam's step for dropout masks at the start; it falls with that of the embeddings."""
    keep: Keep = "best"
    """End with the state that had the lowest loss (`best`, `best-step`), or with the `last`, as LAMP's Algorithm 1 does."""

    def label_rate(self, taken: int) -> float:
        """Return Adam's step for labels after a number of steps."""
        return LABEL_STEP if self.label_step is None else self.label_step * self.rate(taken) / self.learning_rate

    def mask_rate(self, taken: int) -> float:
        """Return Adam's step for masks after a number of steps."""
        return self.mask_step * self.rate(taken) / self.learning_rate

    def rate(self, taken: int) -> float:
        """Return Adam's step for embeddings after a number of steps."""
        if self.linear:
            return self.learning_rate * (1 - taken / self.steps)
        return self.learning_rate * self.decay ** (taken // self.decay_every)


class Run:
    """Several candidates that Adam moves at once, and the best state of each."""

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
        """Number of steps in all descents."""
        self.taken_now = 0
        """Number of steps in the present descent."""
        self.last_progress = 0
        """Step at which the loss last fell noticeably."""
        self.restarted = 0
        """Number of candidates that were replaced because their loss was not finite."""
        self.position_moves = 0
        """How often the embeddings of a sequence moved to other positions."""
        self.dropped: list[Candidate] = []
        """Candidates that were dropped, in their state at that time."""
        self._matcher = matcher
        self._rng = rng
        self._optimise_labels = optimise_labels
        self.means = Candidate(*(torch.zeros_like(part) for part in first))
        self.squares = Candidate(*(torch.zeros_like(part) for part in first))
        self._ages = torch.zeros(len(first.embeddings), device=first.embeddings.device)
        self._mark = math.inf

    @property
    def stalled(self) -> bool:
        """Whether more than `patience` steps have not lowered the loss noticeably."""
        return 0 < self.descent.patience < self.taken - self.last_progress

    @property
    def end(self) -> Candidate:
        """The candidates that the descent ends with."""
        return (self.now if self.descent.keep == "last" else self.best).detached()

    def facts(self, loss: float) -> dict[str, float]:
        """Return the diagnostics of the run.

        They include the loss of the result if it is finite.
        """
        facts = {
            "steps": float(self.taken),
            "restarted": float(self.restarted),
            "halved": float(self._matcher.chunks.halvings),
        }
        return facts | ({"loss": loss} if math.isfinite(loss) else {})

    def step(self) -> None:
        """Take one step; first store each candidate that is the best so far."""
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

    def begin(self, descent: Descent, first: Candidate) -> None:
        """Begin another descent with a fresh optimizer state.

        The best states of earlier descents are discarded.

        Args:
            descent: its settings.
            first: the candidates to start from.
        """
        self.descent, self.taken_now = descent, 0
        self.best, self.best_losses = first.detached(), torch.full_like(self.best_losses, math.inf)
        self._mark, self.last_progress = math.inf, self.taken
        self.now = first.detached()
        self.means, self.squares = (Candidate(*(torch.zeros_like(part) for part in first)) for _ in range(2))
        self._ages = torch.zeros_like(self._ages)

    def keep(self, rows: Sequence[int]) -> None:
        """Continue with these candidates only."""
        index = torch.tensor(rows, device=self.now.embeddings.device)
        others = [row for row in range(len(self.best_losses)) if row not in rows]
        if others:
            self.dropped.append(self.now.take(others))
        self.now, self.best = self.now.take(index), self.best.take(index)
        self.means, self.squares = self.means.take(index), self.squares.take(index)
        self._ages = self._ages[index]
        self.best_losses = self.best_losses[index.cpu()]

    def order(self) -> list[int]:
        """Return the candidates' numbers, best first."""
        return [int(number) for number in self.best_losses.argsort()]

    def rearrange(self, row: int, order: Permutation, number: int = 0) -> None:
        """Reorder the tokens of one sequence, together with Adam's moments."""
        for parts in (self.now, self.means, self.squares):
            for part, moved in zip(
                parts, self._matcher.candidates.rearranged(parts.take([number]), row, order), strict=True
            ):
                part[number] = moved[0]

    def assign_positions(self, row: int, number: int = 0) -> bool:
        """Move a candidate's embeddings to positions where they are nearer to words.

        The move is not made if the loss rises noticeably. Return whether it was made.
        """
        matcher = self._matcher
        length, places = matcher.lengths[row], matcher.free_places(row)
        if matcher.positions is None or not places:
            return False
        one = self.now.take([number])
        assigned = assign_positions(
            one.embeddings[0, row, :length], places, matcher.positions[:length], matcher.directions
        )
        if assigned.gain <= 0 or assigned.order == tuple(range(length)):
            return False
        moved = matcher.candidates.rearranged(one, row, assigned.order)
        moved.embeddings[0, row, :length] = assigned.embeddings
        before, after = matcher.losses(joined([one, moved])).tolist()
        # if the new loss is only rounding, a relative rise says nothing
        if not (after <= before + SAME * abs(before) or matcher.explained_by(after)):
            return False
        self.rearrange(row, assigned.order, number)
        self.now.embeddings[number] = moved.embeddings[0]
        self.position_moves += 1
        return True

    def explained(self, number: int = 0) -> bool:
        """Return whether a candidate's tokens have the observed gradient."""
        tokens, _ = self._matcher.tokens(self.now.embeddings[number], self.now.label_logits[number])
        return self._matcher.explain(tokens, self.now.label_logits[number])

    def settle(self) -> None:
        """Return to the best state, unless the descent keeps the last one."""
        if self.descent.keep != "last" and bool(self.best_losses.isfinite().all()):
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
        fresh = self._matcher.candidates.random(len(rows), self._rng)
        rows = rows.to(self.now.embeddings.device)
        if not self._optimise_labels:
            fresh = fresh._replace(label_logits=self.now.label_logits[rows])
        for value, drawn, mean, square in zip(self.now, fresh, self.means, self.squares, strict=True):
            value[rows], mean[rows], square[rows] = drawn, 0.0, 0.0
        self._ages[rows] = 0.0
