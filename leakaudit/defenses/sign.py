"""`sign`: send only the sign of every entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from leakaudit.client import ClientStep
from leakaudit.registry import defense
from leakaudit.snapshot import DeclaredDefense, Observation


@defense("sign")
@dataclass(frozen=True)
class Sign:
    """Send +1, 0 or -1 for every entry, as signSGD does: all sizes are lost, within a matrix and between matrices.

    An entry that is exactly zero, such as a row of the word embedding without a token, stays zero and says so.
    """

    entries: Literal["all", "none"] = "all"
    """`none`: no defence."""

    source: ClassVar[str] = "signSGD (Bernstein et al. 2018, Algorithm 1)"
    protects: ClassVar[str] = "Hides how large any entry is."
    cost: ClassVar[str] = "Another optimiser: the server sees directions only; a thirty-second of the traffic."

    def __call__(self, step: ClientStep, seen: Observation, rng: torch.Generator) -> Observation:
        """Return the signs. Declares `entries`."""
        if self.entries == "none":
            return seen
        signs = {name: tensor.sign() for name, tensor in seen.update.items()}
        return seen.under(DeclaredDefense(name="sign", parameters={"entries": self.entries}), signs)
