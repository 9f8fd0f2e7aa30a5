"""`undefended`: the update without the defence of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from leakaudit.plugins import ClientStep, Defense, Observation, check_finite, defense


@defense("undefended")
@dataclass(frozen=True)
class Undefended(Defense):
    """Send the update without the defence that the run declares.

    A comparison with the update as it was sent shows the effect of that defence. If the run declares no defence, this is the sent update
    itself.
    """

    label: ClassVar[str] = "undefended"
    meaning: ClassVar[str] = "Takes the defence of the run away, to show what that defence hides."
    identity: ClassVar[Mapping[str, Any]] = {}
    source: ClassVar[str] = "the step as it was recorded, computed again"
    protects: ClassVar[str] = "Nothing: it removes the defence of the run."
    cost: ClassVar[str] = "None; it cannot be used in training."

    def __call__(self, step: ClientStep, seen: Observation, rng: torch.Generator) -> Observation:
        """Return the recomputed update of the step, with nothing declared.

        If the run declares no defence, return `seen` itself.

        Raises:
            SnapshotError: the step cannot be computed again.
            NonFiniteUpdateError: its raw update is not finite.
        """
        if not seen.facts.defenses:
            return seen
        raw = step.update()
        check_finite(raw)
        sent = {"shared": step.facts.shared, "frozen": step.facts.frozen}
        facts = seen.facts.model_copy(update={"defenses": (), **sent})
        return replace(seen, update=raw, facts=facts)
