"""Edits of a JSON document by a grammar that the pydantic models give.

Each place of a document has the type of its field. An `Edit` changes one place: it takes the value away, renames its key, repeats or swaps
items, copies a value from elsewhere, or writes another value of the same type or of a wrong one.
"""

from __future__ import annotations

import copy
import random
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel

Path = tuple[str | int, ...]
WRONG_TYPES: tuple[Any, ...] = (True, 0, 7, 0.5, "", "1", [], {}, [None], {"value": 1.0})
NUMBERS = (0, 0.0, 1, 1.0, -1, -0.5, 0.5, 2, 1e-12, 1e12, 1e300, 10**15, 10**18, -(10**15))
WORDS = (
    "",
    " ",
    "none",
    "any",
    "shipped",
    "as-sent",
    "span",
    "1",
    "1-2",
    "9-16",
    "2001-01-01",
    "9999-12-31",
    "a\u2028b",
)


@dataclass(frozen=True)
class Place:
    """A value of a document and the type of its field."""

    path: Path
    kind: Any
    value: Any

    @property
    def name(self) -> str:
        """The path with `*` for each number."""
        return ".".join("*" if isinstance(part, int) else part for part in self.path)


@dataclass(frozen=True)
class Edit:
    """One change of a document."""

    name: str
    path: Path
    apply: Callable[[Any], None]


def places(kind: Any, value: Any, path: Path = ()) -> Iterator[Place]:
    """Yield every value below `value`, which a field of type `kind` holds."""
    kind = _member(kind, value)
    if path:
        yield Place(path, kind, value)
    for key, below in _children(value):
        yield from places(_kind_below(kind, key), below, (*path, key))


def _children(value: Any) -> Iterator[tuple[str | int, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)


def _member(kind: Any, value: Any) -> Any:
    """Return the member of a union that holds `value`, without annotations."""
    if get_origin(kind) is Annotated:
        return _member(get_args(kind)[0], value)
    if get_origin(kind) not in (Union, types.UnionType):
        return kind
    members = [_member(one, value) for one in get_args(kind) if one is not type(None)]
    if isinstance(value, dict):
        models = [one for one in members if isinstance(one, type) and issubclass(one, BaseModel)]
        return next((one for one in models if {*value} <= {*one.model_fields}), members[0])
    if isinstance(value, list):
        return next((one for one in members if get_origin(one) in (tuple, list)), members[0])
    return members[0]


def _kind_below(kind: Any, key: str | int) -> Any:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        fields = {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
        return fields.get(str(key))
    if get_origin(kind) is dict:
        return get_args(kind)[1]
    return get_args(kind)[0] if get_origin(kind) in (tuple, list) else None


# ------------------------------------------------------------------------------------------------------------- one place


def edits_of(place: Place, every: list[Place], draw: random.Random) -> list[Edit]:
    """Return the edits of one place, which depend on its type."""
    path, value = place.path, place.value
    found = [_edit("delete", place, lambda container, key: container.pop(key))]
    found += [_write("null", place, None), _write("wrong type", place, draw.choice(WRONG_TYPES))]
    alike = [one for one in every if one.path[-1] == path[-1] and one.value != value]
    if alike:
        found.append(_write("copy of its like", place, draw.choice(alike).value))
    found.append(_write("copy", place, draw.choice(every).value))
    found += [_write(f"value {_short(other)}", place, other) for other in _others(place.kind, value)]
    if isinstance(path[-1], str):
        found.append(_edit("rename", place, _rename))
    if isinstance(value, list):
        found += _of_list(place, draw)
    if isinstance(value, dict):
        found.append(_write("empty", place, {}))
    return found


def _others(kind: Any, value: Any) -> list[Any]:
    """Return other values of the same type."""
    members = _literals(kind)
    if members:
        return [one for one in members if one != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [*NUMBERS, value + 1, value - 1, -value, value / 2]
    if isinstance(value, str):
        return [*WORDS, value[:-1], value + "0", value.upper(), value + value]
    return _of_nothing(kind) if value is None else []


def _of_nothing(kind: Any) -> list[Any]:
    """Return values for a field that holds none."""
    if kind is bool:
        return [True, False]
    if kind in (int, float):
        return [0, 1, 10**6]
    return ["none", "0" * 16] if kind in (str, date) else []


def _literals(kind: Any) -> list[Any]:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [one.value for one in kind]
    if isinstance(kind, TypeVar) or get_origin(kind) is not Literal:
        return []
    return list(get_args(kind))


def _of_list(place: Place, draw: random.Random) -> list[Edit]:
    found = [_write("empty", place, [])]
    if not place.value:
        return found
    at, other = draw.randrange(len(place.value)), draw.randrange(len(place.value))

    def repeat(container: Any, key: str | int) -> None:
        container[key].insert(other, copy.deepcopy(container[key][at]))

    def swap(container: Any, key: str | int) -> None:
        items = container[key]
        items[at], items[other] = items[other], items[at]

    def replace(container: Any, key: str | int) -> None:
        container[key][at] = copy.deepcopy(container[key][other])

    return [*found, _edit("repeat", place, repeat), _edit("swap", place, swap), _edit("replace", place, replace)]


def _rename(container: Any, key: str | int) -> None:
    container[f"{key}_"] = container.pop(key)


def _write(name: str, place: Place, value: Any) -> Edit:
    def write(container: Any, key: str | int) -> None:
        container[key] = copy.deepcopy(value)

    return _edit(name, place, write)


def _edit(name: str, place: Place, change: Callable[[Any, Any], object]) -> Edit:
    def apply(document: Any) -> None:
        container = document
        for part in place.path[:-1]:
            container = container[part]
        change(container, place.path[-1])

    return Edit(f"{place.name}: {name}", place.path, apply)


def _short(value: Any) -> str:
    return repr(value)[:30]


# ------------------------------------------------------------------------------------------------------------ many places


def hot(document: Any, step: str) -> tuple[Path, ...]:
    """Return the paths of a step's record and of the attempts on it."""
    records = [("steps", i) for i, found in enumerate(document["steps"]) if found["id"] == step]
    return (*records, *(("attempts", i) for i, found in enumerate(document["attempts"]) if found["step"] == step))


class Edits:
    """All edits of a document, by the place that they change.

    Args:
        kind: the model of the document.
        document: JSON data; it is not changed.
        seed: of the draws.
        near: paths below which half of the edits lie.
    """

    def __init__(self, kind: Any, document: Any, seed: int, near: tuple[Path, ...] = ()) -> None:
        self.document, self.draw = document, random.Random(seed)
        every = list(places(kind, document))
        self.everywhere: dict[str, list[Edit]] = {}
        self.near: dict[str, list[Edit]] = {}
        for place in every:
            found = edits_of(place, every, self.draw)
            self.everywhere.setdefault(place.name, []).extend(found)
            if any(place.path[: len(path)] == path for path in near):
                self.near.setdefault(place.name, []).extend(found)

    def one(self) -> Edit:
        """Draw one edit.

        Each name of a place is drawn as often as any other, so the few fields of the run count as much as the many scores.
        """
        group = self.near if self.near and self.draw.random() < 0.5 else self.everywhere
        return self.draw.choice(group[self.draw.choice(sorted(group))])

    def many(self, number: int, pairs: float = 0.3) -> Iterator[tuple[list[Edit], Any]]:
        """Yield edits with the documents that they make; `pairs` of them are two at once."""
        for _ in range(number):
            chosen = [self.one() for _ in range(1 + (self.draw.random() < pairs))]
            yield chosen, self.applied(chosen)

    def singles(self, near: bool = True) -> Iterator[tuple[list[Edit], Any]]:
        """Yield every single edit of the near places, or of all."""
        for edits in (self.near if near else self.everywhere).values():
            for edit in edits:
                yield [edit], self.applied([edit])

    def applied(self, chosen: list[Edit]) -> Any:
        """Return the edited document.

        An edit whose place an earlier one took away changes nothing.
        """
        edited = copy.deepcopy(self.document)
        for edit in chosen:
            with suppress(KeyError, IndexError, TypeError, AttributeError):
                edit.apply(edited)
        return edited


def described(chosen: list[Edit]) -> str:
    """Return the names of edits in one line."""
    return " and ".join(edit.name for edit in chosen)
