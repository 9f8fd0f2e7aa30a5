"""The cause of an update that is not what its batch alone gives.

A recorder notes a few entries of weights and gradients at the moments of each optimizer step (`leakaudit.client.trace`). They show whether
the update is what the client's training made of the kept batch and of something else, and what that was: a gradient that an earlier step
left, a term of the loss beside the model's outputs (FedProx), gradients that the loop changed (clipping by value), weights that it changed
(SCAFFOLD). An update that the record does not explain has no cause here, and stays a mismatch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from leakaudit.audit.accuracy import Accuracy
from leakaudit.audit.comparison import Update
from leakaudit.client.local_steps import delta_divisor
from leakaudit.client.per_example import NORM_FLOOR
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.step import ClientStep
from leakaudit.client.trace import AFTER, BEFORE, END, GIVEN, LATER, MOMENTS, MOVED, WEIGHTS
from leakaudit.models.tensors import few_entries

EXPLAINED = 0.02
"""Largest part of a difference that a cause may leave over, as a share of its norm. Our choice: the cosine is then above 0.9997, which two
unrelated vectors of 24 entries do not reach."""

FEWEST = 24
"""Fewest entries that show a cause. Our choice: fewer are too easily explained."""

ROUNDING = 1e-5
"""Relative error of entries that were noted and computed in float32. Our choice: about a hundred units in the last place."""


def other_term(client: ClientStep, observed: Update) -> str:
    """Return what else made an update, as a clause; "" if the record does not tell.

    Args:
        client: the step with the trace of its recording.
        observed: parameter name -> observed update.
    """
    trace = client.truth.trace
    names = [name for name in observed if f"{GIVEN}/{name}" in trace]
    if not names or sum(trace[f"{WEIGHTS}/{name}"].shape[1] for name in names) < FEWEST:
        return ""
    return _Record(client, observed, names).cause()


@dataclass(frozen=True)
class _Record:
    """What was noted of a step, beside what its batch gives."""

    client: ClientStep
    observed: Update
    names: list[str]

    def cause(self) -> str:
        """Return the first thing that the batch does not explain, as a clause."""
        if not self._is_of_this_update():
            return ""
        replay = self._replayed()
        steps = len(self._at(GIVEN))
        for number in range(min(steps, len(replay.gradients))):
            here = f"optimizer step {number + 1} of {steps}" if steps > 1 else "the optimizer step"
            if number and (found := self._weights_changed(number - 1, self._at(WEIGHTS)[number])):
                return f"{found} between optimizer steps, first before {here}"
            if not torch.equal(self._at(LATER)[number], self._at(WEIGHTS)[number]):
                return f"the forward passes of {here} saw different weights, as in SAM"
            if not self._close(replay.weights[number], self._at(WEIGHTS)[number]):
                return ""
            known, found = self._gradient_cause(number, replay)
            if found:
                return f"in {here} {found}"
            if not known:
                return ""
        if (
            self._is_round
            and self._at(MOVED).shape[0] == steps
            and (found := self._weights_changed(steps - 1, self._end))
        ):
            return f"{found} after the last optimizer step"
        return ""

    # ------------------------------------------------------------------ one step

    def _gradient_cause(self, number: int, replay: _Replay) -> tuple[bool, str]:
        """Return whether the record of a gradient is understood, and a cause.

        Args:
            number: of the optimizer step, counted from 0.
            replay: what the kept batch gives.
        """
        own = replay.gradients[number]
        before, after = self._of_loss(BEFORE)[number], self._of_loss(AFTER)[number]
        given = self._at(GIVEN)[number]
        if not self._close(after - before, own):
            term = self._term_of_loss(number, after - before - own)
            return bool(term), term
        if bool(before.any()):
            return True, "a gradient of an earlier step was still there, as without `zero_grad`"
        if self._close(given, replay.clipped(number, after, self.client.recipe)):
            return True, ""
        return True, f"the loop changed the gradients after the backward pass{self._change(number, after, given)}"

    def _term_of_loss(self, number: int, rest: Tensor) -> str:
        """Return the term of a loss that gives the rest of a gradient, or ""."""
        weights, start = self._at(WEIGHTS)[number], self._at(WEIGHTS)[0]
        if number and (factor := _factor(rest, weights - start)):
            return f"the loss had a penalty on the distance from the first weights of the round, as FedProx with mu = {factor:.3g}"
        held = self._holding(rest, beside=self._of_loss(AFTER)[number])
        if int(held.sum()) < FEWEST:
            return ""
        for part, kind in ((weights, "weights"), (weights.sign(), "signs")):
            if (factor := _factor(rest[held], part[held])) > 0:
                return f"the loss had a penalty on the weights, whose gradient is {factor:.3g} times their {kind}"
        return ""

    def _change(self, number: int, after: Tensor, given: Tensor) -> str:
        """Return what a loop made of a gradient, as the end of a clause."""
        factor = float(given @ after) / float(after @ after)
        if factor > 0 and self._close(given, factor * after):
            return f": it multiplied them by {factor:.3g}, as clipping by norm or a GradScaler that the audit was not told of"
        bound = float(given.abs().max())
        if _explains(after.clamp(-bound, bound), after, given):
            return f": it cut every entry to at most {bound:.3g}, as clipping by value does"
        added = given - after
        if number and (factor := _factor(added, self._at(WEIGHTS)[number] - self._at(WEIGHTS)[0])):
            return f": it added {factor:.3g} times the distance from the first weights of the round, as FedProx does"
        if len(self._at(GIVEN)) > 1 and self._is_constant():
            return ": it added the same vector in every optimizer step, as the control variates of SCAFFOLD"
        return " in a way that is not known here"

    def _is_constant(self) -> bool:
        """Return whether the loop added one vector to the gradients of all steps."""
        added = self._at(GIVEN) - self._of_loss(AFTER)
        mean = added.mean(0)
        return float((added - mean).norm()) <= EXPLAINED * float(added.norm())

    def _weights_changed(self, number: int, later: Tensor) -> str:
        """Return how weights changed after an optimizer step, as a clause, or ""."""
        moved = self._at(MOVED)[number]
        if torch.equal(later, moved):
            return ""
        change, start = later - moved, self._at(WEIGHTS)[0]
        bound = float(later.abs().max())
        if _explains(moved.clamp(-bound, bound), moved, later):
            return f"the loop cut the weights to at most {bound:.3g}"
        if (factor := _factor(change, start - moved)) > 0:
            return f"the loop pulled the weights back to the first ones of the round by {factor:.3g} of the distance"
        return "the loop changed the weights (SCAFFOLD, averages of weights)"

    # ------------------------------------------------------------------ the record

    def _is_of_this_update(self) -> bool:
        """Return whether the record belongs to the observed update.

        Else the update was exchanged after the recording.
        """
        observed = torch.cat([few_entries(self.observed[name]).float() for name in self.names])
        if not self._is_round:
            return self._close(observed, self._at(GIVEN)[0])
        if f"{END}/{self.names[0]}" not in self.client.truth.trace:
            return False
        moved = (self._at(WEIGHTS)[0] - self._end) / delta_divisor(self.client.facts)
        return self._close(observed, moved)

    @property
    def _is_round(self) -> bool:
        return self.client.facts.view == "delta"

    def _at(self, moment: str) -> Tensor:
        """Return (K, N) the entries at a moment."""
        return self._moments[moment]

    def _of_loss(self, moment: str) -> Tensor:
        """Return (K, N) gradients at a moment, without the factor of a GradScaler."""
        return self._at(moment) / self.client.recipe.loss_scale

    @cached_property
    def _moments(self) -> Mapping[str, Tensor]:
        trace = self.client.truth.trace
        return {
            moment: torch.cat([trace[f"{moment}/{name}"] for name in self.names], 1)
            for moment in MOMENTS
            if all(f"{moment}/{name}" in trace for name in self.names)
        }

    @property
    def _end(self) -> Tensor:
        return self._at(END)[0]

    def _replayed(self) -> _Replay:
        found = _Replay(self.names)
        self.client.update(notice=found.note)
        return found

    # ------------------------------------------------------------------ comparison

    def _close(self, one: Tensor, other: Tensor, beside: Tensor | None = None) -> bool:
        """Return whether two vectors are equal, up to the rounding of the step.

        Args:
            one: (N,) entries.
            other: (N,) entries.
            beside: (N,) to whose norm the rounding is relative; None for `other`.
        """
        limit = max(ROUNDING, Accuracy.of(self.client).largest)
        return float((one - other).norm()) <= limit * float((other if beside is None else beside).norm())

    def _holding(self, rest: Tensor, beside: Tensor) -> Tensor:
        """Return (N,) bool, the entries of the parameters whose gradient has a rest.

        Args:
            rest: (N,) of the gradient.
            beside: (N,) the gradient itself.
        """
        sizes = [self.client.truth.trace[f"{WEIGHTS}/{name}"].shape[1] for name in self.names]
        pairs = zip(rest.split(sizes), beside.split(sizes), strict=True)
        return torch.cat([torch.full_like(one, not self._close(one, 0 * one, beside=two)) for one, two in pairs]).bool()


@dataclass
class _Replay:
    """A few entries of each optimizer step while it is computed again."""

    names: list[str]
    weights: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    """Before clipping."""
    norms: list[float] = field(default_factory=list)
    """Norm of each of these gradients, over all entries of all parameters."""

    def note(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Note the weights and the gradient of an optimizer step."""
        held = [parameters[name] for name in self.names]
        self.weights.append(torch.cat([few_entries(p).float().clone() for p in held]))
        zeros = [torch.zeros_like(p) if p.grad is None else p.grad for p in held]
        self.gradients.append(torch.cat([few_entries(gradient).float().clone() for gradient in zeros]))
        whole = [float(p.grad.float().norm()) for p in parameters.values() if p.grad is not None]
        self.norms.append(math.hypot(*whole))

    def clipped(self, number: int, gradient: Tensor, recipe: StepRecipe) -> Tensor:
        """Return entries of an optimizer step's gradient after the clipping of the recipe.

        Args:
            number: of the optimizer step, counted from 0.
            gradient: (N,) before clipping.
            recipe: of the step.
        """
        if recipe.max_grad_norm:
            gradient = gradient * min(1.0, recipe.max_grad_norm / (self.norms[number] + NORM_FLOOR))
        bound = recipe.max_grad_value
        return gradient.clamp(-bound, bound) if bound else gradient


def _explains(guess: Tensor, before: Tensor, after: Tensor) -> bool:
    """Return whether a guess of what vectors became explains their change."""
    return float((guess - after).norm()) <= EXPLAINED * float((before - after).norm())


def _factor(vector: Tensor, along: Tensor) -> float:
    """Return the number that makes one vector of another one; 0 if none does."""
    length = float(along @ along)
    if not length:
        return 0.0
    factor = float(vector @ along) / length
    return factor if float((vector - factor * along).norm()) <= EXPLAINED * float(vector.norm()) else 0.0
