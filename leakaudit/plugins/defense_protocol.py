"""What a defence is: a frozen dataclass of knobs that turns what an eavesdropper sees into what is left of it.

A defence also owns what is known of it. Verification, attacks and the audited run ask it through `DeclaredDefense.known`; nobody
looks at its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from leakaudit.client.facts import DeclaredDefense
from leakaudit.client.observation import Observation
from leakaudit.client.step import ClientStep


@runtime_checkable
class Defense(Protocol):
    """Registered with `@defense("name")`; its fields are its knobs.

    A defence inherits from this class and overrides what differs. The defaults are those of a defence that adds no noise, sets no
    entry to zero and sends what the step computed.
    """

    name: ClassVar[str] = ""
    """Set by the decorator."""
    label: ClassVar[str]
    """How a person reads it in a table or inside a sentence, such as "Gaussian noise"."""
    meaning: ClassVar[str]
    """One sentence for a glossary: what it does to the update."""
    source: ClassVar[str]
    protects: ClassVar[str]
    """One sentence: what it hides, and from whom."""
    cost: ClassVar[str]
    """One sentence: what it costs the training run."""
    identity: ClassVar[Mapping[str, Any]]
    """Knobs at which it leaves the update alone and declares nothing; empty where it never does anything to what is sent."""
    zeroed: ClassVar[bool] = False
    """Whether it replaces entries by zero, so that a zero says nothing about the gradient there."""
    resized: ClassVar[bool] = False
    """Whether the length of the update is no longer that of the gradient."""
    per_example: ClassVar[bool] = False
    """Whether it works on the gradient of each example, so that a client may take their gradients one after the other."""

    def __call__(self, step: ClientStep, seen: Observation, rng: torch.Generator) -> Observation:
        """Return what would have been sent under this defence. Most need only `seen`; some run `step` again.

        It declares itself in the observation it returns (`Observation.under`), so that attacks know its parameters, as an
        adversary would.
        """
        ...

    @property
    def clipping_bound(self) -> float | None:
        """Norm to which it clips the update or the gradient of each example; None where it clips nothing."""
        return None

    def is_identity(self) -> bool:
        """Return whether its knobs are those of `identity`, at which it does nothing."""
        return all(getattr(self, knob) == value for knob, value in self.identity.items())

    def withheld(self, model: nn.Module) -> frozenset[str]:
        """Return the names of the parameters for which it sends no update; a recorder may see zeros there."""
        return frozenset()

    def declared(self) -> DeclaredDefense:
        """Return its name and its knobs as the protocol declares them; a knob that is None is left out."""
        knobs = asdict(self).items()  # type: ignore[call-overload]
        return DeclaredDefense(name=self.name, parameters={knob: value for knob, value in knobs if value is not None})

    def settled(self, step: ClientStep, sent: Mapping[str, Tensor]) -> Self:
        """Return the defence with the knobs filled in that are relative to the step or its update.

        Args:
            step: that made the update.
            sent: parameter name -> update as it was sent, under this defence.
        """
        return self

    def added_noise(self, step: ClientStep, clean: Mapping[str, Tensor]) -> float:
        """Return the standard deviation of the noise that it adds to every entry of `clean`, in its units.

        Args:
            step: that made the update.
            clean: parameter name -> update without this noise.
        """
        return 0.0

    def without_noise(self) -> Self:
        """Return the defence as it is where its noise is missing, its other parts unchanged."""
        return self

    def noise(self, sent: Mapping[str, Tensor], before: float = 0.0) -> float:
        """Return the standard deviation of the noise on every entry of an update that was sent under it, in its units.

        Args:
            sent: parameter name -> update as it was sent.
            before: the same of the defences that were applied before this one.
        """
        return before

    def expected(
        self,
        step: ClientStep,
        recomputed: Mapping[str, Tensor],
        observed: Mapping[str, Tensor],
        tolerance: float,
    ) -> Mapping[str, Tensor]:
        """Return what it may have made of `recomputed`, without its noise: where several outcomes are possible, the nearest.

        Args:
            step: that the update is said to come from.
            recomputed: parameter name -> update before this defence, computed again.
            observed: parameter name -> update as it was sent.
            tolerance: relative error up to which `recomputed` is right.

        Raises:
            SnapshotError: the step cannot be computed again under it.
        """
        return recomputed
