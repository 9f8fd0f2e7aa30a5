"""The comparison of every entry of a difference of weights with its repetition.

The relative error over all entries hides one wrong entry among millions. A gradient may differ a little in all its entries, but a weight
is a stored number: on the machine that moved it, the repetition is equal to the last bit. On another machine gradients are rounded
otherwise, and the optimizer may magnify that: the first step of Adam moves a weight by the sign of its gradient, however small that is.
So an entry may be where the repetition is, or where it would be with a slightly other gradient, up to the rounding of the weight and a
thousandth of what the weights of its parameter usually move (3 % in bfloat16, the verification's tolerance).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from leakaudit.audit.comparison import Update, UpdateComparison
from leakaudit.client.local_steps import delta_divisor
from leakaudit.client.step import ClientStep

UNITS = 4.0
"""Units in the last place of a weight by which two runs of one local step may differ, if their gradients are equal.

Own derivation: an optimizer of torch rounds a weight at most twice in a step (decay, movement), by half a unit each, in each of two runs.
That is two units; twice that leaves room for kernels that round once more (fused, foreach, another order of operations).
"""

GRADIENT_ERROR = {"bf16": 0.25, "bfloat16": 0.25, "fp16": 0.03, "float16": 0.03, "tf32": 0.03}
"""Largest error of a gradient's entry on another machine, by the coarsest precision of the step.

It is in units of the parameter's largest entry plus the root mean square of all entries. Our choice: eager instead of fused attention on
MiniLM gave 0.13 at most for one parameter under autocast (bf16), and 0.05 for the next one; float16 rounds eight times as finely.
"""

FLOAT32_GRADIENT_ERROR = 1e-5
"""The same for every other precision.

Our choice: two threads instead of one gave at most 4e-6 on MiniLM. Parameters whose gradient is rounding alone, such as the biases of keys,
differ by the whole gradient; for them the root mean square over all entries counts.
"""

INFORMATIVE = 0.5
"""Largest size of what the gradients' error may do to an update, relative to the update, at which the step is verified by it.

Our choice: the update of another batch is further away than its own size.
"""


NOTHING = 1e-3
"""Distance of an entry from its repetition that does not count, as a share of the root mean square of all entries.

Our choice: gradients that are rounding alone, such as those of key biases, are a millionth of the others, and another pass of the
same sums changes them completely.
"""

FEW_SENSITIVE = 100
"""Entries that are sensitive to rounding below which a parameter does not tell whether the machine is another one. Our choice."""

SAME_SHARE = 0.99
"""Share of these entries that are equal to the last bit only on a machine that rounds as the client's did. Our choice."""


ALMOST_SAME = 0.9
"""Smallest cosine at which a note on a mismatch counts the weights that differ. Our choice: below it most of them do."""

OTHER_ROUNDING = (
    "with other rounding of its gradients its optimizer moves the weights otherwise by as much as it moved them; verify it on the kind of "
    "machine that trained"
)
"""Why a difference of weights is unverifiable on another machine."""


@dataclass(frozen=True)
class WeightDifference:
    """An observed difference of weights beside its repetition."""

    step: ClientStep
    observed: Update
    own: Update
    """The repeated difference."""
    tolerance: float
    """Largest relative error over all entries at which two updates count as equal.

    An entry may be off by as much of the root mean square of its parameter's difference. After four steps of AdamW on MiniLM with two
    threads instead of one, entries were off by at most 1e-5 of one learning rate beyond the other allowances.
    """
    precisions: tuple[str, ...]
    """Names of the types in which the step was computed."""

    def strays(self, factor: float = 1.0) -> list[str]:
        """Return the names of parameters with an entry that rounding does not explain.

        Args:
            factor: by which the observed difference is larger than the repeated one.
        """
        plain = self._outside(self.own, self.own, factor)
        return plain and self._outside(*self.bounds, factor)

    def explained(self, error: float, factor: float = 1.0) -> bool:
        """Return whether the observed difference is the repeated one, up to rounding.

        Args:
            error: relative error over all entries.
            factor: by which the observed difference is larger than the repeated one.
        """
        if error <= self.tolerance:
            return not self.strays(factor)
        return self.spread <= INFORMATIVE and not self._outside(*self.bounds, factor)

    def note(self, found: UpdateComparison) -> str:
        """Return which weights differ, if an update is the same but for some entries."""
        if found.cosine < ALMOST_SAME:
            return ""
        names = self.strays()
        return f", but entries of {len(names)} of {len(self.own)} parameters differ by more than rounding (first {min(names)!r})"

    def is_open(self) -> bool:
        """Return whether rounding explains the observed difference, as it may another."""
        return self.spread > INFORMATIVE and not self._outside(*self.bounds, 1.0)

    @cached_property
    def bounds(self) -> tuple[Update, Update]:
        """The smallest and the largest difference that the gradients' rounding leads to.

        The movement of a weight grows with its gradient, so the bounds belong to all gradients moved up, and all moved down.
        """
        error = max(GRADIENT_ERROR.get(name, FLOAT32_GRADIENT_ERROR) for name in self.precisions)
        moved = [self.step.update(gradient_error=share) for share in (error, -error)]
        low = {n: torch.minimum(torch.minimum(moved[0][n], moved[1][n]), own) for n, own in self.own.items()}
        high = {n: torch.maximum(torch.maximum(moved[0][n], moved[1][n]), own) for n, own in self.own.items()}
        return low, high

    @cached_property
    def spread(self) -> float:
        """Distance between the bounds, relative to the repeated difference."""
        low, high = self.bounds
        return UpdateComparison.of(high, low).difference.norm / UpdateComparison.of(self.own, self.own).norm

    @cached_property
    def _floor(self) -> float:
        """Distance of two entries that is nothing beside the whole update."""
        entries = sum(own.numel() for own in self.own.values())
        norm = float(UpdateComparison.of(self.own, self.own).norm)
        return NOTHING * norm / math.sqrt(max(1, entries))

    def _outside(self, low: Update, high: Update, factor: float) -> list[str]:
        """Return the parameters with an entry outside of some bounds."""
        divisor = delta_divisor(self.step.facts)
        units = UNITS * self.step.facts.local_steps
        found = []
        for name, weight in self.step.model.named_parameters():
            if name in self.own:
                seen = self.observed[name] / factor
                usual = float(self.own[name].square().mean().sqrt())
                room = units * _unit(weight.detach(), divisor * seen) / divisor + self.tolerance * usual + self._floor
                wrong = bool(((seen < low[name] - room) | (seen > high[name] + room)).any())
                if wrong or self._repeats_exactly(name, high[name] - low[name] > usual):
                    found.append(name)
        return found

    def _repeats_exactly(self, name: str, sensitive: Tensor) -> bool:
        """Return whether a difference cannot come from the rounding of another machine.

        Such rounding would change most of the entries that are sensitive to it. If they are equal to the last bit, it is not there, and a
        parameter that differs elsewhere was changed.

        Args:
            name: of a parameter.
            sensitive: its entries that rounding of the gradient may move by more than the parameter's usual movement.
        """
        count = int(sensitive.sum())
        same = (self.observed[name] - self.own[name]).abs() <= self._floor
        return count >= FEW_SENSITIVE and not bool(same.all()) and int((same & sensitive).sum()) >= SAME_SHARE * count


def _unit(weight: Tensor, moved: Tensor) -> Tensor:
    """Return a bound of the unit in the last place of each weight, before and after.

    Args:
        weight: before the step.
        moved: float32 movement over all local steps.
    """
    return torch.finfo(weight.dtype).eps * (weight.float().abs() + moved.abs())
