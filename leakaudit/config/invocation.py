"""The command line of an audit, in a form that its files may show.

Only values of closed types (numbers, choices, flags) are kept. Paths, free texts and unknown options are never kept.
"""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from leakaudit.config.audit import PluginSpec

PATH = "<path>"
TEXT = "<text>"


def training_command() -> str:
    """Return the interpreter of this training program and its number of arguments.

    The arguments of an unknown program may hold private values, so none is kept.
    """
    name = Path(sys.executable or "").name
    interpreter = name if re.fullmatch(r"python[0-9.]*", name) else "python"
    given = len(sys.argv) - 1
    words = "" if given < 1 else " (1 argument, not kept)" if given == 1 else f" ({given} arguments, not kept)"
    return f"{interpreter} {PATH}{words}"


def public_label(spec: PluginSpec, made: Any) -> str:
    """Return a plugin with its options, such as `tag(steps=3, prior=<path>)`.

    Numbers and choices are shown as the user wrote them.

    Args:
        spec: as the user wrote it.
        made: the plugin made from it; the types of its fields say which values may be shown.
    """
    hints = get_type_hints(type(made))
    options = ", ".join(
        f"{key}={_public(value, getattr(made, key), hints[key])}" for key, value in spec.options.items()
    )
    return f"{spec.name}({options})" if options else spec.name


def public_reason(reason: str, made: Any) -> str:
    """Return a message of a plugin without the paths and free texts of its options."""
    hints = get_type_hints(type(made))
    for field in fields(made):
        value = getattr(made, field.name)
        shown = _public("", value, hints[field.name])
        if shown and value != field.default and str(value):
            reason = reason.replace(str(value), shown)
    return reason


def _public(written: Any, value: Any, hint: Any) -> Any:
    """Return one option as written if its type is closed, else a placeholder."""
    if value is None or isinstance(value, bool | int | float) or _is_choice(value, hint):
        return written
    return PATH if isinstance(value, Path) else TEXT


def _is_choice(value: Any, hint: Any) -> bool:
    """Return whether a value is a choice of a Literal, also within a union."""
    return value in get_args(hint) if get_origin(hint) is Literal else any(_is_choice(value, h) for h in get_args(hint))
