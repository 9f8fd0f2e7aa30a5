"""The protocol of a defence: it changes the update before it is sent.

A defence is a frozen dataclass; its fields are its knobs. It can also say what it does to an update. Verification, attacks and the
audited run ask it through `DeclaredDefense.known`; no code looks at its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import nn

from leakaudit.client.facts import DeclaredDefense
from leakaudit.client.local_steps import delta_divisor
from leakaudit.client.observation import Observation, Update, part_of
from leakaudit.client.per_example import ExampleClipping
from leakaudit.client.step import ClientStep
from leakaudit.errors import SnapshotError

FLOAT_BYTES = 4
"""Bytes of an entry in float32."""

PLACE_BYTES = 4
"""Bytes of the place of an entry in a sparse update, an int32, as gradient compression usually sends it (Lin et al. 2018)."""


@runtime_checkable
class Defense(Protocol):
    """Registered with `@defense("name")`; its fields are its knobs.

    A defence inherits from this class and overrides what differs. The defaults describe a defence that adds no noise, sets no entry to
    zero and keeps the length of the update.
    """

    name: ClassVar[str] = ""
    """Set by the decorator."""
    label: ClassVar[str]
    """Its name for people, in a table or inside a sentence, such as "Gaussian noise"."""
    meaning: ClassVar[str]
    """One sentence for a glossary: what it does to the update."""
    source: ClassVar[str]
    protects: ClassVar[str]
    """One sentence: what it hides, and from whom."""
    cost: ClassVar[str]
    """One sentence: what it costs the training run."""
    identity: ClassVar[Mapping[str, Any]]
    """Values of the knobs at which it does nothing and declares nothing. Empty if the defence has no such knobs;
    `is_identity` is then true."""
    zeroed: ClassVar[bool] = False
    """Whether it sets entries to zero, so that a zero says nothing about the gradient."""
    resized: ClassVar[bool] = False
    """Whether it changes the length of the update by an unknown factor."""
    on_update: bool = False
    """Whether what is sent follows from the update alone (`changed`). Training can then apply the defence to its own gradients."""
    error_feedback: bool = False
    """Whether what it drops from one update is added to the next. `changed` then gives what is sent of that sum, and
    `leakaudit.plugins.error_feedback` keeps the memory. One step alone cannot be audited or verified."""
    of_step: ClassVar[bool] = False
    """Whether it is another recipe of the client's step (`StepDefense`). The facts then tell the recipe, and nothing is declared."""
    per_example: ClassVar[bool] = False
    """Whether it works on the gradient of each example. A client may then compute these gradients one after the other."""

    gaussian: ClassVar[bool] = True
    """Whether its noise, if it adds any, is Gaussian and independent from entry to entry."""

    def __call__(self, step: ClientStep, seen: Observation, rng: torch.Generator) -> Observation:
        """Return the observation that this defence would have sent.

        The result declares the defence and its knobs (`Observation.under`), because an adversary would know them.

        Args:
            step: the step that made the update, for defences that have to compute it again.
            seen: what is sent without this defence. It is not changed.
            rng: source of all random numbers.

        Raises:
            SnapshotError: the defence has error feedback.
        """
        self.check_one_step()
        if self.is_identity():
            return seen
        unit = delta_divisor(step.facts) if step.facts.view == "delta" else 1.0
        part = part_of(seen.update, self.chosen(seen.model))
        prepared = self.prepared(part, unit)
        sent = prepared.changed(part, rng)
        if sent is part or not part:
            return seen
        return seen.under(prepared.declared(), sent if part is seen.update else {**seen.update, **sent})

    def chosen(self, model: nn.Module) -> frozenset[str] | None:
        """Return the names of the parameters that it changes; None for all.

        `prepared`, `changed` and `noise` are given these parameters only, and the others are sent as they are.

        Raises:
            AnatomyError: the layers that its knobs name are not found in the model.
        """
        return None

    def check_one_step(self) -> None:
        """Refuse error feedback where only one step is known.

        Raises:
            SnapshotError: the defence adds what it dropped from earlier updates.
        """
        if self.error_feedback:
            raise SnapshotError(
                f"{self.name} has error feedback: what it sends depends on all earlier steps, and one step is known; "
                "audit it with error_feedback=false, or a window of steps (`leakaudit simulate --window 8`)"
            )

    def prepared(self, clean: Update, unit: float) -> Self:
        """Return the defence with the knobs filled in that depend on an update.

        Args:
            clean: parameter name -> update before this defence.
            unit: what a difference of weights is divided by to give `clean` (the sum of the learning rates); 1 for a gradient.
        """
        return self

    def changed(self, update: Update, rng: torch.Generator) -> Update:
        """Return what is sent instead of an update; `update` itself if nothing changes.

        The battery and the training both call it, so that what is audited is what is shipped. It is called on a prepared defence.

        Args:
            update: parameter name -> update before this defence. It is not changed.
            rng: source of all random numbers, used in the order of the names.

        Raises:
            NotImplementedError: what is sent does not follow from the update alone (`on_update` is False).
        """
        if not self.on_update:
            raise NotImplementedError(f"{self.name} needs more than the update")
        return update

    @property
    def clipping_bound(self) -> float | None:
        """The norm to which it clips the update, or the gradient of each example.

        None if it clips nothing.
        """
        return None

    @property
    def gaussian_multiplier(self) -> float | None:
        """Standard deviation of its noise divided by what one example can change.

        An accountant computes epsilon from it. None if the defence bounds no example, or adds no Gaussian noise.
        """
        return None

    @property
    def message_multiplier(self) -> float | None:
        """Standard deviation of its noise divided by the bound of one whole message.

        None if it bounds no message, or adds no Gaussian noise.
        """
        return None

    def sent_bytes(self, sent: Update) -> float:
        """Return the size of an update in its smallest usual form, in bytes.

        The default is four bytes for every entry (float32). A defence that sets entries to zero may send the others with their places, which
        takes eight bytes for each (float32 and int32).

        Args:
            sent: parameter name -> update as it was sent, under this defence.
        """
        dense = FLOAT_BYTES * sum(tensor.numel() for tensor in sent.values())
        if not self.zeroed:
            return float(dense)
        kept = sum(int(torch.count_nonzero(tensor)) for tensor in sent.values())
        return float(min(dense, (FLOAT_BYTES + PLACE_BYTES) * kept))

    def is_identity(self) -> bool:
        """Return whether its knobs have the values of `identity`."""
        return all(getattr(self, knob) == value for knob, value in self.identity.items())

    def withheld(self, model: nn.Module) -> frozenset[str]:
        """Return the names of the parameters for which it sends no update.

        A recorder may see zeros for them.
        """
        return frozenset()

    def declared(self) -> DeclaredDefense:
        """Return its name and its knobs, as an observation declares them.

        Knobs that are None are left out.
        """
        knobs = asdict(self).items()  # type: ignore[call-overload]
        return DeclaredDefense(name=self.name, parameters={knob: value for knob, value in knobs if value is not None})

    def settled(self, step: ClientStep, sent: Update) -> Self:
        """Return the defence with the knobs that depend on the step filled in.

        Args:
            step: the step that made the update.
            sent: parameter name -> update as it was sent, under this defence.
        """
        return self

    def added_noise(self, step: ClientStep, clean: Update) -> float:
        """Return the standard deviation of the noise on each entry that it changes.

        Args:
            step: the step that made the update.
            clean: parameter name -> update without this noise. The result is in the units of this update.
        """
        return 0.0

    def example_clipping(self, step: ClientStep, sent: Update) -> ExampleClipping | None:
        """Return how it clips the gradient of each example; None if it clips no example.

        Args:
            step: the step that made the update.
            sent: parameter name -> update as it was sent, under this defence.
        """
        return None

    def without_noise(self) -> Self:
        """Return the same defence without its noise."""
        return self

    def noise(self, sent: Update, before: float = 0.0) -> float:
        """Return the standard deviation of the noise on every entry of `sent`.

        Attacks call this. They know the knobs and the update, but not the step.

        Args:
            sent: parameter name -> update as it was sent.
            before: standard deviation of the noise of the defences that were applied before this one.
        """
        return before

    def expected(self, step: ClientStep, recomputed: Update, observed: Update, tolerance: float) -> Update:
        """Return the update that it makes from `recomputed`, without its noise.

        If several outcomes are possible within the error, return the one nearest to `observed`.

        Args:
            step: the step that the update is said to come from.
            recomputed: parameter name -> update before this defence, recomputed from the batch.
            observed: parameter name -> update as it was sent.
            tolerance: largest relative error of `recomputed`.

        Raises:
            SnapshotError: the step cannot be computed again under this defence.
        """
        return recomputed
