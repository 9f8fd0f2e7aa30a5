"""Reads the pyproject.toml of a Flower app.

Flower leaves the keys of `[tool.flwr.app.config]` to the app. So keys are found by their last name, as Flower's own templates and
FlowerTune's apps spell it; what an app names otherwise is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from leakaudit.preflight.recipe import Adapter, PackedBase, Recipe, Rounds

TEXTS = ("per_device_train_batch_size", "train_batch_size", "batch_size")
TOKENS = ("seq_length", "max_seq_length", "max_length", "sequence_length")
RANK = ("peft_lora_r", "lora_r", "lora_rank")
STEPS = ("max_steps", "local_steps")
MODEL = ("model_name", "base_model", "name")


def app_config(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the configuration of the app in a pyproject; None if it is no Flower app."""
    found: Any = content
    for key in ("tool", "flwr", "app"):
        found = found.get(key) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping):
        return None
    config = found.get("config", {})
    return config if isinstance(config, Mapping) else {}


def read_flower(config: Mapping[str, Any]) -> Recipe:
    """Return what the configuration of a Flower app says.

    Args:
        config: the table `[tool.flwr.app.config]`.
    """
    said = {key: value for key, value in _flat(config) if value not in ("", None)}
    bits = said.get("quantization")
    rank = _first(said, RANK)
    adapter = Adapter("lora", _count(rank)) if rank is not None else None
    return Recipe(
        source="Flower app",
        model=str(_first(said, MODEL) or ""),
        packed=PackedBase(f"quantization: {bits}") if bits in (4, 8, "4", "8") else None,
        adapter=adapter,
        trains_tables=False if adapter else None,
        optimizer=str(said.get("optim", "")),
        texts=_count(_first(said, TEXTS)),
        passes=_count(said.get("gradient_accumulation_steps")) or 1,
        tokens=_count(_first(said, TOKENS)),
        rounds=Rounds(_count(_first(said, STEPS))),
        half=bool(said.get("bf16")),
        scaled=bool(said.get("fp16")),
    )


def _flat(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the last name of each key, with underscores, and its value."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield str(key).rpartition(".")[2].replace("-", "_"), value


def _first(said: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((said[name] for name in names if name in said), None)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
