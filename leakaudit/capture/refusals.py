"""The refusals of training runs that cannot be audited.

Each refusal is an error that says what to do.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from leakaudit.capture.context import Source, TrainerContext, configuration
from leakaudit.capture.fitness import check_tensors
from leakaudit.capture.observing.optimizers import base_optimizers, parameters_of
from leakaudit.capture.processes.flat_shards import flat_refusal
from leakaudit.config.audit import AuditConfig
from leakaudit.config.membership import check_nonmembers
from leakaudit.errors import ModelError, SnapshotError
from leakaudit.gate.policy import Policy, default_policy, load_policy
from leakaudit.models.lora import refuse_prompts
from leakaudit.models.recipe import can_rebuild
from leakaudit.models.wrappers import unwrapped
from leakaudit.parts import OF_AUDIT, too_old
from leakaudit.plugins.names import registered_names
from leakaudit.preflight.strategies import strategy_refusal, zero_stage
from leakaudit.registry import attacks, defenses

FRAMEWORKS = ("lightning", "opacus", "peft", "pytorch_lightning")
"""Libraries beside those of every audit that a run may have loaded, and of which an extra names the oldest version."""

# ---------------------------------------------------------------------- the trainer


def refuse_strategy(name: str, *, fsdp2: bool, config: Any = None) -> None:
    """Refuse the ways of distributing a model whose update no hook sees.

    Args:
        name: of the strategy, as the framework calls it.
        fsdp2: whether it is FSDP2, which keeps parameters as they are.
        config: of DeepSpeed, which names the stage of ZeRO; anything else where it is not known.

    Raises:
        SnapshotError: names the strategy and what to use instead.
    """
    reason = strategy_refusal(name, fsdp2=fsdp2, stage=zero_stage(config))
    if reason:
        raise SnapshotError(reason)


def refuse_accelerate(found: Any) -> None:
    """Refuse what Accelerate distributes in a way whose update no hook sees.

    Args:
        found: an `Accelerator` or its state; None without Accelerate.

    Raises:
        SnapshotError: names the strategy and what to use instead.
    """
    kind = getattr(found, "distributed_type", "")
    kind, fsdp2 = str(getattr(kind, "value", kind)), bool(getattr(found, "is_fsdp2", False))
    if "DEEPSPEED" in kind:  # elsewhere it has no plugin, and asking for one may fail
        plugin = getattr(getattr(found, "state", found), "deepspeed_plugin", None)
        refuse_strategy(kind, fsdp2=fsdp2, config={"zero_optimization": {"stage": getattr(plugin, "zero_stage", None)}})
    refuse_strategy(kind, fsdp2=fsdp2)


def refuse_wrapper(model: nn.Module) -> None:
    """Refuse a model whose wrapper hides the update from every hook.

    Raises:
        SnapshotError: names the wrapper and what to use instead.
    """
    if why := flat_refusal(model):
        raise SnapshotError(why)
    wrappers = ("DataParallel", "DeepSpeedEngine")
    refuse_strategy(next((kind.__name__ for kind in type(model).__mro__ if kind.__name__ in wrappers), ""), fsdp2=False)


def optimizers_that_move(model: nn.Module, optimizers: Sequence[Any]) -> list[Any]:
    """Return the optimizers that move the model; manual optimization may have several.

    Raises:
        SnapshotError: no optimizer moves it.
    """
    mine = {id(p) for p in model.parameters()}
    found = [
        one for one in optimizers if any(id(p) in mine for mover in base_optimizers(one) for p in parameters_of(mover))
    ]
    if not found:
        raise SnapshotError(
            f"none of {len(optimizers)} optimizers moves the model that is audited; one has to, so that there is an update to audit"
        )
    return found


def refuse_versions() -> None:
    """Refuse a run with libraries that are older than this version takes.

    Only libraries that the run has loaded count.

    Raises:
        SnapshotError: names the library, its version and the oldest one.
    """
    if why := too_old([module for module in (*OF_AUDIT, *FRAMEWORKS) if module in sys.modules]):
        raise SnapshotError(why)


# ---------------------------------------------------------------------- the model


def auditable(root: nn.Module, source: Source = None) -> tuple[nn.Module, nn.Module]:
    """Return the object that a training loop calls and the model to audit in it.

    The model is the root without its wrappers, if the side process can rebuild that. Otherwise it is the only model inside the root that
    can be rebuilt, such as a model of transformers in a LightningModule. Parameters outside that model are trained but not audited; the
    report says so. With `schedule: inline`, a root that cannot be rebuilt is audited in the training process.

    Args:
        root: what the loop calls.
        source: the audit's configuration.

    Raises:
        ModelError: no model inside the root can be rebuilt, or more than one can.
    """
    inline = configuration(source).schedule == "inline"
    if can_rebuild(unwrapped(root)) or (inline and hasattr(unwrapped(root), "config")):
        return root, unwrapped(root)  # the whole model, even of a user's class, and not only a known part of it
    found = _rebuildable_inside(root)
    if len(found) == 1:
        (core,) = found.values()
        return core, unwrapped(core)
    if inline:
        return root, unwrapped(root)
    raise ModelError(
        f"{type(root).__name__} is no model that the side process can rebuild, and inside it {len(found)} were found "
        f"({', '.join(found) or 'none'}); one is needed. Name how to make the model with "
        "`leakaudit.models.factories.rebuilt_by(model, 'package.module:function')`, or set `schedule: inline`"
    )


def _rebuildable_inside(root: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that can be rebuilt, by name.

    The search goes one depth of children at a time, and stops at the first depth that has such modules.
    """
    found: dict[str, nn.Module] = {}
    layers = {"": unwrapped(root)}
    while layers and not found:
        below = {f"{name}.{part}": m for name, module in layers.items() for part, m in module.named_children()}
        found = {name.removeprefix("."): module for name, module in below.items() if can_rebuild(unwrapped(module))}
        layers = {name: unwrapped(module) for name, module in below.items()}
    return found


def check_run(config: AuditConfig, trainer: TrainerContext, model: nn.Module) -> None:
    """Refuse before the first step what could not be audited after hours of training.

    Args:
        config: the audit's configuration.
        trainer: what the adapter knows.
        model: the model itself, without wrappers.

    Raises:
        ConfigError: an attack, a defence, an option or the file of non-members does not exist, or the policy cannot be read or names something
            that does not exist.
        ModelError: the run trains prompts or prefixes instead of the model.
        SnapshotError: a tensor of the model cannot be kept.
    """
    for registry, specs in ((attacks, config.attacks), (defenses, config.defenses)):
        for spec in specs:
            registry.create(spec.name, spec.options)
    policy_of(config)
    check_nonmembers(config.membership)
    refuse_prompts(trainer.loop_calls)
    refuse_prompts(trainer.model)
    check_tensors(model)


def policy_of(config: AuditConfig) -> Policy:
    """Return the policy that the gate will apply.

    Raises:
        ConfigError: it cannot be read, or names an attack, a defence or a metric that does not exist.
    """
    return default_policy() if config.policy is None else load_policy(config.policy, registered_names())


# ---------------------------------------------------------------------- warnings


def unused_private_model(model: nn.Module) -> str:
    """Return a warning if gradients per example get no noise.

    The text is empty if there is nothing to warn of.

    `make_private` of Opacus returns a model, an optimizer and a loader. Training with the optimizer that it was given is not private.
    """
    per_example = any("GradSampleModule" in kind.__name__ for kind in type(model).__mro__) or any(
        hasattr(p, "grad_sample") for p in model.parameters()
    )
    if not per_example:
        return ""
    return (
        "the model computes a gradient for every example, as Opacus does, but the optimizer that moves it adds no noise: this run "
        "is audited as undefended. Train with the optimizer that `make_private` returned"
    )
