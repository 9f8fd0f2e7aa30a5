"""The words for a problem in a file: what was found and what to write instead."""

from __future__ import annotations

import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from leakaudit.config.yaml_document import Document, Place, dotted, named, short


def message_of(path: Place, error: ErrorDetails, model: type[BaseModel], document: Document) -> str:
    """Return an error of pydantic in our words."""
    kind = error["type"]
    if kind == "extra_forbidden":
        return _unknown_key(path, model)
    if kind == "missing" and isinstance(path[-1], int):
        return f"{named(path[:-1])}item {path[-1] + 1} is missing"
    if kind == "missing":
        where = f" in {dotted(path[:-1])}" if len(path) > 1 else ""
        return f"key {path[-1]!r} is missing{where}"
    word = document.words.get(path)
    if kind == "string_type" and word is not None:
        return f"{named(path)}expected text, but YAML reads {word or 'nothing'} as {kind_of(error['input'])}; " + (
            f'write "{word}" in quotes' if word else "write a word"
        )
    if kind in ("literal_error", "enum") and isinstance(error["input"], str):
        known = re.findall(r"'([^']*)'", str(error.get("ctx", {}).get("expected", "")))
        near = difflib.get_close_matches(error["input"], known, n=1) if len(known) > 1 else []
        return f"{named(path)}{_plain_words(error)}" + (f"; did you mean {near[0]!r}?" if near else "")
    said = _OWN_WORDS.get(kind, _of_pydantic)(error)
    if kind in _WANT_KEYS:
        known = sorted({key for found in _models_at(model, path) for key in keys_of(found)})
        said = f"expected keys and values, found {short(error['input'])}" + (
            f"; keys: {', '.join(known)}" if known else ""
        )
    return f"{named(path)}{said}"


def _of_pydantic(error: ErrorDetails) -> str:
    """Return pydantic's words, with what was found where it is one value."""
    found = ""
    if error["type"].endswith("_type") and not isinstance(error["input"], Mapping | list):
        found = f", found {short(error['input'])}" if error["input"] is not None else ", found nothing"
    return f"{_plain_words(error)}{found}"


def _plain_words(error: ErrorDetails) -> str:
    text = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return text[0].lower() + text[1:] if text.startswith("Input ") else text


def _too_low_or_high(error: ErrorDetails) -> str:
    return f"{_plain_words(error)}, found {short(error['input'])}{_share(error)}"


def _share(error: ErrorDetails) -> str:
    """Return what to write instead of a percentage where a share belongs.

    A limit of at most 1 says that a share is meant. Of 1 itself nothing can be said: it may be 1 % or everything.
    """
    context, found = error.get("ctx", {}), error["input"]
    limit = context.get("le", context.get("lt", math.inf))
    if not isinstance(found, int | float) or limit > 1:
        return ""
    hint = f"; did you mean {found / 100:g}?" if 1 < found <= 100 and found / 100 <= limit else ""
    return f": it is a share from 0 to 1{hint}"


def _no_number(error: ErrorDetails) -> str:
    """Return what to write instead of text that looks like a number."""
    found = error["input"]
    if isinstance(found, bool):
        return f"{_plain_words(error)}, found {kind_of(found)}"
    text = found.strip() if isinstance(found, str) else ""
    number = text.removesuffix("%").strip().replace(",", ".", 1)
    if not re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", number):
        return _of_pydantic(error)
    meant = f"{float(number) / 100:g}" if text.endswith("%") else number
    return f"{_of_pydantic(error)}; write {meant}" + (" without quotes" if number == text else "")


def _no_list(error: ErrorDetails) -> str:
    found = error["input"]
    if isinstance(found, str | int | float) and not isinstance(found, bool):
        return f"expected a list, found {short(found)}; write [{found}]"
    if isinstance(found, Mapping):
        return "expected a list, found keys and values; begin each item with a hyphen"
    return f"expected a list, found {kind_of(found)}"


def _no_truth(error: ErrorDetails) -> str:
    return f"expected true or false, found {short(error['input'])}"


def _empty(error: ErrorDetails) -> str:
    return "must not be empty" if not error["input"] else _plain_words(error)


def _misspelt(error: ErrorDetails) -> str:
    """Return what a pattern allows, with the nearest text that it accepts."""
    pattern, found = error.get("ctx", {}).get("pattern", ""), str(error["input"])
    near = re.sub(r"[^a-z0-9]+", "-", found.lower()).strip("-")
    hint = f"; did you mean {short(near)}?" if re.search(pattern, near) else ""
    return f"{short(found)} does not have the form {pattern}{hint}"


_OWN_WORDS: Mapping[str, Callable[[ErrorDetails], str]] = {
    "less_than_equal": _too_low_or_high,
    "less_than": _too_low_or_high,
    "greater_than": _too_low_or_high,
    "greater_than_equal": _too_low_or_high,
    "float_type": _no_number,
    "int_type": _no_number,
    "tuple_type": _no_list,
    "list_type": _no_list,
    "bool_type": _no_truth,
    "string_too_short": _empty,
    "string_pattern_mismatch": _misspelt,
}
"""Kind of an error of pydantic -> our words for it."""

_WANT_KEYS = frozenset({"model_type", "model_attributes_type", "dict_type"})


def _unknown_key(path: Place, model: type[BaseModel]) -> str:
    known = sorted({key for found in _models_at(model, path[:-1]) for key in keys_of(found)})
    near = difflib.get_close_matches(str(path[-1]), known, n=1)
    homes = [] if near else _homes(str(path[-1]), model)
    if near:
        hint = f"did you mean {near[0]!r}?"
    elif homes:
        hint = f"it belongs in {' or '.join(homes)}"
    else:
        hint = f"known keys: {', '.join(known) or 'none'}"
    return f"unknown key {short(path[-1])}; {hint}"


def _homes(key: str, model: type[BaseModel], above: str = "") -> list[str]:
    """Return the places in a model where a key belongs."""
    found = []
    for name, info in model.model_fields.items():
        here = f"{above}{info.alias or name}"
        inner = [one for one in _within(info.annotation) if isinstance(one, type) and issubclass(one, BaseModel)]
        for one in inner:
            found += [here] if key in keys_of(one) else []
            found += _homes(key, one, f"{here}.")
    return found


def _within(kind: Any) -> Iterator[Any]:
    """Yield the types of a field: of a union its members, of a tuple its items."""
    for one in _alternatives(kind):
        if typing.get_origin(one) is tuple:
            yield from (inner for item in typing.get_args(one) for inner in _alternatives(item))
        else:
            yield one


def keys_of(model: type[BaseModel]) -> list[str]:
    """Return the keys of `model` as a file spells them."""
    return [info.alias or name for name, info in model.model_fields.items()]


def _models_at(model: type[BaseModel], path: Place) -> list[type[BaseModel]]:
    """Return the models that are possible at `path` in `model`."""
    here: list[Any] = [model]
    for part in path:
        below: list[Any] = []
        for kind in here:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                below += [f.annotation for name, f in kind.model_fields.items() if part in (f.alias, name)]
            else:
                below += [argument for argument in typing.get_args(kind) if argument is not Ellipsis]
        here = [alternative for kind in below for alternative in _alternatives(kind)]
    return [kind for kind in here if isinstance(kind, type) and issubclass(kind, BaseModel)]


def _alternatives(kind: Any) -> Iterator[Any]:
    """Yield the members of a union, and of unions within it."""
    if typing.get_origin(kind) is Annotated:
        yield from _alternatives(typing.get_args(kind)[0])
    elif typing.get_origin(kind) in (typing.Union, types.UnionType):
        for argument in typing.get_args(kind):
            yield from _alternatives(argument)
    else:
        yield kind


def kind_of(value: Any) -> str:
    """Return what a value is, in words.

    >>> kind_of(None), kind_of(True), kind_of(0.5)
    ('nothing', 'yes', 'a number')
    """
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return {int: "a number", float: "a number", str: "text", list: "a list"}.get(type(value), "something else")
