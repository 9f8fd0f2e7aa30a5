"""Named entities of a row of a data file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leakaudit.errors import DataError

FIELDS = ("entities", "spans")
"""Names of the field. The first one that a row has counts."""

_EXPECTED = "a list of strings, or of places [start, end, type] inside the text (or rename the field)"


def entities_of(path: Path, number: int, row: Mapping[str, Any], text: str) -> tuple[str, ...] | None:
    """Return the named entities of a row; None if the row has no such field or null.

    Raises:
        DataError: the field holds something else, or a place outside the text. The message names the line, never its content.
    """
    name = next((name for name in FIELDS if name in row), None)
    if name is None or row[name] is None:
        return None
    if not isinstance(row[name], list):
        raise DataError(f"{path}:{number}: {name!r} must be {_EXPECTED}; found {type(row[name]).__name__}")
    found = [_entity(item, text) for item in row[name]]
    wrong = [index for index, entity in enumerate(found) if entity is None]
    if wrong:
        raise DataError(f"{path}:{number}: {name!r} must be {_EXPECTED}; its item {wrong[0]} is neither")
    return tuple(entity for entity in found if entity is not None)


def _entity(item: object, text: str) -> str | None:
    """Return one entity, None if the item is neither a string nor a place."""
    if isinstance(item, str):
        return item
    if isinstance(item, dict):
        item = [item.get("start"), item.get("end")]
    if not isinstance(item, list) or len(item) < 2:
        return None
    start, end = item[:2]
    whole = type(start) is int and type(end) is int
    return text[start:end] if whole and 0 <= start < end <= len(text) else None
