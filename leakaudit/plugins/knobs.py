"""The knobs of a plugin with their defaults and sentences, read from its source.

A knob is a field of the plugin's dataclass. The text below a field says what it does; Python keeps no such text, so it is read from the
source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from leakaudit.config.described import field_texts


@dataclass(frozen=True)
class Knob:
    """One option of a plugin."""

    name: str
    default: str
    """As it is written on the command line; empty if the knob must be given."""
    kind: str
    """Type, such as `float | None`."""
    sentence: str
    """What it does; empty if the plugin's author does not say."""
    of_preset: str = ""
    """Its value in the preset that is the default, for a knob that is not set by default."""


@cache
def knobs_of(plugin: type) -> tuple[Knob, ...]:
    """Return the knobs of a plugin's class, in their order."""
    texts, hints, preset = field_texts(plugin), get_type_hints(plugin), _preset(plugin)
    return tuple(
        Knob(
            field.name, _written(field), _kind(hints[field.name]), texts.get(field.name, ""), preset.get(field.name, "")
        )
        for field in dataclasses.fields(plugin)
        if field.init
    )


def _preset(plugin: type) -> Mapping[str, str]:
    """Return the values of a plugin's default preset; empty if it has no presets.

    `presets` of a plugin is a table of dataclasses, and its field `preset` names one.
    """
    presets, chosen = getattr(plugin, "presets", {}), getattr(plugin, "preset", None)
    settings = presets.get(chosen)
    return (
        {} if settings is None else {one.name: str(getattr(settings, one.name)) for one in dataclasses.fields(settings)}
    )


def example_of(name: str, knobs: tuple[Knob, ...]) -> str:
    """Return a plugin as the command line writes it, with its first numeric knob.

    A plugin without numbers has the first one with a default.

    >>> example_of("tag", (Knob("prior", "None", "str | None", ""), Knob("steps", "300", "int", "")))
    'tag(steps=300)'
    """
    numbers = [knob for knob in knobs if knob.default[:1].isdigit()]
    told = next(iter(numbers or [knob for knob in knobs if knob.default not in ("", "None", "()")]), None)
    return name if told is None else f"{name}({told.name}={told.default})"


def _kind(hint: Any) -> str:
    """Return a type in words; a choice as its values.

    >>> from typing import Literal
    >>> _kind(Literal["a", "b"] | None), _kind(float)
    ('a | b | None', 'float')
    """
    if get_origin(hint) is Literal:
        return " | ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(map(_kind, get_args(hint)))
    return "None" if hint is NoneType else str(getattr(hint, "__name__", hint)) if not get_args(hint) else str(hint)


def _written(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return str(field.default)
    return "" if field.default_factory is dataclasses.MISSING else str(field.default_factory())
