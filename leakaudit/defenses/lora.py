"""`lora`: train and send low-rank adapters instead of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakaudit.plugins import AdapterDefense, defense


@defense("lora")
@dataclass(frozen=True)
class Lora(AdapterDefense):
    """Train and send both matrices of low-rank adapters, and a classifier's head.

    The gradient of B is s dW A^T and that of A is s B^T dW, with the scale s and the gradient dW of the adapted matrix.
    """

    label: ClassVar[str] = "LoRA"
    meaning: ClassVar[str] = "Trains and sends low-rank adapters beside the frozen matrices of the model."
    source: ClassVar[str] = "Hu et al. 2022 (LoRA), Sec. 4.1; adapters as in peft"
    protects: ClassVar[str] = "Sends R directions of each matrix's gradient instead of all, which hides long batches."
    cost: ClassVar[str] = "Little where the model is pretrained; saves memory and traffic."
