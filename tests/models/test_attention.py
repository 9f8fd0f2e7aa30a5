"""Every part of a model gets the implementation of attention that is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from leakaudit.models.attention import set_attention
from tests.gpu.families import t5


class _Whole(nn.Module):
    """A model whose method reaches its own configuration only."""

    def __init__(self, **parts: str) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="eager")
        for name, implementation in parts.items():
            part: Any = nn.Linear(1, 1)
            part.config = SimpleNamespace(_attn_implementation=implementation)
            self.add_module(name, part)

    def set_attn_implementation(self, implementation: str) -> None:
        self.config._attn_implementation = implementation


def _of_parts(model: nn.Module) -> set[str]:
    configs: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    return {config._attn_implementation for config in configs}


def test_a_configuration_that_was_copied_for_a_part_is_reached() -> None:
    """The encoder and the decoder of some models have such copies."""
    model = _Whole(encoder="eager", decoder="eager")
    set_attention(model, "sdpa")
    assert _of_parts(model) == {"sdpa"}


def test_a_part_with_an_implementation_of_its_own_keeps_it() -> None:
    """A vision tower, for example."""
    model = _Whole(vision="flex_attention", decoder="eager")
    set_attention(model, "sdpa")
    set_attention(model, "eager")
    assert _of_parts(model) == {"flex_attention", "eager"}


def test_a_t5_changes_as_a_whole_and_back() -> None:
    """Whatever the installed version of transformers does."""
    model = t5()
    for implementation in ("eager", "sdpa"):
        set_attention(model, implementation)
        assert _of_parts(model) == {implementation}
