"""Reads a YAML file of axolotl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leakaudit.preflight.recipe import Adapter, PackedBase, Recipe

OBJECTIVES_TESTED = ("dpo", "grpo", "ipo")
"""Values of `rl` whose trainers of TRL the tests of capture train."""

OWN_CODE = (
    "attn_implementation",
    "cut_cross_entropy",
    "flash_attention",
    "flash_attn_fuse_mlp",
    "flash_attn_rms_norm",
    "fused_attn_kernel",
    "liger_fused_linear_cross_entropy",
    "liger_glu_activation",
    "liger_layer_norm",
    "liger_rms_norm",
    "liger_rope",
    "lora_mlp_kernel",
    "lora_o_kernel",
    "lora_qkv_kernel",
    "tiled_mlp",
    "use_kernels",
    "use_scattermoe",
    "use_sonicmoe",
)
"""Keys that put kernels in the place of the model's code."""
OWN_ATTENTION = ("eager", "sdpa")
"""Values of `attn_implementation` that are the model's own code."""

ON_MESH = ("context_parallel_size", "expert_parallel_size", "tensor_parallel_size")


def is_axolotl(content: Mapping[str, Any]) -> bool:
    """Return whether a mapping has the keys that every file of axolotl has."""
    return "base_model" in content


def read_axolotl(content: Mapping[str, Any]) -> Recipe:
    """Return what a file of axolotl says.

    Args:
        content: keys and values, as YAML gives them.
    """
    said = {key: value for key, value in content.items() if value not in (None, "", [], {})}
    kind = str(said.get("adapter", "")).lower()
    adapter = None
    if kind:
        adapter = Adapter(
            kind=kind,
            rank=_number(said.get("lora_r")),
            saved=_words(said.get("lora_modules_to_save")),
            on_tensors=_words(said.get("lora_target_parameters")),
        )
    strategy, fsdp2 = _strategy(said)
    return Recipe(
        source="axolotl",
        model=str(said.get("base_model", "")),
        packed=_packed(said),
        adapter=adapter,
        trains_tables=_trains_tables(said, adapter),
        optimizer=str(said.get("optimizer", "adamw_torch_fused")),
        texts=_number(said.get("micro_batch_size", 1)),
        passes=_number(said.get("gradient_accumulation_steps", 1)) or 1,
        tokens=_number(said.get("sequence_len", 512)),
        packing=bool(said.get("sample_packing")),
        strategy=strategy,
        fsdp2=fsdp2,
        mesh=_mesh(said),
        pictures=next((f"{key}: {said[key]}" for key in ("processor_type", "is_multimodal") if said.get(key)), ""),
        objective=_objective(said),
        own_code=_own_code(said),
        compiled=bool(said.get("torch_compile")),
        half=said.get("bf16") not in (None, False) or bool(said.get("bfloat16")),
        scaled=bool(said.get("fp16") or said.get("float16")),
        foreign=bool(said.get("trust_remote_code")),
    )


def _packed(said: Mapping[str, Any]) -> PackedBase | None:
    """Return how the base is stored."""
    for key in ("qat", "quantization"):
        if isinstance(said.get(key), Mapping):
            return PackedBase(f"{key}: {{...}}", in_layers=None)
    if said.get("quantize_moe_experts"):
        return PackedBase("quantize_moe_experts: true", in_layers=None)
    for key in ("load_in_4bit", "load_in_8bit", "gptq"):
        if said.get(key):
            return PackedBase(f"{key}: true")
    kind = str(said.get("model_quantization_config", ""))
    options = said.get("model_quantization_config_kwargs")
    if kind and not (isinstance(options, Mapping) and options.get("dequantize")):
        return PackedBase(f"model_quantization_config: {kind}", in_layers=None)
    return None


def _trains_tables(said: Mapping[str, Any], adapter: Adapter | None) -> bool | None:
    """Return whether the word embedding is trained.

    None where patterns of names decide.
    """
    if adapter is not None:
        return adapter.saves_tables
    return None if said.get("unfrozen_parameters") else True


def _strategy(said: Mapping[str, Any]) -> tuple[str, bool]:
    if "deepspeed" in said:
        where = said["deepspeed"]
        return (f"deepspeed: {where}" if isinstance(where, str) else "deepspeed: {...}"), False
    within = said.get("fsdp_config")
    within = within if isinstance(within, Mapping) else {}
    version = said.get("fsdp_version") or within.get("fsdp_version") or within.get("version")
    if "fsdp" in said or within or said.get("fsdp_version"):
        return f"fsdp (version {version or 1})", str(version) == "2"
    return "", False


def _mesh(said: Mapping[str, Any]) -> tuple[str, ...]:
    sizes = {key: _number(said.get(key)) or 1 for key in (*ON_MESH, "dp_shard_size", "dp_replicate_size")}
    found = [key for key in ON_MESH if sizes[key] > 1]
    if sizes["dp_shard_size"] > 1 and sizes["dp_replicate_size"] > 1:
        found += ["dp_shard_size", "dp_replicate_size"]
    return tuple(f"{key}: {sizes[key]}" for key in found)


def _objective(said: Mapping[str, Any]) -> str:
    kind = str(said.get("rl", "")).lower()
    if kind and kind not in OBJECTIVES_TESTED:
        return f"rl: {kind}"
    for key in ("diffusion", "relora", "process_reward_model", "lisa_n_layers"):
        if said.get(key):
            return key
    return ""


def _own_code(said: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        f"{key}: {said[key]}" if isinstance(said[key], str) else key
        for key in OWN_CODE
        if said.get(key) and str(said[key]) not in OWN_ATTENTION
    )


def _number(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else int(value)
    except (TypeError, ValueError):
        return None


def _words(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(map(str, value)) if isinstance(value, list | tuple) else ()
