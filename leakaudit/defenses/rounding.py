"""`round`: send the update, or the weights, in half precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from leakaudit.client.local_steps import delta_divisor
from leakaudit.plugins import ClientStep, Defense, Observation, Update, defense, uncertainties

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@defense("round")
@dataclass(frozen=True)
class Round(Defense):
    """Round every entry to the nearest value of a shorter floating-point format.

    bf16 keeps 8 significant bits (relative error up to 2^-9) over the range of float32; fp16 keeps 11, but entries below 6e-8
    become zero. Its purpose is less traffic. Only what is sent is rounded; the step is computed as it was recorded.

    A client of federated learning rounds its weights or their difference, and the update is what the rounded ones tell. The server knows
    the weights before, so it compares with them rounded as well: r(before) - r(after). A weight that moved by less than half a unit of its
    last place then shows nothing, and most others show whole units.
    """

    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Format in which the update is sent. With fp32 the defence does nothing."""
    of: Literal["update", "weights", "differences"] = "update"
    """What is rounded: the update in its own units, the weights after the local steps, or their difference. A gradient is rounded as it is.

    Told from the type of the tensors that were sent, where an integration says what was sent.
    """

    label: ClassVar[str] = "rounding"
    meaning: ClassVar[str] = "Sends the update in a shorter floating-point format."
    identity: ClassVar[Mapping[str, Any]] = {"dtype": "fp32"}
    source: ClassVar[str] = "common practice; formats: IEEE 754 binary16, bfloat16"
    protects: ClassVar[str] = "Hides the last digits of every entry."
    cost: ClassVar[str] = "None to speak of; half the traffic."

    def __post_init__(self) -> None:
        """Refuse unknown formats."""
        if self.of not in ("update", "weights", "differences"):
            raise ValueError(f"of must be update, weights or differences, got {self.of!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")

    @property
    def zeroed(self) -> bool:  # type: ignore[override]  # of the knobs, not of the class
        """Whether an entry that moved a little may be sent as if it had not moved."""
        return self.of == "weights"

    @property
    def on_update(self) -> bool:  # type: ignore[override]  # of the knobs, not of the class
        """Whether the update is rounded, and not the weights or their difference."""
        return self.of == "update"

    def sent_bytes(self, sent: Update) -> float:
        """Return the size of a rounded update, two bytes for an entry in 16 bits."""
        return float(DTYPES[self.dtype].itemsize * sum(tensor.numel() for tensor in sent.values()))

    def changed(self, update: Update, rng: torch.Generator) -> Update:
        """Return the update, each entry rounded, in float32 again.

        Raises:
            ValueError: an entry is too large for the format.
        """
        return self._finite({name: self._sent(tensor) for name, tensor in update.items()})

    def __call__(self, step: ClientStep, seen: Observation, rng: torch.Generator) -> Observation:
        """Return the rounded update, in float32 again. The result declares `dtype`.

        Raises:
            ValueError: an entry is too large for the format.
        """
        if self.dtype == "fp32":
            return seen
        rounded = {n: self._rounded(tensor, *self._wire(step, n)) for n, tensor in seen.update.items()}
        return seen.under(self.declared(), self._finite(rounded))

    def _finite(self, rounded: dict[str, Tensor]) -> dict[str, Tensor]:
        if not all(bool(torch.isfinite(tensor).all()) for tensor in rounded.values()):
            raise ValueError(f"an entry of the update is too large for {self.dtype}; scale the loss down or use bf16")
        return rounded

    def expected(self, step: ClientStep, recomputed: Update, observed: Update, tolerance: float) -> Update:
        """Return the rounded entries.

        If several values of an entry are possible within its error, the one nearest to the observed value is taken.
        """
        if self.is_identity():
            return recomputed
        off = uncertainties(recomputed, tolerance)
        found = {}
        for name, update in recomputed.items():
            before, divisor = self._wire(step, name)
            ends = [self._rounded(update + far, before, divisor) for far in (-off[name], off[name])]
            known = self._sent(before) if isinstance(before, Tensor) else before
            rounded = self._rounded(observed[name], known, divisor).clamp(torch.minimum(*ends), torch.maximum(*ends))
            found[name] = rounded if self.of == "update" else _nearer(observed[name], rounded, update)
        return found

    def _wire(self, step: ClientStep, name: str) -> tuple[Tensor | float, float]:
        """Return what a tensor is rounded around, and the update's unit on the wire.

        A client that sends a gradient has no other units, and rounds the gradient.
        """
        if self.of == "update" or step.facts.view != "delta":
            return 0.0, 1.0
        weights = step.model.get_parameter(name).detach().float() if self.of == "weights" else 0.0
        return weights, delta_divisor(step.facts)

    def _rounded(self, update: Tensor, before: Tensor | float, divisor: float) -> Tensor:
        """Return what the rounded numbers tell of an update."""
        known = self._sent(before) if isinstance(before, Tensor) else before
        return (known - self._sent(before - divisor * update)) / divisor

    def _sent(self, tensor: Tensor) -> Tensor:
        return tensor.to(DTYPES[self.dtype]).float()


def _nearer(observed: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Return the tensor that is nearer to the observed one.

    Some clients round only a part of what they send.
    """
    return one if (one - observed).norm() <= (other - observed).norm() else other
