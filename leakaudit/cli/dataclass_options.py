"""Command-line options that are made from the fields of a dataclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click

from leakaudit.cli.common import EXISTING

Command = TypeVar("Command", bound=Callable[..., Any])


def options_of(kind: type) -> Callable[[Command], Command]:
    """Return a decorator that adds one option for each field of a dataclass.

    Args:
        kind: a dataclass whose fields have `help` in their metadata, and as limits `minimum`, `maximum` or `above`. Allowed types are
            str, int, float, Path, a Literal, any of these or None, and tuple[str, ...], which is written with commas.
    """
    hints = get_type_hints(kind)

    def add(command: Command) -> Command:
        for field in reversed(dataclasses.fields(kind)):
            command = _option(field, hints[field.name])(command)
        return command

    return add


def values_of(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a dataclass's fields from a command's parameters.

    Texts with commas become tuples.
    """
    hints = get_type_hints(kind)
    return {
        field.name: _words(given[field.name]) if get_origin(hints[field.name]) is tuple else given[field.name]
        for field in dataclasses.fields(kind)
    }


def _option(field: dataclasses.Field[Any], hint: Any) -> Callable[[Command], Command]:
    name = f"--{field.name.replace('_', '-')}"
    kind, text = _click_type(hint, field.metadata), field.metadata["help"]
    if field.default is dataclasses.MISSING:  # with an explicit default, None included, click asks for nothing
        return click.option(name, field.name, type=kind, required=True, help=text)
    default = ",".join(field.default) if isinstance(field.default, tuple) else field.default
    shown = default not in (None, "")
    return click.option(name, field.name, type=kind, default=default, show_default=shown, help=text)


def _click_type(hint: Any, limits: Mapping[str, Any]) -> Any:
    """Return click's type for a field's type and limits."""
    plain = next((one for one in get_args(hint) if one is not NoneType), hint) if NoneType in get_args(hint) else hint
    if get_origin(plain) is Literal:
        return click.Choice(get_args(plain))
    if plain is Path:
        return EXISTING
    if plain is float:
        return click.FloatRange(min=limits["above"], min_open=True) if "above" in limits else float
    if plain is int:
        low, high = limits.get("minimum"), limits.get("maximum")
        return int if low is None and high is None else click.IntRange(min=low, max=high)
    return str


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
