"""Reads the `TrainingArguments` of a script, written as JSON.

pathlib.Path("args.json").write_text(trainer.args.to_json_string())
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leakaudit.preflight.recipe import Recipe


def is_training_arguments(content: Mapping[str, Any]) -> bool:
    """Return whether a mapping has the keys that every `TrainingArguments` has."""
    return "per_device_train_batch_size" in content or "gradient_accumulation_steps" in content


def read_training_arguments(content: Mapping[str, Any]) -> Recipe:
    """Return what the arguments of a Trainer say.

    Args:
        content: keys and values of `TrainingArguments.to_dict()` or of a subclass such as TRL's `SFTConfig`.
    """
    strategy, fsdp2 = "", False
    if content.get("deepspeed"):
        strategy = "deepspeed"
    elif fsdp := content.get("fsdp"):
        within = content.get("fsdp_config")
        version = (within.get("version") or within.get("fsdp_version")) if isinstance(within, Mapping) else None
        strategy, fsdp2 = f"fsdp {fsdp} (version {version or 1})", str(version) == "2"
    parallel = content.get("parallelism_config")
    return Recipe(
        source="TrainingArguments",
        optimizer=str(content.get("optim") or "adamw_torch_fused"),
        texts=_count(content.get("per_device_train_batch_size", 8)),
        passes=_count(content.get("gradient_accumulation_steps", 1)) or 1,
        tokens=_count(content.get("max_length") or content.get("max_seq_length")),
        packing=bool(content.get("packing")),
        strategy=strategy,
        fsdp2=fsdp2,
        mesh=("parallelism_config",) if parallel else (),
        own_code=tuple(key for key in ("use_liger_kernel", "use_liger_loss") if content.get(key)),
        compiled=bool(content.get("torch_compile")),
        half=bool(content.get("bf16")),
        scaled=bool(content.get("fp16")),
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
