"""The base class of defences that change how the client computes its step.

Examples are more dropout, frozen layers and adapters. What such a client sends is an ordinary update of another recipe. Its facts tell the
recipe, so the observation declares no defence, and attacks read it as the update of an undefended run with that recipe.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from leakaudit.client.observation import Observation
from leakaudit.client.step import ClientStep
from leakaudit.errors import SnapshotError
from leakaudit.plugins.defense_protocol import Defense


class StepDefense(Defense):
    """A defence that is another recipe of the client's step.

    A subclass overrides `changed_step`. A training run cannot declare such a defence, because the recorder sees its recipe.
    """

    of_step: ClassVar[bool] = True

    def __call__(self, step: ClientStep, seen: Observation, rng: torch.Generator) -> Observation:
        """Return what is sent of the changed step, computed from the batch.

        Raises:
            AnatomyError: the model has not what the defence changes.
            SnapshotError: the step cannot be computed again, or the run ships a defence of its own, which the computed update would lack.
            NonFiniteUpdateError: the computed update is not finite.
        """
        if self.is_identity():
            return seen
        if seen.facts.defenses:
            names = ", ".join(declared.name for declared in seen.facts.defenses)
            raise SnapshotError(
                f"{self.name} computes another step, and the run ships {names}, which the new step would lack; "
                f"audit {self.name} on a run without a shipped defence"
            )
        return self.changed_step(step, rng).observe().granting(seen.facts.granted)

    def changed_step(self, step: ClientStep, rng: torch.Generator) -> ClientStep:
        """Return the step of a client with this defence.

        Args:
            step: of the client without it. It is not changed.
            rng: source of all random numbers.

        Raises:
            AnatomyError: the model has not what the defence changes.
            SnapshotError: the step cannot be computed again.
        """
        raise NotImplementedError(f"{self.name} does not say how it changes the step")
