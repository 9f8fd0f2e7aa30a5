"""`undefended`: the raw view of a step that the run itself defends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from leakaudit.client.observation import Observation, check_finite
from leakaudit.client.step import ClientStep
from leakaudit.plugins.defense_protocol import Defense
from leakaudit.registry import defense


@defense("undefended")
@dataclass(frozen=True)
class Undefended(Defense):
    """What the update would have been without the defence that the run declares: clipping per example, noise, pruning.

    Beside the update as it was sent it shows what the defence buys. Where the run declares none, it is the update itself.
    """

    label: ClassVar[str] = "undefended"
    meaning: ClassVar[str] = "Takes the defence of the run away, to show what that defence hides."
    identity: ClassVar[Mapping[str, Any]] = {}
    source: ClassVar[str] = "the step as it was recorded, computed again"
    protects: ClassVar[str] = "Nothing: it takes the run's own defence off."
    cost: ClassVar[str] = "None; it is no way to train."

    def __call__(self, step: ClientStep, seen: Observation, rng: torch.Generator) -> Observation:
        """Return the step's raw update, with nothing declared.

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
