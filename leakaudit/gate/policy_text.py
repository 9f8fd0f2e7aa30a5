"""A policy as YAML: with every default written out, and the presets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from leakaudit.config.yaml_document import Document, Place
from leakaudit.gate.policy import Policy

Origin = Callable[[Place, bool], str]
"""A function from the place of a value, and whether somebody stated it, to the words that say where it comes from."""

_PRESETS = Path(__file__).parent / "presets"
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.+/-]*")
_MEANS_MORE = {"true", "yes", "on", "false", "no", "off", "null"}
"""Words that YAML reads as yes, no or nothing, in lower case."""


def preset_names() -> tuple[str, ...]:
    """Return the names of the policies that come with the package.

    >>> preset_names()
    ('balanced', 'federated', 'labels-only', 'strict')
    """
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.yaml")))


def preset_text(name: str) -> str:
    """Return the text of a preset, with its comments."""
    return (_PRESETS / f"{name}.yaml").read_text(encoding="utf-8")


def policy_yaml(policy: Policy, origin: Origin | None = None) -> str:
    """Return a policy as YAML with every value written out.

    A policy that is read from the text equals the given one.

    Args:
        policy: the policy.
        origin: says for each value where it comes from; this becomes a comment.
    """
    return "\n".join(_lines(policy, policy.model_dump(mode="json", by_alias=True), (), origin)) + "\n"


def from_file(document: Document) -> Origin:
    """Return the origins of the values of a policy that was read from a file."""
    return lambda path, stated: f"file line {document.line_of(path)}" if stated else "default"


def built_in(_path: Place, stated: bool) -> str:
    """Return the origin of a value of the built-in policy."""
    return "built-in" if stated else "default"


def _lines(model: BaseModel, plain: dict[str, Any], path: Place, origin: Origin | None) -> Iterator[str]:
    """Yield the lines of a model.

    Args:
        model: the model, which knows what was stated.
        plain: the same as plain data.
        path: its place in the policy.
        origin: see `policy_yaml`.
    """
    for name, info in type(model).model_fields.items():
        key = info.alias or name
        value, here = getattr(model, name), (*path, key)
        if isinstance(value, BaseModel):
            yield f"{key}:"
            yield from (f"  {line}" for line in _lines(value, plain[key], here, origin))
        elif isinstance(value, tuple | list) and value and all(isinstance(one, BaseModel) for one in value):
            yield f"{key}:"
            for index, one in enumerate(value):
                inner = _lines(one, plain[key][index], (*here, index), origin)
                yield from (f"  {'  ' if number else '- '}{line}" for number, line in enumerate(inner))
        else:
            comment = f"  # {origin(here, name in model.model_fields_set)}" if origin else ""
            yield f"{key}: {_scalar(plain[key])}{comment}"


def _scalar(value: Any) -> str:
    """Return a plain value as YAML on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_scalar, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_scalar(key)}: {_scalar(one)}' for key, one in value.items())}}}"
    if not isinstance(value, str):
        return json.dumps(value)
    if _WORD.fullmatch(value) and value.lower() not in _MEANS_MORE:
        return value
    return yaml.dump(value, default_style='"', width=float("inf")).strip()
