"""`round`: send the update in half precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from leakaudit.plugins import ClientStep, Defense, Observation, defense, uncertainties

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@defense("round")
@dataclass(frozen=True)
class Round(Defense):
    """Round every entry to the nearest value of a shorter floating-point format.

    bf16 keeps 8 significant bits (relative error up to 2^-9) over the range of float32; fp16 keeps 11, but entries below 6e-8
    become zero. Its purpose is less traffic. Only the sent update is rounded; the step is computed as it was recorded.
    """

    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Format in which the update is sent. With fp32 the defence does nothing."""

    label: ClassVar[str] = "rounding"
    meaning: ClassVar[str] = "Sends the update in a shorter floating-point format."
    identity: ClassVar[Mapping[str, Any]] = {"dtype": "fp32"}
    source: ClassVar[str] = "common practice; formats: IEEE 754 binary16, bfloat16"
    protects: ClassVar[str] = "Hides the last digits of every entry."
    cost: ClassVar[str] = "None to speak of; half the traffic."

    def __post_init__(self) -> None:
        """Refuse unknown formats."""
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")

    def __call__(self, step: ClientStep, seen: Observation, rng: torch.Generator) -> Observation:
        """Return the rounded update, in float32 again. The result declares `dtype`.

        Raises:
            ValueError: an entry is too large for the format.
        """
        if self.dtype == "fp32":
            return seen
        rounded = {name: self._sent(tensor) for name, tensor in seen.update.items()}
        if not all(bool(torch.isfinite(tensor).all()) for tensor in rounded.values()):
            raise ValueError(f"an entry of the update is too large for {self.dtype}; scale the loss down or use bf16")
        return seen.under(self.declared(), rounded)

    def expected(
        self,
        step: ClientStep,
        recomputed: Mapping[str, Tensor],
        observed: Mapping[str, Tensor],
        tolerance: float,
    ) -> Mapping[str, Tensor]:
        """Return the rounded entries.

        If several values of an entry are possible within its error, the one nearest to the observed value is taken.
        """
        if self.is_identity():
            return recomputed
        off = uncertainties(recomputed, tolerance)
        return {
            name: self._sent(observed[name]).clamp(self._sent(g - off[name]), self._sent(g + off[name]))
            for name, g in recomputed.items()
        }

    def _sent(self, tensor: Tensor) -> Tensor:
        return tensor.to(DTYPES[self.dtype]).float()
