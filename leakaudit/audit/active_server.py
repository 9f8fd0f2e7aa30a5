"""The active-server scenario: a server changes the model before sending it.

An ordinary audit does not contain it. An audit of this scenario says so (`ThreatModel.adversary`) and computes every client step again on
the changed model. Its scores do not describe an eavesdropper.
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
from leakaudit.models.structure.pooler import pooler_layers
from leakaudit.models.wide_pooler import Activation, widened
from leakaudit.registry import Registry

servers: Registry[Any] = Registry("server", "leakaudit.audit.active_server")
"""Name -> class of an active server."""


@servers.register("wide-pooler")
@dataclass(frozen=True)
class WidePooler:
    """A pooler as wide as the vocabulary, with another activation.

    The width lets an attack tell the features of the pooler's input apart.

    The server may claim that a wider layer is more expressive. Clients compute true gradients of the model that they received.
    """

    width: int | None = None
    """Outputs of the pooler; None takes the size of the vocabulary."""
    dimension: int = 100
    """Number d' of features that each new output reads.

    The paper uses 100. A model with fewer features uses all of them.
    """
    activation: Activation = "cube+square"
    """Activation in place of tanh.

    The paper needs an activation whose derivatives do not have a mean of zero. selu is less conspicuous and less informative.
    """
    deviation: float = 0.1
    """Standard deviation of the new outputs' normal weights; 1 in the paper.

    Our choice: with 1, and features with the norm that a LayerNorm gives them, cube+square saturates the class probabilities. A sequence
    whose label is the likeliest class then has no gradient. `attacks/README.md` has the measurement.
    """
    seed: int = 0
    """Seed of these weights."""

    name: ClassVar[str]
    source: ClassVar[str] = "Beyond Gradient and Priors (2023), Sec. 4.2"

    def __post_init__(self) -> None:
        """Refuse a standard deviation of 0 or below."""
        if self.deviation <= 0:
            raise ValueError(f"deviation must be above 0, got {self.deviation:g}")

    def changed(self, step: ClientStep) -> tuple[nn.Module, dict[str, Any]]:
        """Return the model with the wide pooler, and the options that were applied.

        The options also hold `kept`, the pooler's former number of outputs. The step's own model stays unchanged.

        Raises:
            AnatomyError: the model has no pooler, or its pooler cannot be widened like this.
        """
        classes = step.facts.num_labels or 0
        dense = step.model.get_submodule(pooler_layers(step.model, classes).dense.name)
        assert isinstance(dense, nn.Linear)
        knobs: dict[str, Any] = {
            **asdict(self),
            "width": step.facts.vocabulary.size if self.width is None else self.width,
            "dimension": min(self.dimension, dense.in_features),
        }
        return widened(step.model, classes, **knobs), {**knobs, "kept": dense.out_features}


def on_active_server(step: ClientStep, server: WidePooler) -> ClientStep:
    """Return the client's step on the model of an active server.

    The facts of the returned step declare the server.

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
    """Compute a step on the server's model and return its defended observation.

    Nobody recorded this step.

    Args:
        step: the client's step on the server's model.
        shipped: the defences that the run ships, as the protocol declares them.
        generator: function from the name of a defence to its random generator.

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
    """Return the server with this name and these options.

    Raises:
        UnknownPluginError: no server has this name.
        ConfigError: the server does not have an option, or a value does not fit.
    """
    found: WidePooler = servers.create(name, options)
    return found
