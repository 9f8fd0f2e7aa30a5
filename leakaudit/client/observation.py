"""The observation: what an eavesdropper sees of one client's step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.client.facts import DeclaredDefense, Granted, PublicFacts
from leakaudit.client.noise_level import NoiseLevel
from leakaudit.errors import NonFiniteUpdateError
from leakaudit.models.tensors import entries_of

Update = Mapping[str, Tensor]
"""Parameter name -> tensor of the parameter's shape."""


@dataclass(frozen=True)
class Observation:
    """What an eavesdropper sees of one client step; never the batch itself."""

    update: Update
    """Parameter name -> transmitted update, the parameter's shape, float32."""
    model: nn.Module
    """The public model with the weights before the step.

    It is in eval mode with eager attention, and attacks leave it unchanged.
    """
    facts: PublicFacts
    whole: bool = True
    """Whether the model and its update are complete.

    If not, only the first blocks were kept: the later parts of `model` do not have the client's values, and no step can be simulated.
    """

    error: Update = field(default_factory=dict)
    """Parameter name -> standard deviation of the error of each entry, if `update` is an estimate of a gradient.

    Empty if `update` is what the client sent. See `leakaudit.algorithms.gradient_estimate`.
    """
    sent: Observation | None = None
    """What the client sent, if `update` is an estimate of a gradient; else None."""

    @property
    def only_a_direction(self) -> bool:
        """Whether `update` is a difference of weights in place of a gradient.

        Its entries then tell neither the size of the gradient nor, for certain, its sign.
        """
        return self.sent is not None and not self.error

    @cached_property
    def memo(self) -> dict[str, Any]:
        """What algorithms have computed from this observation alone, by their own keys."""
        return {}

    @cached_property
    def noise_level(self) -> NoiseLevel:
        """Standard deviation of the declared additive noise, for each parameter.

        It is in the update's units, and 0 without noise. The declared defences compute it. If a declared defence is not registered, it
        is the root mean square of the whole update, because noise on the update cannot be larger.
        """
        levels = dict.fromkeys(self.update, 0.0)
        for defense in self.facts.known_defenses:
            if defense is None:
                levels = dict.fromkeys(self.update, root_mean_square(self.update))
                continue
            part = part_of(self.update, defense.chosen(self.model))
            after = {before: float(defense.noise(part, before)) for before in {levels[name] for name in part}}
            levels |= {name: after[levels[name]] for name in part}
        return NoiseLevel(levels)

    @property
    def noise_sigma(self) -> float:
        """The largest level of the declared noise on any entry, 0 without noise.

        It is for readers of the whole update. Ask `noise_level` for the noise on single parameters.
        """
        return self.noise_level.largest

    @cached_property
    def zeroed(self) -> bool:
        """Whether a declared defence may have set entries to zero.

        If so, a zero says nothing about the gradient of that entry. True if a declared defence is not registered.
        """
        return any(defense is None or defense.zeroed for defense in self.facts.known_defenses)

    @cached_property
    def resized(self) -> bool:
        """Whether a declared defence scaled the update by an unknown factor.

        Sending only signs and clipping each example do so. True if a declared defence is not registered.
        """
        return any(defense is None or defense.resized for defense in self.facts.known_defenses)

    @property
    def clipping_bound(self) -> float | None:
        """Smallest L2 norm to which the protocol clips.

        The protocol clips the update or the gradient of each example. None if it clips neither.
        """
        bounds = [self.facts.max_grad_norm, *(d.clipping_bound for d in self.facts.known_defenses if d is not None)]
        return min((bound for bound in bounds if bound is not None), default=None)

    def unaware(self) -> Observation:
        """Return what an adversary sees who does not know the declared defences."""
        return replace(self, facts=self.facts.model_copy(update={"defenses": (), "replaced": None}))

    def under(self, defense: DeclaredDefense, update: Mapping[str, Tensor]) -> Observation:
        """Return this observation with the update that a declared defence makes."""
        facts = self.facts.model_copy(update={"defenses": (*self.facts.defenses, defense)})
        return replace(self, facts=facts)._sending(update)

    def declaring(self, defenses: tuple[DeclaredDefense, ...], own_loss: bool | None = None) -> Observation:
        """Return this observation with these declared defences.

        If a defence withholds a parameter and its recorded update is all zero, the parameter becomes frozen. With any other update it
        stays shared.

        Args:
            defenses: in the order in which they apply.
            own_loss: whether the loss is the one that the model computes; None if that is not known.
        """
        seen = replace(self, facts=self.facts.model_copy(update={"defenses": defenses, "own_loss": own_loss}))
        known = [defense for defense in seen.facts.known_defenses if defense is not None]
        gone = frozenset().union(*(defense.withheld(self.model) for defense in known))
        return seen._sending({name: g for name, g in self.update.items() if name not in gone or bool(g.any())})

    def sent_as(self, update: Mapping[str, Tensor], defenses: tuple[DeclaredDefense, ...]) -> Observation:
        """Return this observation with an update that was changed after the training.

        Args:
            update: parameter name -> what was sent, float32; parameters without an entry were not sent.
            defenses: the declared defences in it.
        """
        return replace(self, facts=self.facts.model_copy(update={"defenses": defenses}))._sending(update)

    def _sending(self, update: Mapping[str, Tensor]) -> Observation:
        """Return this observation with another update.

        Shared parameters that are missing in it become frozen.
        """
        gone = [name for name in self.facts.shared if name not in update]
        shared = tuple(name for name in self.facts.shared if name in update)
        facts = self.facts.model_copy(update={"shared": shared, "frozen": (*self.facts.frozen, *gone)})
        return replace(self, update=update, facts=facts)

    def granting(self, granted: Granted) -> Observation:
        """Return this observation with what the threat model grants."""
        return replace(self, facts=self.facts.model_copy(update={"granted": granted}))

    def to(self, device: torch.device) -> Observation:
        """Return this observation on `device`; the model is moved in place."""
        return replace(
            self,
            update={name: g.to(device) for name, g in self.update.items()},
            model=self.model.to(device),
            error={name: e.to(device) for name, e in self.error.items()},
            sent=None if self.sent is None else self.sent.to(device),
        )

    def digest(self) -> str:
        """Return the `sha256:` digest of names, shapes and values of the update."""
        digest = hashlib.sha256()
        for name in sorted(self.update):
            tensor = self.update[name].detach().to("cpu", torch.float32).contiguous()
            digest.update(f"{name}{tuple(tensor.shape)}".encode())
            digest.update(tensor.numpy().data)
        return f"sha256:{digest.hexdigest()}"


def part_of(update: Update, chosen: Collection[str] | None) -> Update:
    """Return the chosen parameters of an update, in its order; None chooses all."""
    return update if chosen is None else {name: tensor for name, tensor in update.items() if name in chosen}


def root_mean_square(update: Update) -> float:
    """Return the root mean square of all entries of an update, in its units.

    An update without entries has 0.
    """
    entries = sum(tensor.numel() for tensor in update.values())
    norms = (float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in update.values())
    return math.hypot(*norms) / math.sqrt(max(1, entries))


def check_finite(update: Mapping[str, Tensor]) -> None:
    """Refuse an update with NaN or infinity.

    Raises:
        NonFiniteUpdateError: an entry is not finite. The message names the number of such parameters and the first.
    """
    bad = [name for name, tensor in update.items() if not _is_finite(entries_of(tensor))]
    if bad:
        raise NonFiniteUpdateError(
            f"the update is not finite in {len(bad)} of {len(update)} parameters, first {bad[0]!r}: "
            "the step overflowed or training diverged, so there is nothing to audit"
        )


def _is_finite(tensor: Tensor) -> bool:
    """Return whether no entry is NaN or infinite.

    `isfinite` on the tensor would make a copy. The minimum of a tensor with NaN is NaN.
    """
    return not tensor.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())
