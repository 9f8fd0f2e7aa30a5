"""The defence that a training applies to its own update before each step.

A hook on the base optimizer changes the gradients in place, right before the weights move: after all micro-batches, unscaling and clipping,
once a step. The recorder's
hook comes after it, so that the kept update is what is shipped.

This is a measure of privacy that the user asked for. So it is the one exception to the rule that a callback never raises: a defence that
cannot be applied ends the training with a `DefenseError`, before the weights move by an undefended update.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leakaudit.capture.boundary import without_modes
from leakaudit.capture.observing.optimizer_hooks import closure_of, replaced_closure
from leakaudit.capture.observing.optimizers import base_optimizers, before_step, nested, parameters_of
from leakaudit.capture.secret_generator import secret_generator
from leakaudit.client.observation import Update
from leakaudit.config.audit import PluginSpec
from leakaudit.errors import DefenseError, LeakAuditError, type_and_place
from leakaudit.models.wrappers import plain_name, unwrapped
from leakaudit.plugins.defense_protocol import Defense
from leakaudit.plugins.error_feedback import SentInOrder
from leakaudit.registry import defenses

OWN_LIBRARY = (
    "it needs the gradient of each example, which a training does not have at its optimizer: train with Opacus (examples/with_opacus.py), "
    "which is recognized and declared without this option"
)
MORE_THAN_THE_UPDATE = "it needs more than the update: apply it in your own code and declare it (`shipped_defense`), or choose one that changes the update alone"


class Trained(NamedTuple):
    """The objects of a training that a defence works on."""

    model: nn.Module
    """The model as the framework holds it."""
    optimizer: Any
    """The optimizer, a wrapper around it, or a list of them."""


@dataclass(eq=False)
class TrainingDefense:
    """One defence at work on the optimizer of one training."""

    defense: Defense
    model: nn.Module
    """The model without wrappers; the order of its parameters is the order of the random numbers."""
    optimizer: torch.optim.Optimizer
    """The base optimizer."""
    withheld: frozenset[int]
    """Identities of the parameters whose gradients are dropped."""
    chosen: frozenset[int] | None = None
    """Identities of the parameters that it changes; None for all."""
    seed: int | None = None
    """Seed of the random numbers of all steps; None draws a new state from the operating system for each step."""
    steps: int = field(default=0, init=False)
    """Optimizer steps whose update was changed."""
    _generator: torch.Generator | None = field(default=None, init=False)
    _handle: Any = field(default=None, init=False)
    _memory: SentInOrder = field(init=False)
    """What earlier steps dropped, for a defence with error feedback."""

    def __post_init__(self) -> None:
        """Begin with nothing dropped."""
        self._memory = SentInOrder(self.defense)

    @classmethod
    def begin(
        cls, spec: PluginSpec, trained: Trained, core: nn.Module, seed: int | None = None
    ) -> TrainingDefense | None:
        """Set the hook; return None for knobs at which the defence does nothing.

        Args:
            spec: name and knobs.
            trained: the training.
            core: the model in it whose tables and layers a defence may withhold, without wrappers.
            seed: of the random numbers; None draws them from the operating system.

        Raises:
            DefenseError: the defence cannot be applied here; the message says why and what to do.
            ConfigError: there is no such defence, or it has no such knobs.
        """
        defense: Defense = defenses.create(spec.name, spec.options)
        if defense.is_identity():
            return None
        optimizer = _the_optimizer(trained)
        withheld = _found(lambda: defense.withheld(core), "withholds", core) or frozenset()
        chosen = _found(lambda: defense.chosen(core), "changes", core)
        if not defense.on_update and not withheld:
            raise DefenseError(OWN_LIBRARY if defense.per_example else MORE_THAN_THE_UPDATE)
        found = cls(defense, unwrapped(trained.model), optimizer, withheld, chosen, seed)
        if all(id(p) in withheld for p in parameters_of(optimizer) if p.requires_grad):
            raise DefenseError("nothing that is trained would be sent: it withholds every parameter of the optimizer")
        secret_generator(torch.device("cpu"))  # a version of torch without a secret state is refused now
        found._handle = before_step(optimizer, found._before_step)
        return found

    def end(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    # ------------------------------------------------------------------ a step

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Change the gradients now, or after the closure if the step has one."""
        if nested(optimizer):
            return None
        closure = closure_of(args, kwargs)
        if closure is None:
            self._apply()
            return None
        return replaced_closure(args, kwargs, self._defended(closure))

    def _defended(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure of one step, which changes the gradients that it makes."""
        calls = 0

        @functools.wraps(closure)
        def defended() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise self._stopped(
                    f"{type(self.optimizer).__name__} evaluates its closure several times a step, so the step has no single update to defend; "
                    "train with an optimizer that evaluates it once"
                )
            loss = closure()
            self._apply()
            return loss

        return defended

    def _apply(self) -> None:
        """Change the gradients in place; nobody's exception lets an undefended step pass."""
        try:
            with without_modes(), torch.no_grad():
                self._change()
        except DefenseError:
            raise
        except LeakAuditError as error:
            raise self._stopped(str(error)) from None
        except Exception as error:  # its message may quote private values
            raise self._stopped(type_and_place(error)) from None

    def _change(self) -> None:
        if torch._C._current_graph_task_id() != -1:
            raise self._stopped("the optimizer steps during the backward pass; call it after the backward pass")
        if _overflowed(self.optimizer):
            return  # the optimizer will not move the weights
        for parameter in parameters_of(self.optimizer):
            if id(parameter) in self.withheld:
                parameter.grad = None  # the optimizer leaves such a parameter as it is; a zero would still decay it
        gradients = dict(self._gradients())
        if not gradients:
            return
        scale = getattr(self.optimizer, "grad_scale", None)  # of a fused optimizer, which unscales inside its step
        raw = {name: g.float() if scale is None else g.float() / scale for name, g in gradients.items()}
        for name, sent in self._sent(raw).items():
            gradients[name].copy_(sent if scale is None else sent * scale)
        self.steps += 1

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradients that the optimizer is given, in the order of the model."""
        mine = {id(p): p for p in parameters_of(self.optimizer) if p.grad is not None}
        for name, parameter in self.model.named_parameters():
            if mine.pop(id(parameter), None) is not None:
                yield plain_name(name), _dense(parameter)
        for number, parameter in enumerate(mine.values()):
            yield f"outside.{number}", _dense(parameter)

    def _chosen_names(self) -> frozenset[str] | None:
        """Return the names of the parameters that the defence changes.

        They are called as in `_gradients`.
        """
        if self.chosen is None:
            return None
        return frozenset(plain_name(name) for name, p in self.model.named_parameters() if id(p) in self.chosen)

    def _sent(self, raw: dict[str, Tensor]) -> Update:
        """Return what the defence makes of an update.

        Raises:
            DefenseError: it returns other parameters or shapes.
        """
        if not self.defense.on_update:
            return raw
        sent = self._memory.send_part(raw, self._chosen_names(), self._random(next(iter(raw.values())).device))
        if _shapes(sent) != _shapes(raw):
            raise self._stopped("it returned other parameters or shapes than it was given")
        return sent

    def _random(self, device: torch.device) -> torch.Generator:
        """Return the source of random numbers of one step."""
        if self.seed is None:
            return secret_generator(device)
        if self._generator is None:
            self._generator = torch.Generator(device).manual_seed(self.seed)
        return self._generator

    def _stopped(self, reason: str) -> DefenseError:
        return DefenseError(
            f"training stops before step {self.steps} of its defence, because {self.defense.name} could not be applied and the "
            f"weights must not move by an undefended update: {reason}"
        )


# ---------------------------------------------------------------------- before training


def _the_optimizer(trained: Trained) -> torch.optim.Optimizer:
    """Return the base optimizer of a training.

    Raises:
        DefenseError: no hook on one optimizer sees the whole update.
    """
    found = base_optimizers(trained.optimizer)
    if len(found) != 1:
        raise DefenseError(
            f"{len(found)} optimizers share the model, and the defence needs the whole update in one step; use one optimizer with several "
            "groups of parameters"
        )
    (optimizer,) = found
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise DefenseError(
            f"{type(optimizer).__name__} calls no hooks of torch before its step; use an optimizer that torch's class is a base of"
        )
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise DefenseError(
            f"{torch.distributed.get_world_size()} processes share this training, and noise of their own would make their weights differ; train in "
            "one process, or change the averaged gradients in your own code, with the same random numbers in all processes, and declare it "
            "(`shipped_defense`)"
        )
    if any(hasattr(p, "full_tensor") for p in parameters_of(optimizer)):
        raise DefenseError(
            "its parameters are in shards (FSDP2, tensor parallelism); train in one process without shards"
        )
    if any(getattr(module, "sparse", False) for module in trained.model.modules()):
        raise DefenseError("the model has an embedding with sparse gradients; make it with `sparse=False`")
    return optimizer


def _found(read: Callable[[], frozenset[str] | None], does: str, core: nn.Module) -> frozenset[int] | None:
    """Return the identities of parameters that a defence names; None if it names all.

    Args:
        read: asks the defence for the names.
        does: what it does to them, such as "withholds".
        core: the model.

    Raises:
        DefenseError: the defence does not find them in this model.
    """
    try:
        names = read()
    except Exception as error:
        raise DefenseError(
            f"the parameters that it {does} were not found in {type(core).__name__} ({type_and_place(error)})"
        ) from None
    if names is None:
        return None
    return frozenset(id(parameter) for name, parameter in core.named_parameters() if name in names)


# ---------------------------------------------------------------------- a step


def _overflowed(optimizer: Any) -> bool:
    """Return whether a fused optimizer is going to skip its step.

    It does so if a GradScaler found an infinity. Other optimizers are not called then.
    """
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def _dense(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    if gradient is None or gradient.layout != torch.strided:
        raise DefenseError("a gradient is sparse; make the layers without sparse gradients")
    return gradient


def _shapes(update: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in update.items()}
