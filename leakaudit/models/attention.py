"""The implementation of attention that a model of transformers uses."""

from __future__ import annotations

from typing import Any

from torch import nn


def set_attention(model: nn.Module, implementation: str) -> None:
    """Give every part of a model the same implementation of attention.

    `set_attn_implementation` of some versions (5.17) does not reach configurations that a model copied for its parts, such as the encoder
    and decoder of a T5. Parts that had another implementation than the whole model keep it.

    Args:
        model: a model with `set_attn_implementation`.
        implementation: a name that transformers knows, such as `eager` or `sdpa`.
    """
    before = _implementation(model)
    same = [module for module in model.modules() if before is not None and _implementation(module) == before]
    model.set_attn_implementation(implementation)  # type: ignore[operator]
    for module in same:
        config: Any = module.config
        config._attn_implementation = implementation


def _implementation(module: nn.Module) -> str | None:
    """Return the implementation in a module's configuration; None without one."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None)
