"""How an audit was started, as far as its files may tell: values of closed types; never a path, a free text or an unknown option."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from leakaudit.config.audit import PluginSpec

PATH = "<path>"
TEXT = "<text>"


def training_command() -> str:
    """Return how this training program was started: its interpreter, and how many arguments it has.

    Options of a program that we do not know may hold anything, so none is kept.
    """
    name = Path(sys.executable or "").name
    interpreter = name if re.fullmatch(r"python[0-9.]*", name) else "python"
    given = len(sys.argv) - 1
    words = "" if given < 1 else " (1 argument, not kept)" if given == 1 else f" ({given} arguments, not kept)"
    return f"{interpreter} {PATH}{words}"


def public_label(spec: PluginSpec, made: Any) -> str:
    """Return a plugin with its knobs, such as `tag(steps=3, prior=<path>)`: numbers and choices as given.

    Args:
        spec: as the user wrote it.
        made: the plugin that was made of it; its fields say which values can be shown.
    """
    hints = get_type_hints(type(made))
    knobs = ", ".join(f"{key}={_public(value, getattr(made, key), hints[key])}" for key, value in spec.options.items())
    return f"{spec.name}({knobs})" if knobs else spec.name


def public_reason(reason: str, made: Any) -> str:
    """Return what a plugin says of itself, without the paths and free texts among its knobs."""
    hints = get_type_hints(type(made))
    for field in fields(made):
        value = getattr(made, field.name)
        shown = _public("", value, hints[field.name])
        if shown and value != field.default and str(value):
            reason = reason.replace(str(value), shown)
    return reason


def _public(written: Any, value: Any, hint: Any) -> Any:
    """Return what may be shown of one knob: the value as written where its type is closed."""
    if value is None or isinstance(value, bool | int | float) or _is_choice(value, hint):
        return written
    return PATH if isinstance(value, Path) else TEXT


def _is_choice(value: Any, hint: Any) -> bool:
    """Return whether a type names this value among its choices, itself or in a union."""
    return value in get_args(hint) if get_origin(hint) is Literal else any(_is_choice(value, h) for h in get_args(hint))
