"""Helpers of all checks: broken promises, and the state of a model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

LONGEST_LABEL = 30
"""Most characters of a label. Our choice: a label has to fit into a column of a table."""


def promise(kept: object, plugin: Any, asked: str, found: object = None) -> None:
    """Raise AssertionError unless a promise is kept.

    Args:
        kept: whether the promise is kept.
        plugin: its class or an instance, for the message.
        asked: what every plugin of this kind promises, as a sentence without a full stop.
        found: what this plugin did instead; None if `asked` says enough.
    """
    if not kept:
        name = getattr(plugin, "name", "") or getattr(plugin, "__name__", type(plugin).__name__)
        raise AssertionError(f"{name}: {asked}" + (f"; found {found}" if found is not None else ""))


def instance(plugin: Any) -> Any:
    """Return the plugin with its default knobs, or the given instance."""
    if not isinstance(plugin, type):
        return plugin
    try:
        return plugin()
    except TypeError as error:
        raise AssertionError(
            f"{plugin.__name__}: every knob has a default, or an instance is checked; found {error}"
        ) from None


def describes_itself(plugin: Any, *sentences: str) -> None:
    """Check the attributes in which every plugin describes itself.

    Args:
        plugin: an instance.
        sentences: names of class attributes that must hold text, in addition to `source`.
    """
    kind = type(plugin)
    promise(getattr(plugin, "name", ""), kind, 'a plugin is registered, with a decorator such as `@attack("name")`')
    promise(
        dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen,  # type: ignore[attr-defined]
        kind,
        "a plugin is a frozen dataclass: `@dataclass(frozen=True)`",
    )
    promise(kind.__doc__, kind, "a plugin has a docstring, whose first line is shown in lists")
    for attribute in ("source", *sentences):
        value = getattr(plugin, attribute, "")
        promise(isinstance(value, str) and value, kind, f"`{attribute}` is a text that says something", repr(value))


def can_be_shown(plugin: Any) -> None:
    """Check the label, which tables show, and the meaning, for the glossary."""
    kind = type(plugin)
    label, meaning = vars(kind).get("label"), vars(kind).get("meaning")
    promise(
        isinstance(label, str) and 0 < len(label) <= LONGEST_LABEL and not label.endswith("."),
        kind,
        f"`label` stands in the class itself, has at most {LONGEST_LABEL} characters and no full stop",
        repr(label),
    )
    promise(
        isinstance(meaning, str) and meaning[:1].isupper() and meaning.endswith("."),
        kind,
        "`meaning` stands in the class itself and is a sentence, with a capital and a full stop",
        repr(meaning),
    )


@dataclass(frozen=True)
class ModelState:
    """The state of a model that a plugin must not change."""

    flags: tuple[tuple[str, bool, bool], ...]
    """Parameter name, whether it requires a gradient, whether its `.grad` is None."""
    modes: tuple[bool, ...]
    """Whether each module is in training mode."""
    hooks: tuple[tuple[int, int], ...]
    """Number of forward hooks and forward pre-hooks of each module."""
    values: dict[str, torch.Tensor]
    """State dict, copied."""

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """Copy the state of a model."""
        return cls(
            tuple((n, p.requires_grad, p.grad is None) for n, p in model.named_parameters()),
            tuple(module.training for module in model.modules()),
            tuple((len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()),
            {name: tensor.clone() for name, tensor in model.state_dict().items()},
        )

    def changed(self, model: nn.Module) -> list[str]:
        """Return the names of what has changed; empty if nothing has."""
        now = ModelState.of(model)
        same = {
            "requires_grad or .grad": self.flags == now.flags,
            "training flags": self.modes == now.modes,
            "hooks": self.hooks == now.hooks,
            "values": all(torch.equal(self.values[name], now.values[name]) for name in self.values),
        }
        return [what for what, unchanged in same.items() if not unchanged]
