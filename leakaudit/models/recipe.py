"""Recipes, from which another process rebuilds models without pickle."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from torch import nn

from leakaudit.errors import ModelError
from leakaudit.models.factories import MADE_BY, vouch_for
from leakaudit.models.lora import LoraRecipe, adapted
from leakaudit.models.stacks import described_stack, stack
from leakaudit.models.tensors import dtype_of


class ModelRecipe(BaseModel):
    """The description from which a model's architecture is rebuilt.

    It is either a class of transformers with a configuration, or a call that makes the model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    class_name: str
    config: dict[str, Any] = {}
    """Present configuration of a class of transformers: a Trainer may have changed it, and packed sequences change the attention."""
    attention: Literal["", "sdpa"] = ""
    """Attention that the model is made with, where its class cannot change it later; empty for eager attention.

    Such a class may compute something else with eager attention: Falcon adds ALiBi twice.
    """
    lora: LoraRecipe | None = None
    """Adapters in the model; None without adapters."""
    parts: dict[str, str] = {}
    """Name of a small module -> `package:class` with which a user replaced it, such as another activation."""
    settings: dict[str, dict[str, bool | int | float]] = {}
    """Module -> attribute -> number that differs from that of its class, such as a changed dropout rate."""
    computed_in: dict[str, str] = {}
    """Linear layer -> type in which it multiplies, where the client's layer stored its matrix in few bits.

    See `leakaudit.models.quantised_layers`.
    """
    made_by: str = ""
    """`package.module:name` of the maker of a model that is no class of transformers: the model's own class, or a function marked with
    `model_factory`."""
    arguments: dict[str, Any] = {}
    """Arguments of `made_by`; plain data."""

    @classmethod
    def of(cls, model: nn.Module) -> ModelRecipe:
        """Return the recipe of a live model.

        Three ways are tried in this order: the class or function with arguments that `rebuilt_by` named, then a class that `transformers`
        exports, with the live configuration, then an `nn.Sequential` of torch's own layers.

        Raises:
            ModelError: none of them is possible, or the model's adapters cannot be rebuilt.
        """
        name = type(model).__name__
        if said := getattr(model, MADE_BY, None):
            made_by, arguments = said
            vouch_for(made_by)  # the model may come from another process, in which `rebuilt_by` was called
            return cls(class_name=name, made_by=made_by, arguments=arguments)
        if (exported := _exported(model)) is not None:
            # The folder that it was loaded from does not belong to the architecture, and may name a person or a project.
            public = tagged(architecture(model.config))
            # `model.to(torch.bfloat16)` does not change the configuration.
            public["dtype"] = str(dtype_of(model)).removeprefix("torch.")
            return cls(class_name=exported, config=public, attention=_fixed_attention(model), lora=adapted(model))
        if (layers := described_stack(model)) is not None:
            return cls(class_name=name, made_by=f"{stack.__module__}:{stack.__name__}", arguments={"layers": layers})
        raise ModelError(
            f"{type(model).__module__}.{name} is no model class that transformers exports, so the side process "
            "cannot rebuild it; say how with `rebuilt_by(model, 'package.module:function', ...)`, or set `schedule: inline`"
        )


def _fixed_attention(model: nn.Module) -> Literal["", "sdpa"]:
    """Return the attention of a model whose class cannot change it later.

    Empty if it can, or if the attention is not one that a CPU has.
    """
    changes = getattr(type(model), "_can_set_attn_implementation", None)
    now = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return "sdpa" if now == "sdpa" and changes is not None and not changes() else ""


PRIVATE_KEYS = frozenset(
    {"_name_or_path", "name_or_path", "task_specific_params", "finetuning_task", "auto_map", "architectures"}
)
"""Keys of a configuration that do not change a model's arithmetic and may name a person, a project, a task or code."""


def architecture(config: Any) -> dict[str, Any]:
    """Return the part of a configuration of transformers that decides the model.

    Label names become `LABEL_0`, `LABEL_1`...

    Keys that the configuration's class does not declare come from the user and may be private. They are left out.

    Args:
        config: a `PretrainedConfig`.
    """
    return only_declared(type(config), config.to_dict())


def only_declared(kind: Any, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that its class declares.

    Label names are replaced by neutral ones.

    Args:
        kind: a class of configurations.
        found: the configuration as a dictionary.
    """
    known = _declared_keys(kind)
    kept = {key: value for key, value in found.items() if key in known and key not in PRIVATE_KEYS}
    parts = getattr(kind, "sub_configs", None) or {}
    kept |= {
        name: only_declared(_part(part, kept[name]), kept[name])
        for name, part in parts.items()
        if isinstance(kept.get(name), dict)
    }
    if isinstance(names := kept.get("id2label"), dict):
        kept["id2label"] = {str(number): f"LABEL_{number}" for number in range(len(names))}
        kept["label2id"] = {f"LABEL_{number}": number for number in range(len(names))}
    return kept


def _part(kind: Any, found: Mapping[str, Any]) -> Any:
    """Return the class of a part of a configuration.

    For `AutoConfig`, which may be any class, it is the class of transformers that has the part's model type, as the picture model of a
    language model; the base class where transformers has none.

    Args:
        kind: the class that the whole configuration declares.
        found: the part as a dictionary.
    """
    import transformers

    if isinstance(kind, type) and issubclass(kind, transformers.PretrainedConfig):
        return kind
    try:
        return transformers.CONFIG_MAPPING[str(found.get("model_type"))]
    except KeyError:
        return transformers.PretrainedConfig


def _declared_keys(kind: Any) -> frozenset[str]:
    """Return the keys that a class of configurations declares.

    These are its fields, its defaults, and the keys that every configuration has.
    """
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    if not fields:
        fields = {*inspect.signature(kind).parameters, *kind().to_dict()}
    return frozenset(
        {*fields, *getattr(kind, "attribute_map", {}), *SPECIAL_TOKENS, "model_type", "output_attentions", "dtype"}
    )


SPECIAL_TOKENS = (
    "bos_token_id",
    "decoder_start_token_id",
    "eos_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "pad_token_id",
    "sep_token_id",
)
"""Token ids that models of transformers read from their configuration, although some classes do not declare them: an encoder-decoder
(T5, BART) makes its decoder's inputs with `decoder_start_token_id`. The tokenizer makes them public."""


FLOAT_TAG = "__float__"
"""Key of a number that JSON does not have, as transformers writes it into a `config.json`."""

WITHOUT_JSON = ("Infinity", "-Infinity", "NaN")
"""Such numbers, as `float` reads them. Mamba2's largest time step is infinite."""


def tagged(value: Any) -> Any:
    """Return plain data without numbers that JSON does not have.

    In place of each stands, for example, `{"__float__": "Infinity"}`.

    >>> tagged({"limit": (0.0, float("inf"))})
    {'limit': [0.0, {'__float__': 'Infinity'}]}
    """
    if isinstance(value, Mapping):
        return {key: tagged(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [tagged(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT_TAG: json.dumps(value)}
    return value


def untagged(value: Any) -> Any:
    """Return plain data with the numbers that `tagged` replaced.

    >>> untagged({"limit": [0.0, {"__float__": "Infinity"}]})
    {'limit': [0.0, inf]}
    """
    if isinstance(value, Mapping):
        found = value.get(FLOAT_TAG) if len(value) == 1 else None
        return float(found) if found in WITHOUT_JSON else {key: untagged(one) for key, one in value.items()}
    return [untagged(one) for one in value] if isinstance(value, list) else value


def can_rebuild(model: nn.Module) -> bool:
    """Return whether a model was marked by `rebuilt_by` or is one of transformers.

    A module around such a model cannot be rebuilt.
    """
    return hasattr(model, MADE_BY) or _exported(model) is not None


def _exported(model: nn.Module) -> str | None:
    """Return the name under which transformers exports the model's class, or None.

    FSDP2 puts its own class before the model's class.
    """
    import transformers

    if getattr(model, "config", None) is None:
        return None
    kinds = [kind for kind in type(model).__mro__ if kind.__name__ != "FSDPModule"]
    kind = kinds[1] if len(kinds) < len(type(model).__mro__) else kinds[0]
    return kind.__name__ if getattr(transformers, kind.__name__, None) is kind else None
