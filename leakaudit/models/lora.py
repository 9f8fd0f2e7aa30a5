"""Adapters of peft (LoRA and IA3), and recipes that rebuild them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, model_validator
from torch import nn

from leakaudit.errors import ConfigError, ModelError

Kind = Literal["LORA", "IA3"]

SETTINGS: Mapping[Kind, frozenset[str]] = {
    "LORA": frozenset(
        {
            "alpha_pattern",
            "bias",
            "ensure_weight_tying",
            "exclude_modules",
            "fan_in_fan_out",
            "layers_pattern",
            "layers_to_transform",
            "lora_bias",
            "rank_pattern",
            "target_parameters",
            "trainable_token_indices",
            "use_dora",
            "use_rslora",
        }
    ),
    "IA3": frozenset({"exclude_modules", "fan_in_fan_out", "feedforward_modules"}),
}
"""Kind of adapter -> settings of peft's configuration that a recipe may hold besides rank, targets, alpha, dropout and saved modules. Other
settings are refused: a recipe is read from a file, and some settings name code that peft imports (`megatron_core`, `auto_mapping`)."""

WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ephemeral_gpu_offload",
        "eva_config",
        "inference_mode",
        "init_ia3_weights",
        "init_lora_weights",
        "init_weights",
        "loftq_config",
        "lora_ga_config",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
"""Settings of peft's configurations that do not change the result of a model with loaded weights, such as initial weights and
descriptions."""

OWN_FIELDS = {"r", "target_modules", "lora_alpha", "lora_dropout", "modules_to_save"}
"""Settings that have a field of their own in `LoraRecipe`."""


class LoraRecipe(BaseModel):
    """The part of a peft configuration that decides names, shapes and arithmetic."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    """Rank R: number of rows of A and columns of B. 0 for adapters without a rank (IA3)."""
    targets: tuple[str, ...] | str
    """Ends of the names of the linear layers that get adapters, or a regular expression of whole names."""
    alpha: float
    """Numerator of the scale: the layer computes W x + (alpha / R) B A x."""
    dropout: float = 0.0
    """Dropout on the input of A."""
    saved: tuple[str, ...] = ()
    """Ends of the names of modules that are trained completely besides the adapters, such as a new head; peft copies each."""
    kind: Kind = "LORA"
    name: str = "default"
    """Name of the set of adapters; it is part of the names of its parameters."""
    settings: dict[str, Any] = {}
    """Other settings of peft's configuration that differ from its defaults. Plain data; only those in `SETTINGS`."""

    @model_validator(mode="after")
    def _only_known(self) -> Self:
        if unknown := sorted(set(self.settings) - SETTINGS[self.kind]):
            raise ValueError(f"adapters of kind {self.kind} have no setting {unknown[0]!r} that is read from a recipe")
        return self


def add_lora(
    model: nn.Module, rank: int, targets: tuple[str, ...] = (), *, alpha: float | None = None, seed: int = 0
) -> LoraRecipe:
    """Put adapters into the linear layers of `model`, in place.

    A is random from `seed`, B is zero.

    Args:
        model: a model of transformers; its class does not change.
        rank: R.
        targets: ends of module names; empty uses peft's own choice for the model type.
        alpha: numerator of the scale; None uses R, so that the scale is 1. Our choice, because no attack depends on it.
        seed: seed of A.

    Raises:
        ConfigError: peft is not installed, has no own choice for the model, or does not find the targets.
    """
    recipe = LoraRecipe(rank=rank, targets=targets, alpha=float(rank if alpha is None else alpha))
    chosen = _inject(model, recipe, seed)
    return recipe.model_copy(update={"targets": chosen})


def rebuild_lora(model: nn.Module, recipe: LoraRecipe) -> None:
    """Put the adapters of a recipe into a rebuilt model.

    The caller loads their weights afterwards.

    Raises:
        ModelError: peft is not installed, or the adapters do not fit the model.
    """
    try:
        _inject(model, recipe, seed=0)
    except ConfigError as error:
        raise ModelError(str(error)) from None


def adapted(model: nn.Module) -> LoraRecipe | None:
    """Return the recipe of the adapters that peft put into `model`, or None.

    Raises:
        ModelError: there are adapters that a recipe cannot describe: several sets, another kind, or a setting outside `SETTINGS`.
    """
    configs: Any = getattr(model, "peft_config", None)
    if not configs:
        return None
    if len(configs) != 1:
        raise ModelError(
            f"the model has {len(configs)} sets of adapters ({', '.join(map(str, configs))}), and one can be made again; delete the others "
            "(`delete_adapter`) or merge them into the model (`merge_and_unload`) before training"
        )
    ((name, config),) = configs.items()
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind not in SETTINGS:
        raise ModelError(
            f"the model's adapters are of the kind {kind}, and of peft's adapters {', '.join(SETTINGS)} can be made again; train one of these, "
            "or set `schedule: inline`"
        )
    settings = _settings(config)
    if odd := sorted(set(settings) - SETTINGS[kind]):  # type: ignore[index]
        raise ModelError(
            f"the model's adapters use {', '.join(f'`{key}`' for key in odd)} of peft, which cannot be made again; train without it, or set "
            "`schedule: inline`"
        )
    targets = config.target_modules
    return LoraRecipe(
        rank=int(getattr(config, "r", 0)),
        targets=targets if isinstance(targets, str) else tuple(sorted(targets or ())),
        alpha=float(getattr(config, "lora_alpha", 1.0)),
        dropout=float(getattr(config, "lora_dropout", 0.0)),
        saved=_saved_in(model),
        kind=kind,  # type: ignore[arg-type]
        name=str(name),
        settings=settings,
    )


def refuse_prompts(model: nn.Module) -> None:
    """Refuse a model that is trained by prompt or prefix tuning.

    Such tuning trains vectors before the text instead of weights in the model's layers.

    Args:
        model: the model of the training loop, with its wrappers.

    Raises:
        ModelError: the model is trained in this way. The message names the kind and what to train instead.
    """
    for module in model.modules():
        if "PeftModel" not in {kind.__name__ for kind in type(module).__mro__}:
            continue
        config: Any = getattr(module, "active_peft_config", None)
        if getattr(config, "is_prompt_learning", False):
            kind = str(getattr(config.peft_type, "value", config.peft_type)).lower().replace("_", " ")
            raise ModelError(
                f"this run trains {kind}: vectors before the text, outside the model's layers, which no attack here reads and the side "
                "process cannot make again; train LoRA adapters to audit the run"
            )


def _settings(config: Any) -> dict[str, Any]:
    """Return the settings of peft that differ from its defaults, as plain data.

    Settings with their own field in `LoraRecipe`, and those without effect on a model with loaded weights, are left out.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(type(config)):
        value = getattr(config, field.name)
        said = value is not None and value != _default(field) and value not in ({}, [])
        if said and field.name not in WITHOUT_EFFECT | OWN_FIELDS:
            found[field.name] = _plain(value)
    return found


def _default(field: Any) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _plain(value: Any) -> Any:
    """Return a setting as JSON data: sets become sorted lists."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _saved_in(model: nn.Module) -> tuple[str, ...]:
    """Return the modules of which peft has a trained copy.

    The configuration names some of them, and a task type adds heads.
    """
    kinds = ((name, type(module).__name__) for name, module in model.named_modules())
    return tuple(sorted(name for name, kind in kinds if kind == "ModulesToSaveWrapper"))


def _inject(model: nn.Module, recipe: LoraRecipe, seed: int) -> tuple[str, ...]:
    """Put adapters into a model and return the targets that peft chose."""
    try:
        import peft
    except ImportError:
        raise ConfigError("LoRA needs peft, which is not installed: pip install 'leakaudit[lora]'") from None
    config = _config(peft, recipe)
    requires = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    try:
        with _drawn_from(seed), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # peft warns when it adapts to (in, out) weights
            peft.inject_adapter_in_model(config, model, adapter_name=recipe.name)
    except (ValueError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0][:200] if error.args else type(error).__name__
        raise ConfigError(
            f"{type(model).__name__}: peft cannot place adapters ({reason}); "
            "name the linear layers by the ends of their names, such as --lora-targets query,value"
        ) from None
    for (
        name,
        parameter,
    ) in model.named_parameters():  # peft freezes all other weights, but the public facts say what is shared
        parameter.requires_grad_(requires.get(name, True))
    settled: Any = model.peft_config[recipe.name].target_modules  # type: ignore[index, union-attr]
    return (settled,) if isinstance(settled, str) else tuple(sorted(settled))


def _config(peft: Any, recipe: LoraRecipe) -> Any:
    """Return peft's configuration for a recipe."""
    targets = recipe.targets if isinstance(recipe.targets, str) else list(recipe.targets) or None
    common = {"target_modules": targets, "modules_to_save": list(recipe.saved) or None, **recipe.settings}
    if recipe.kind == "IA3":
        return peft.IA3Config(**common)
    return peft.LoraConfig(r=recipe.rank, lora_alpha=recipe.alpha, lora_dropout=recipe.dropout, **common)


@contextmanager
def _drawn_from(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def is_adapter(name: str) -> bool:
    """Return whether peft gives this parameter name to a LoRA adapter's weight."""
    return ".lora_A." in name or ".lora_B." in name


def is_second_matrix(name: str) -> bool:
    """Return whether a parameter is the matrix B of a LoRA adapter."""
    return ".lora_B." in name


def below_adapters(model: nn.Module) -> frozenset[str]:
    """Return the weights that training with adapters freezes: all below the head."""
    body: Any = getattr(model, "base_model", None)
    inside = {id(parameter) for parameter in body.parameters()} if isinstance(body, nn.Module) else set()
    return frozenset(
        name for name, parameter in model.named_parameters() if id(parameter) in inside and not is_adapter(name)
    )
