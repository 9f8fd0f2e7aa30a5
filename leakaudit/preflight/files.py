"""Finds out what kind of configuration a file is, and reads it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from leakaudit.errors import ConfigError
from leakaudit.preflight.axolotl import is_axolotl, read_axolotl
from leakaudit.preflight.flower_app import app_config, read_flower
from leakaudit.preflight.recipe import Adapter, PackedBase, Recipe, Rounds
from leakaudit.preflight.training_arguments import is_training_arguments, read_training_arguments

WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
"""Keys of the hidden size in a model's config.json."""


def read_recipe(path: Path) -> Recipe:
    """Read a configuration of axolotl, a Trainer or a Flower app.

    Args:
        path: the file; a folder stands for the pyproject.toml in it.

    Raises:
        ConfigError: it cannot be read, or is none of these.
    """
    path = path / "pyproject.toml" if path.is_dir() else path
    content = _content(path)
    if is_axolotl(content):
        return read_axolotl(content)
    if (config := app_config(content)) is not None:
        return read_flower(config)
    if is_training_arguments(content):
        return read_training_arguments(content)
    raise ConfigError(
        f"{path.name}: neither a file of axolotl (no `base_model`), nor TrainingArguments (no `per_device_train_batch_size`), nor the "
        "pyproject.toml of a Flower app (no [tool.flwr.app])"
    )


def with_model(recipe: Recipe, folder: Path) -> Recipe:
    """Add what a model's config.json says.

    That is the hidden size, and how the weights are packed.

    Raises:
        ConfigError: there is no such file, or it cannot be read.
    """
    content = _content(folder / "config.json" if folder.is_dir() else folder)
    inner = content.get("text_config")
    both = {**content, **(inner if isinstance(inner, Mapping) else {})}
    size = next((both[key] for key in WIDTHS if isinstance(both.get(key), int)), recipe.hidden_size)
    packed, quantised = recipe.packed, content.get("quantization_config")
    if packed is None and isinstance(quantised, Mapping):
        method = str(quantised.get("quant_method", "unknown"))
        in_layers = (
            True if method in ("bitsandbytes", "gptq", "awq") else False if method in ("torchao", "quanto") else None
        )
        packed = PackedBase(f"quantization_config: {method}", in_layers)
    return replace(recipe, hidden_size=size, packed=packed)


def with_adapter(recipe: Recipe, path: Path) -> Recipe:
    """Add what peft's adapter_config.json says.

    Raises:
        ConfigError: there is no such file, or it cannot be read.
    """
    content = _content(path / "adapter_config.json" if path.is_dir() else path)
    saved, tensors = content.get("modules_to_save"), content.get("target_parameters")
    rank = content.get("r")
    adapter = Adapter(
        kind=str(content.get("peft_type", "lora")).lower(),
        rank=rank if isinstance(rank, int) else None,
        saved=tuple(saved) if isinstance(saved, list) else (),
        on_tensors=tuple(tensors) if isinstance(tensors, list) else (),
    )
    return replace(recipe, adapter=adapter, trains_tables=adapter.saves_tables)


def with_rounds(recipe: Recipe, local_steps: int | None) -> Recipe:
    """Let a client send what changed after local steps, and not its gradients."""
    return replace(recipe, rounds=Rounds(local_steps))


def _content(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({type(error).__name__})") from error
    try:
        if path.suffix == ".toml":
            found = tomllib.loads(text)
        elif path.suffix == ".json":
            found = json.loads(text)
        else:
            found = yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(
            f"{path}: is no {path.suffix.strip('.') or 'YAML'} that can be read ({type(error).__name__})"
        ) from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"{path}: holds {type(found).__name__}, and not keys with values")
    return found
