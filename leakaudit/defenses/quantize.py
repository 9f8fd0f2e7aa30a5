"""`quantize`: send every entry as one of a few evenly spaced values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from leakaudit.plugins import (
    ClientStep,
    Defense,
    Update,
    at_levels,
    defense,
    possible_levels,
    uniform_draws,
)
from leakaudit.plugins.defense_protocol import FLOAT_BYTES

Rounding = Literal["random", "nearest"]

EXACT_BITS = 32
"""Bits of an entry of the update; with this number, nothing is quantised."""


@defense("quantize")
@dataclass(frozen=True)
class Quantize(Defense):
    """Round every entry to one of its two neighbouring levels.

    The levels of a tensor are k / s times its largest magnitude, for k = -s .. s with s = 2^(bits - 1) - 1. With `rounding=random`, the
    closer an entry is to a level, the more likely it is rounded to it, so that the update stays unbiased. With `bits=8, rounding=nearest`
    these are the integers of 8 bits that quantised deltas are usually sent as: symmetric, with one scale for each tensor.
    """

    bits: int = 8
    """Bits of an entry, its sign included: 2 to 16. With 32 the defence does nothing."""
    rounding: Rounding = "random"
    """Whether an entry becomes one of its neighbours at random, or the nearest one."""

    label: ClassVar[str] = "quantisation"
    meaning: ClassVar[str] = "Rounds every entry of the update to one of a few evenly spaced values."
    identity: ClassVar[Mapping[str, Any]] = {"bits": EXACT_BITS}
    on_update = True
    source: ClassVar[str] = (
        "after QSGD (Alistarh et al. 2017), with levels relative to the largest magnitude; nearest rounding: common practice"
    )
    protects: ClassVar[str] = "Hides small differences; with few bits most small entries become zero."
    cost: ClassVar[str] = "Noisier training at few bits; the traffic shrinks with them."

    def __post_init__(self) -> None:
        """Refuse a number of bits outside the range, and an unknown rounding."""
        if self.bits != EXACT_BITS and not 2 <= self.bits <= 16:
            raise ValueError(f"bits must be 2 to 16, or {EXACT_BITS} for none, got {self.bits}")
        if self.rounding not in get_args(Rounding):
            raise ValueError(f"rounding must be one of {', '.join(get_args(Rounding))}, got {self.rounding!r}")

    def changed(self, update: Update, rng: torch.Generator) -> Update:
        """Return the quantised update.

        `rng` draws the roundings in the order of the update's names.
        """

        def quantised(tensor: Tensor) -> Tensor:
            level = self._level(tensor)
            if not bool(level > 0):
                return tensor
            chance = 0.5 if self.rounding == "nearest" else uniform_draws(tensor, rng)
            return at_levels(tensor, level, chance).clamp(-self._steps * level, self._steps * level)

        return {name: quantised(tensor) for name, tensor in update.items()}

    def sent_bytes(self, sent: Update) -> float:
        """Return the size of a quantised update, in bytes.

        It is `bits` for each entry and one float32 for the largest magnitude of each tensor.
        """
        if self.is_identity():
            return super().sent_bytes(sent)
        return sum(tensor.numel() * self.bits / 8 + FLOAT_BYTES for tensor in sent.values())

    def expected(self, step: ClientStep, recomputed: Update, observed: Update, tolerance: float) -> Update:
        """Return for each entry the possible level nearest to the observed value."""
        if self.is_identity():
            return recomputed
        near = self.rounding == "nearest"
        return possible_levels(recomputed, observed, tolerance, self._level, nearest=near, most=self._steps)

    @property
    def _steps(self) -> int:
        return int(2 ** (self.bits - 1) - 1)

    def _level(self, tensor: Tensor) -> Tensor:
        return tensor.abs().max() / self._steps if tensor.numel() else torch.tensor(0.0)
