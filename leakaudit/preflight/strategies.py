"""Ways of distributing a model whose update no hook sees.

Capture and preflight refuse the same ones.
"""

from __future__ import annotations


def strategy_refusal(name: str, *, fsdp2: bool) -> str:
    """Return why a distributed model cannot be audited, and what to do.

    Empty if it can.

    Args:
        name: of the strategy, as the framework calls it.
        fsdp2: whether it is FSDP2, which keeps parameters as they are.
    """
    kind = name.upper()
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
