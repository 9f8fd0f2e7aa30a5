"""The active-server scenario: a server changes the model before sending it.

It is no part of an ordinary audit. An audit of this scenario says so (`ThreatModel.adversary`) and computes every client step again on the
changed model. Its scores are not those of an eavesdropper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from leakaudit.client.facts import DeclaredDefense, DeclaredServer
from leakaudit.client.observation import Observation
from leakaudit.client.step import ClientStep
from leakaudit.errors import SnapshotError
from leakaudit.models.structure import find_pooler
from leakaudit.models.wide_pooler import Activation, widened
from leakaudit.registry import Registry

servers: Registry[Any] = Registry("server", "leakaudit.audit.active_server")
"""Name -> class of an active server."""


@servers.register("wide-pooler")
@dataclass(frozen=True)
class WidePooler:
    """A pooler as wide as the vocabulary, with another activation.

    The features that go into it can then be told apart.

    The server may claim that a wider layer is more expressive. Clients compute true gradients of the model that they were sent.
    """

    width: int | None = None
    """Outputs of the pooler; None takes the size of the vocabulary."""
    dimension: int = 100
    """Number d' of features that each new output reads.

    100 in the paper; at most all that there are.
    """
    activation: Activation = "cube+square"
    """Activation in place of tanh.

    The paper needs one whose derivatives do not vanish in the mean. selu is less conspicuous and less informative.
    """
    deviation: float = 0.1
    """Standard deviation of the new outputs' normal weights; 1 in the paper.

    Our choice: with 1, cube+square saturates the class probabilities on features as long as a LayerNorm's, and a sequence whose label is
    the likeliest class leaves no gradient; measured in `attacks/README.md`.
    """
    seed: int = 0
    """Seed of these weights."""

    name: ClassVar[str]
    source: ClassVar[str] = "Beyond Gradient and Priors (2023), Sec. 4.2"

    def __post_init__(self) -> None:
        """Refuse weights without a spread."""
        if self.deviation <= 0:
            raise ValueError(f"deviation must be above 0, got {self.deviation:g}")

    def changed(self, step: ClientStep) -> tuple[nn.Module, dict[str, Any]]:
        """Return the model with the wide pooler, and the options as applied.

        The step's own model stays unchanged.

        Raises:
            AnatomyError: there is no pooler to widen, or it has no room for this.
        """
        classes = step.facts.num_labels or 0
        dense = step.model.get_submodule(find_pooler(step.model, classes).dense)
        assert isinstance(dense, nn.Linear)
        knobs: dict[str, Any] = {
            **asdict(self),
            "width": step.facts.vocabulary.size if self.width is None else self.width,
            "dimension": min(self.dimension, dense.in_features),
        }
        return widened(step.model, classes, **knobs), {**knobs, "kept": dense.out_features}


def on_active_server(step: ClientStep, server: WidePooler) -> ClientStep:
    """Return the client's step on the model of an active server.

    Its facts declare the server.

    Raises:
        AnatomyError: the server has nothing to change in this model.
        SnapshotError: the step's loss was computed outside the model, from outputs that are not the changed model's.
    """
    if step.recipe.loss != "forward":
        raise SnapshotError(
            "the loss was computed outside the model, so the step cannot be computed on the server's model"
        )
    model, parameters = server.changed(step)
    declared = DeclaredServer(name=server.name, parameters=parameters)
    return replace(step, model=model, facts=step.facts.model_copy(update={"server": declared}))


def observation_sent(
    step: ClientStep, shipped: tuple[DeclaredDefense, ...], generator: Callable[[str], torch.Generator]
) -> Observation:
    """Return the observation of a step that nobody recorded, defences included.

    Args:
        step: on the server's model.
        shipped: the defences that the run ships, as the protocol declares them.
        generator: name of a defence -> the random generator that it draws from.

    Raises:
        SnapshotError: a declared defence is not registered, so its output is not known.
    """
    bare = replace(step, facts=step.facts.model_copy(update={"defenses": ()}))
    seen = bare.observe()
    for declared in shipped:
        defense = declared.known()
        if defense is None:
            raise SnapshotError(f"the declared {declared.name} is not registered here, so what it sends is not known")
        seen = defense(bare, seen, generator(declared.name))
    return seen


def named_server(name: str, options: Mapping[str, Any]) -> WidePooler:
    """Return the server of that name with its knobs set.

    Raises:
        UnknownPluginError: there is none of that name.
        ConfigError: an option is none of its knobs, or its value does not fit.
    """
    found: WidePooler = servers.create(name, options)
    return found
