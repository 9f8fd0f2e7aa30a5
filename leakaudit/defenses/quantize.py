"""`quantize`: send every entry as one of a few evenly spaced values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from leakaudit.plugins import ClientStep, Defense, Update, defense, uncertainties
from leakaudit.plugins.defense_protocol import FLOAT_BYTES

EXACT_BITS = 32
"""Bits of an entry of the update; with this number, nothing is quantised."""


@defense("quantize")
@dataclass(frozen=True)
class Quantize(Defense):
    """Round every entry at random to one of its two neighbouring levels.

    The levels of a tensor are k / s times its largest magnitude, for k = -s .. s with s = 2^(bits - 1) - 1. The closer an entry is to a
    level, the more likely it is rounded to it, so that the update stays unbiased.
    """

    bits: int = 8
    """Bits of an entry, its sign included: 2 to 16. With 32 the defence does nothing."""

    label: ClassVar[str] = "quantisation"
    meaning: ClassVar[str] = "Rounds every entry of the update at random to one of a few evenly spaced values."
    identity: ClassVar[Mapping[str, Any]] = {"bits": EXACT_BITS}
    on_update = True
    source: ClassVar[str] = "after QSGD (Alistarh et al. 2017); levels relative to the largest magnitude: our choice"
    protects: ClassVar[str] = "Hides small differences; with few bits most small entries become zero."
    cost: ClassVar[str] = "Noisier training at few bits; the traffic shrinks with them."

    def __post_init__(self) -> None:
        """Refuse a number of bits outside the range."""
        if self.bits != EXACT_BITS and not 2 <= self.bits <= 16:
            raise ValueError(f"bits must be 2 to 16, or {EXACT_BITS} for none, got {self.bits}")

    def changed(self, update: Update, rng: torch.Generator) -> Update:
        """Return the quantised update.

        `rng` draws the roundings in the order of the update's names.
        """
        steps = 2 ** (self.bits - 1) - 1

        def quantised(tensor: Tensor) -> Tensor:
            largest = tensor.abs().max() if tensor.numel() else torch.tensor(0.0)
            if not bool(largest > 0):
                return tensor
            chance = torch.rand(tensor.shape, generator=rng, device=rng.device).to(tensor.device)
            levels: Tensor = (tensor / largest * steps + chance).floor().clamp(-steps, steps)
            sent: Tensor = levels * (largest / steps)
            return sent

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
        steps, off = 2 ** (self.bits - 1) - 1, uncertainties(recomputed, tolerance)

        def nearest(name: str, gradient: Tensor) -> Tensor:
            level = gradient.abs().max() / steps if gradient.numel() else torch.tensor(0.0)
            if not bool(level > 0):
                return gradient
            below, above = ((gradient - off[name]) / level).floor(), ((gradient + off[name]) / level).ceil()
            sent: Tensor = (observed[name] / level).round().clamp(below, above).clamp(-steps, steps) * level
            return sent

        return {name: nearest(name, gradient) for name, gradient in recomputed.items()}
