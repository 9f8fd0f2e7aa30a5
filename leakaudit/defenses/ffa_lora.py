"""`ffa-lora`: train and send only the second matrix of low-rank adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakaudit.plugins import AdapterDefense, defense


@defense("ffa-lora")
@dataclass(frozen=True)
class FfaLora(AdapterDefense):
    """Freeze A of every adapter, and train and send only B and a classifier's head.

    A is random and public. The gradient of B is s dW A^T: what the adapter reads is seen through A only.
    """

    label: ClassVar[str] = "FFA-LoRA"
    meaning: ClassVar[str] = (
        "Trains and sends only the second matrix of low-rank adapters; the first is frozen and public."
    )
    source: ClassVar[str] = "Sun et al. 2024 (FFA-LoRA), Sec. 4"
    protects: ClassVar[str] = "Never sends a gradient whose rows are combinations of what a layer reads."
    cost: ClassVar[str] = "Half the trained entries of LoRA, so sometimes a slightly worse model."
    only_second: ClassVar[bool] = True
