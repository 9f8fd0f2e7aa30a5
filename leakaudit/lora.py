"""Low-rank adapters (LoRA): put into a model by peft, described so that the model can be rebuilt."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from leakaudit.errors import ConfigError, ModelError


class LoraRecipe(BaseModel):
    """What of a LoRA configuration decides names, shapes and arithmetic of the adapters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    """R: rows of A, columns of B."""
    targets: tuple[str, ...]
    """Ends of the names of the linear layers that get adapters."""
    alpha: float
    """The layer computes W x + (alpha / R) B A x."""
    dropout: float = 0.0
    """Dropout on the input of A."""
    saved: tuple[str, ...] = ()
    """Ends of the names of modules that are trained whole beside the adapters, such as a fresh head; peft copies each."""


def add_lora(
    model: nn.Module, rank: int, targets: tuple[str, ...] = (), *, alpha: float | None = None, seed: int = 0
) -> LoraRecipe:
    """Put adapters into the linear layers of `model`, in place: A is drawn from `seed`, B is zero.

    Args:
        model: a model of transformers; the class stays what it was.
        rank: R.
        targets: ends of module names; empty takes peft's own choice for the model type.
        alpha: numerator of the scale; None takes R, so that the scale is 1. Our choice: no attack depends on it.
        seed: of A.

    Raises:
        ConfigError: peft is not installed, has no choice of its own for the model, or finds none of the targets.
    """
    recipe = LoraRecipe(rank=rank, targets=targets, alpha=float(rank if alpha is None else alpha))
    chosen = _inject(model, recipe, seed)
    return recipe.model_copy(update={"targets": chosen})


def rebuild_lora(model: nn.Module, recipe: LoraRecipe) -> None:
    """Put the adapters of a recipe into a rebuilt model; their weights are loaded afterwards.

    Raises:
        ModelError: peft is not installed, or the adapters do not fit the model.
    """
    try:
        _inject(model, recipe, seed=0)
    except ConfigError as error:
        raise ModelError(str(error)) from None


def adapted(model: nn.Module) -> LoraRecipe | None:
    """Return the recipe of the adapters that peft put into `model`, or None where there are none.

    Raises:
        ModelError: there are adapters that a recipe cannot describe: several sets, or another kind than plain LoRA.
    """
    configs: Any = getattr(model, "peft_config", None)
    if not configs:
        return None
    if list(configs) != [ADAPTER]:
        raise ModelError(
            f"the model has the adapters {', '.join(map(str, configs))}; one set named {ADAPTER!r} can be rebuilt"
        )
    config = configs[ADAPTER]
    odd = [name for name in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern") if getattr(config, name, None)]
    if (
        str(getattr(config.peft_type, "value", config.peft_type)) != "LORA"
        or odd
        or isinstance(config.target_modules, str)
    ):
        raise ModelError(
            f"the model's adapters are not plain LoRA on a list of layers ({', '.join(odd) or config.peft_type}), "
            "so they cannot be rebuilt"
        )
    return LoraRecipe(
        rank=int(config.r),
        targets=tuple(sorted(config.target_modules)),
        alpha=float(config.lora_alpha),
        dropout=float(config.lora_dropout),
        saved=_saved_in(model),
    )


def _saved_in(model: nn.Module) -> tuple[str, ...]:
    """Return the modules that peft keeps a trained copy of: those of the configuration, and heads that a task type adds."""
    kinds = ((name, type(module).__name__) for name, module in model.named_modules())
    return tuple(sorted(name for name, kind in kinds if kind == "ModulesToSaveWrapper"))


ADAPTER = "default"
"""Name that peft gives the only set of adapters."""


def _inject(model: nn.Module, recipe: LoraRecipe, seed: int) -> tuple[str, ...]:
    """Inject and return the targets that peft settled on."""
    try:
        import peft
    except ImportError:
        raise ConfigError("LoRA needs peft, which is not installed: pip install 'leakaudit[lora]'") from None
    config = peft.LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,  # type: ignore[arg-type]
        lora_dropout=recipe.dropout,
        target_modules=list(recipe.targets) or None,
        modules_to_save=list(recipe.saved) or None,
    )
    requires = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    try:
        with _drawn_from(seed), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # peft adapts itself to (in, out) weights and says so
            peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    except (ValueError, KeyError) as error:
        reason = str(error).splitlines()[0][:200] if error.args else type(error).__name__
        raise ConfigError(
            f"{type(model).__name__}: peft cannot place adapters ({reason}); "
            "name the linear layers by the ends of their names, such as --lora-targets query,value"
        ) from None
    for name, parameter in model.named_parameters():  # peft freezes all other weights; what is shared is said elsewhere
        parameter.requires_grad_(requires.get(name, True))
    settled: Any = model.peft_config[ADAPTER].target_modules  # type: ignore[index, union-attr]
    return tuple(sorted(settled))


@contextmanager
def _drawn_from(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def is_adapter(name: str) -> bool:
    """Return whether a parameter name is one that peft gives the weights of an adapter."""
    return ".lora_A." in name or ".lora_B." in name
