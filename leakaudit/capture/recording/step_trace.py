"""A few entries of weights and gradients at the moments of each optimizer step.

They tell what moved the weights beside the passes of the model: a gradient that an earlier step left, a term of the loss that does not come
through the model's outputs, gradients or weights that the loop changed. `leakaudit.audit.other_terms` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from leakaudit.capture.boundary import entry
from leakaudit.capture.observing.entry_sample import own_part
from leakaudit.capture.recording.live_model import LiveModel
from leakaudit.client.trace import AFTER, BEFORE, END, GIVEN, LATER, MOVED, WEIGHTS
from leakaudit.models.tensors import few_entries

MOST_STEPS = 64
"""Most optimizer steps of a round that are traced. Our choice: for 100 parameters they take 5 MB."""

Entries = list[Tensor | None]
"""Entries of each trained parameter; None stands for a missing gradient."""


@dataclass
class StepTrace:
    """The entries of the optimizer steps that make one step of the audit.

    A defect ends the trace, and the step is kept without it.
    """

    model: LiveModel
    _trained: list[nn.Parameter] = field(default_factory=list)
    _steps: list[dict[str, Entries]] = field(default_factory=list)
    """Moment -> entries, for each optimizer step."""
    _end: Entries = field(default_factory=list)
    _running: bool = False
    """Whether the last of these steps still gets gradients."""
    _failed: bool = False

    @entry
    def forward(self) -> None:
        """Note the weights of a forward pass."""
        if self._failed or (not self._running and len(self._steps) == MOST_STEPS):
            return
        if not self._steps:
            self._trained = self.model.moving()
        if self._running:
            self._steps[-1][LATER] = self._weights()
            return
        now = self._weights()
        self._steps.append({WEIGHTS: now, LATER: now})
        self._running = True

    @entry
    def backward(self, *, empty: bool) -> None:
        """Note the gradients that a backward pass finds, and those that it leaves.

        Args:
            empty: whether it finds none, because the loop zeroed those of earlier passes.
        """
        if not self._running:
            return
        if empty or BEFORE not in self._steps[-1]:
            self._steps[-1][BEFORE] = self._gradients()
        torch.autograd.Variable._execution_engine.queue_callback(self._left)

    @entry
    def _left(self) -> None:
        """Note the gradients at the end of a backward pass, where torch calls this."""
        if self._running:
            self._steps[-1][AFTER] = self._gradients()

    @entry
    def given(self) -> None:
        """Note the gradients that the optimizer is given."""
        if self._running:
            self._steps[-1][GIVEN] = self._gradients()
        self._running = False

    @entry
    def moved(self) -> None:
        """Note the weights after the optimizer has stepped."""
        if self._steps and not self._running and MOVED not in self._steps[-1]:
            self._steps[-1][MOVED] = self._weights()

    @entry
    def ended(self) -> None:
        """Note the weights at the end of a round."""
        if self._steps:
            self._end = self._weights()

    def tensors(self, names: Mapping[int, str]) -> dict[str, Tensor]:
        """Return `moment/parameter` -> (K, n) float32, for `Truth.trace`.

        A missing gradient counts as zero. A parameter whose gradients have another shape, as sparse ones have, is left out.

        Args:
            names: identity of a parameter of the model -> its name.
        """
        if self._failed:
            return {}
        done = [step for step in self._steps if GIVEN in step]
        found: dict[str, Tensor] = {}
        for number, parameter in enumerate(self._trained):
            rows = {
                moment: [step[moment][number] for step in done if moment in step]
                for moment in (WEIGHTS, LATER, BEFORE, AFTER, GIVEN, MOVED)
            }
            rows[END] = self._end[number : number + 1]
            stacked = {moment: _stacked(row, rows[WEIGHTS][:1]) for moment, row in rows.items() if row}
            if id(parameter) in names and all(tensor is not None for tensor in stacked.values()):
                name = names[id(parameter)]
                found |= {f"{moment}/{name}": tensor for moment, tensor in stacked.items() if tensor is not None}
        return found

    def _weights(self) -> Entries:
        return [few_entries(own_part(p)).clone() for p in self._trained]

    def _gradients(self) -> Entries:
        return [None if p.grad is None else few_entries(own_part(p.grad)).clone() for p in self._trained]

    def _fail(self, _error: Exception) -> None:
        """Trace nothing more."""
        self._failed, self._running, self._steps = True, False, []


def _stacked(row: Sequence[Tensor | None], like: Sequence[Tensor | None]) -> Tensor | None:
    """Return the entries of one parameter as (K, n) float32; None if they do not fit."""
    weights = like[0] if like else None
    if weights is None or any(one is not None and one.shape != weights.shape for one in row):
        return None
    return torch.stack([torch.zeros_like(weights).float() if one is None else one.float() for one in row]).cpu()
