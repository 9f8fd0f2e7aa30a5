"""`freeze-layers`: train and send only what comes after the first blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from leakaudit.client.other_steps import without_first_blocks
from leakaudit.plugins import ClientStep, StepDefense, defense


@defense("freeze-layers")
@dataclass(frozen=True)
class FreezeLayers(StepDefense):
    """Freeze the first blocks of a transformer and everything before them.

    Embeddings are frozen as well, and an output head that is tied to one. The parts are found by structure, in any architecture with a list of
    blocks. If the client clips, the norm is that of what is left.
    """

    first: int = 1
    """Number of blocks that are frozen, counted from the input; with 0, the defence does nothing. A model with fewer blocks keeps only what
    comes after them."""

    label: ClassVar[str] = "frozen first layers"
    meaning: ClassVar[str] = "Trains and sends only what comes after the first blocks of the model."
    identity: ClassVar[Mapping[str, Any]] = {"first": 0}
    source: ClassVar[str] = "common practice in fine-tuning; Howard and Ruder 2018 (ULMFiT), Sec. 3.3"
    protects: ClassVar[str] = "Hides what the first blocks read from attacks that need inputs close to the tokens."
    cost: ClassVar[str] = "Little for a pretrained model and few blocks; a model trained from scratch cannot learn."

    def __post_init__(self) -> None:
        """Refuse a negative number of blocks."""
        if self.first < 0:
            raise ValueError(f"first must be 0 or more, got {self.first}")

    def changed_step(self, step: ClientStep, rng: torch.Generator) -> ClientStep:
        """Return the step that does not train the first blocks."""
        return without_first_blocks(step, self.first)
