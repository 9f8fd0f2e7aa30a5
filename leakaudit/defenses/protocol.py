"""What a defence is: a frozen dataclass of knobs that turns what an eavesdropper sees into what is left of it."""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

import torch

from leakaudit.client import ClientStep
from leakaudit.snapshot import Observation


@runtime_checkable
class Defense(Protocol):
    """Registered with `@defense("name")`; its fields are its knobs. At zero strength it is the identity.

    It declares itself in the observation it returns (`Observation.under`), so that attacks know its parameters, as an
    adversary would.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    protects: ClassVar[str]
    """One sentence: what it hides, and from whom."""
    cost: ClassVar[str]
    """One sentence: what it costs the training run."""

    def __call__(self, step: ClientStep, seen: Observation, rng: torch.Generator) -> Observation:
        """Return what would have been sent under this defence. Most need only `seen`; some run `step` again."""
        ...
