"""Ways of distributing a model whose update no hook sees.

Capture and preflight refuse the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OF_STAGES = {
    1: "DeepSpeed's ZeRO-1 moves the weights in shares inside its engine, where no hook sees the update; train with DDP and torch's `ZeroRedundancyOptimizer`, which does the same and is audited, with FSDP2, or with plain DDP",
    2: "DeepSpeed's ZeRO-2 leaves each process a share of the gradients and moves the weights inside its engine, where no hook sees the update; train with FSDP2 or DDP to audit",
    3: "DeepSpeed's ZeRO-3 shards the weights themselves and moves them inside its engine, where no hook sees the update; train with FSDP2 (`fully_shard`), which shards as much, or DDP to audit",
}
"""Stage of ZeRO -> why it is refused."""


def zero_stage(config: Any) -> int | None:
    """Return the stage of ZeRO in a configuration of DeepSpeed.

    None if it is not a mapping, such as the path of a file, or names no stage.
    """
    within = config.get("zero_optimization") if isinstance(config, Mapping) else None
    stage = within.get("stage") if isinstance(within, Mapping) else None
    return stage if isinstance(stage, int) else None


def strategy_refusal(name: str, *, fsdp2: bool, stage: int | None = None) -> str:
    """Return why a distributed model cannot be audited, and what to do.

    Empty if it can.

    Args:
        name: of the strategy, as the framework calls it.
        fsdp2: whether it is FSDP2, which keeps parameters as they are.
        stage: of DeepSpeed's ZeRO; None where it is not known.
    """
    kind = name.upper()
    if "DEEPSPEED" in kind and stage in OF_STAGES:
        return OF_STAGES[stage]
    if "DEEPSPEED" in kind:
        return "DeepSpeed moves the weights inside backward, where no hook sees the update; train with FSDP2 or DDP to audit"
    if ("FSDP" in kind or "FULLYSHARDEDDATAPARALLEL" in kind) and not fsdp2:
        return (
            "FSDP1 keeps parameters flattened and in shards; train with FSDP2 (`fully_shard`) or DDP to audit, or with "
            "`use_orig_params=True` in a loop of torch under `watch`"
        )
    if kind in ("DATAPARALLEL", "DATAPARALLELSTRATEGY"):
        return "DataParallel splits a batch over threads, where its parts are not seen; use DDP, or one GPU, to audit"
    if "MEGATRON" in kind or "XLA" in kind or "TPU" in kind:
        return f"{name} keeps its updates where no hook of an optimizer sees them; train with FSDP2 or DDP to audit"
    return ""
