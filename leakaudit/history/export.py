"""The history as one table for spreadsheets and notebooks.

Each rate of each night is a row. A night without a rate, such as a gap, has one row whose cells of the rate are empty.
"""

from __future__ import annotations

import csv
import importlib
import io
import os
import types
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from leakaudit.errors import ConfigError, ResultsError
from leakaudit.files.private_files import write_atomic
from leakaudit.history.keys import NAMES
from leakaudit.history.record import NightModel, NightRecord, Rate

Cell = str | int | float | bool | None

_PARTS = ("keys", "rates", "units", "so_far")
"""Fields that are no single cell. Marks of steps are left out: they serve later nights only."""

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters that make a spreadsheet run a text as a formula (OWASP, CSV Injection)."""


@cache
def _columns(model: type[NightModel]) -> dict[str, type]:
    """Return each field of a model that is one cell, with the type of its values."""
    hints = get_type_hints(model)
    return {field.alias or name: _kind(hints[name]) for name, field in model.model_fields.items() if name not in _PARTS}


def _kind(hint: Any) -> type:
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return next((kind for kind in (bool, int, float) if kind in kinds), str)


def columns() -> dict[str, type]:
    """Return the name of each column with the type of its values."""
    keys = dict.fromkeys((f"key_{name}" for name in NAMES), str)
    return _columns(NightRecord) | keys | _columns(Rate) | {"so_far_k": int, "so_far_n": int}


def rows(records: Sequence[NightRecord]) -> list[dict[str, Cell]]:
    """Return the rows of a history; a cell is None where nothing was recorded."""
    empty: dict[str, Cell] = dict.fromkeys(columns())
    found = []
    for record in records:
        own = record.model_dump(mode="json", by_alias=True)
        night = {name: own[name] for name in _columns(NightRecord)}
        night |= {f"key_{name}": record.keys.get(name) for name in NAMES}
        for rate in record.rates or (None,):
            found.append(empty | night | (_of_rate(rate) if rate else {}))
    return found


def _of_rate(rate: Rate) -> dict[str, Cell]:
    own = rate.model_dump(mode="json")
    k, n = rate.so_far or (None, None)
    return {name: own[name] for name in _columns(Rate)} | {"so_far_k": k, "so_far_n": n}


def as_csv(records: Sequence[NightRecord]) -> str:
    """Return the history as CSV with a header.

    A text that a spreadsheet would run as a formula gets an apostrophe before it. Nothing recorded is an empty cell.
    """
    file = io.StringIO()
    writer = csv.DictWriter(file, list(columns()), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _guarded(value) for name, value in row.items()} for row in rows(records))
    return file.getvalue()


def _guarded(value: Cell) -> Cell:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def write_csv(records: Sequence[NightRecord], path: Path) -> None:
    """Write the history as CSV.

    Raises:
        ResultsError: the file cannot be written.
    """
    try:
        write_atomic(path, as_csv(records))
    except OSError as error:
        raise ResultsError(f"{path}: cannot be written ({error.strerror})") from None


def write_parquet(records: Sequence[NightRecord], path: Path) -> None:
    """Write the history as Parquet; empty columns have their types, too.

    Raises:
        ConfigError: the package pyarrow is not installed.
        ResultsError: the file cannot be written.
    """
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError(
            "--export parquet needs the package pyarrow: `python -m pip install pyarrow`; --export csv needs nothing"
        ) from None
    kinds = {str: arrow.string(), int: arrow.int64(), float: arrow.float64(), bool: arrow.bool_()}
    schema = arrow.schema([(name, kinds[kind]) for name, kind in columns().items()])
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        parquet.write_table(arrow.Table.from_pylist(rows(records), schema=schema), temporary)
        temporary.chmod(0o600)
        temporary.replace(path)
    except OSError as error:
        raise ResultsError(f"{path}: cannot be written ({error.strerror or type(error).__name__})") from None
    finally:
        temporary.unlink(missing_ok=True)
