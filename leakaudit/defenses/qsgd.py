"""`qsgd`: round every entry at random to levels of its tensor's norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

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


@defense("qsgd")
@dataclass(frozen=True)
class Qsgd(Defense):
    """Round every entry at random to a level of the L2 norm of its tensor.

    An entry v of a tensor with norm n is sent as n sign(v) k / s. k is one of the two integers around s |v| / n, drawn so that the mean
    is v (Alistarh et al. 2017, Sec. 3.1). Most entries of a large tensor become zero: of n entries at most s (s + sqrt(n)) are not, on
    average (Lemma 3.1). `quantize` relates its levels to the largest entry instead, and keeps far more of them.
    """

    levels: int = 7
    """s: levels above zero, up to the norm; 0 does nothing. Our choice of 7: with its sign, an entry is then one of 15 values of 4 bits."""

    label: ClassVar[str] = "QSGD"
    meaning: ClassVar[str] = "Rounds every entry at random to one of a few fractions of the norm of its tensor."
    identity: ClassVar[Mapping[str, Any]] = {"levels": 0}
    on_update = True
    source: ClassVar[str] = "QSGD (Alistarh et al. 2017, Sec. 3.1), one bucket for each tensor"
    protects: ClassVar[str] = "Hides the size of all but the largest entries; most others become zero."
    cost: ClassVar[str] = "Noisier training at few levels; the traffic shrinks to the entries that are not zero."

    def __post_init__(self) -> None:
        """Refuse a negative number of levels."""
        if self.levels < 0:
            raise ValueError(f"levels must be 1 or more, or 0 for none, got {self.levels}")

    def changed(self, update: Update, rng: torch.Generator) -> Update:
        """Return the rounded update.

        `rng` draws the roundings in the order of the update's names.
        """

        def rounded(tensor: Tensor) -> Tensor:
            level = self._level(tensor)
            return at_levels(tensor, level, uniform_draws(tensor, rng)) if bool(level > 0) else tensor

        return {name: rounded(tensor) for name, tensor in update.items()}

    def sent_bytes(self, sent: Update) -> float:
        """Return the size of an update, in bytes.

        Each entry is one of 2 s + 1 values, and each tensor has its norm in float32.
        """
        if self.is_identity():
            return super().sent_bytes(sent)
        bits = math.ceil(math.log2(2 * self.levels + 1))
        return sum(tensor.numel() * bits / 8 + FLOAT_BYTES for tensor in sent.values())

    def expected(self, step: ClientStep, recomputed: Update, observed: Update, tolerance: float) -> Update:
        """Return for each entry the possible level nearest to the observed value."""
        if self.is_identity():
            return recomputed
        return possible_levels(recomputed, observed, tolerance, self._level)

    def _level(self, tensor: Tensor) -> Tensor:
        level: Tensor = (tensor.double().norm() / (self.levels or math.inf)).to(tensor)
        return level
