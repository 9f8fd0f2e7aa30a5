"""Rows of a data file in any usual format.

The content decides where it can, the ending of the name otherwise. Parquet and Arrow need the package pyarrow. Errors name the file and the
row, never its content.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leakaudit.errors import DataError
from leakaudit.files.json_lines import MAX_DATA_BYTES, numbered_objects
from leakaudit.files.regular_files import read_regular
from leakaudit.files.strict_json import read_bounded

FORMATS = "JSONL, JSON, CSV, TSV, Parquet, Arrow, or a folder of datasets (save_to_disk)"
"""What can be read, for messages."""

_DELIMITED = {".csv": ",;\t|", ".tsv": "\t"}
"""Ending -> delimiters that are tried. Spreadsheets of several countries write semicolons."""

_BINARY = {
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"\xff\xff\xff\xff": "Arrow",
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
}
"""First bytes -> format, from the descriptions of the formats. An Arrow stream starts with a continuation marker."""

_PACKED = ("gzip", "zip")


@dataclass(frozen=True)
class Table:
    """The rows of a data file."""

    form: str
    """Format that was found, such as `CSV`."""
    rows: Sequence[tuple[int, dict[str, Any]]]
    """Line or row number, counted from 1, and field -> value."""


def read_table(path: Path, wanted: Sequence[str] = ()) -> Table:
    """Read the rows of a data file of any known format.

    Args:
        path: the file, or a folder that `datasets` saved.
        wanted: names of fields; of the delimiters of a CSV file, the one whose header has most of them is taken.

    Raises:
        DataError: the file is missing or has no known format, a row is wrong, or pyarrow is needed and not installed.
    """
    if path.is_dir():
        return _folder(path)
    form = _form(path)
    if form in _PACKED:
        raise DataError(f"{path}: is packed ({form}); unpack it and give the file inside: {FORMATS}")
    if form in ("Parquet", "Arrow"):
        return Table(form, _numbered(_arrow_rows(path, form)))
    if form in ("CSV", "TSV"):
        return Table(form, list(_delimited(path, _DELIMITED[path.suffix.lower()], wanted)))
    if form == "JSON":
        return Table(form, _json_rows(path))
    return Table("JSONL", list(numbered_objects(path)))


def content_of(path: Path) -> bytes:
    """Return the bytes that decide which rows a data file has.

    Those of a folder are the bytes of its Arrow files, in the order of the rows.

    Raises:
        DataError: the folder is no saved dataset.
        OSError: a file cannot be read.
    """
    if not path.is_dir():
        return read_regular(path)
    return b"".join(read_regular(part) for part in _parts(path))


def _form(path: Path) -> str:
    """Return the format of a file.

    JSONL where nothing else is certain, so that its reader says what is wrong.
    """
    ending = path.suffix.lower()
    try:
        with path.open("rb") as file:
            head = file.read(4096) if path.is_file() else b""
    except OSError:
        return "JSONL"
    for mark, form in _BINARY.items():
        if head.startswith(mark):
            return form
    if ending in _DELIMITED:
        return ending[1:].upper()
    begins_array = head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    return "JSON" if begins_array and ending != ".jsonl" else "JSONL"


def _content(path: Path) -> bytes:
    """Return the content of a file of bounded size."""
    try:
        return read_bounded(path, MAX_DATA_BYTES)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or type(error).__name__})") from None
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None


def _text(path: Path) -> str:
    try:
        return _content(path).removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{path}: is not UTF-8; save the file as UTF-8 text") from None


def _numbered(rows: Sequence[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    return list(enumerate(rows, start=1))


def _json_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the objects of one JSON array, counted from 1."""
    try:
        rows: Any = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: is not JSON, and begins as a JSON array of objects") from None
    except (RecursionError, ValueError):
        raise DataError(f"{path}: is nested too deeply or holds a number with too many digits") from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: the item of the JSON array is not an object; found {type(row).__name__}")
    return _numbered(rows)


def _delimited(path: Path, delimiters: str, wanted: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a CSV or TSV file by the number of their last line."""
    text = _text(path)
    if "\0" in text:
        raise DataError(f"{path}: holds a zero byte, which no text file has")
    before = csv.field_size_limit(MAX_DATA_BYTES)  # a text may be longer than the module's 131,072 characters
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text, delimiters, wanted))
        header = next(reader, [])
        if len(set(header)) < len(header):
            raise DataError(f"{path}:1: the header names a field twice; give each field a name of its own")
        for cells in reader:
            if len(cells) > len(header):
                raise DataError(
                    f"{path}:{reader.line_num}: has {len(cells)} cells, and the header names {len(header)}; put texts that hold the "
                    "delimiter in double quotes"
                )
            if cells:
                yield reader.line_num, {name: _cell(cell) for name, cell in zip(header, cells, strict=False)}
    except csv.Error as error:
        raise DataError(f"{path}: is no CSV file: {error}") from None
    finally:
        csv.field_size_limit(before)


def _delimiter(text: str, delimiters: str, wanted: Sequence[str]) -> str:
    """Return the delimiter whose header has most of the wanted fields.

    Of several, it is the one with most fields.
    """

    def fits(delimiter: str) -> tuple[int, int]:
        header = next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), [])
        return len(set(wanted) & set(header)), len(header)

    return max(delimiters, key=fits)


def _cell(cell: str) -> Any:
    """Return a cell; a JSON array, as for named entities, becomes a list."""
    if cell.startswith("[") and cell.endswith("]"):
        try:
            return json.loads(cell)
        except (ValueError, RecursionError):
            return cell
    return cell


def _folder(path: Path) -> Table:
    rows = [row for part in _parts(path) for row in _arrow_rows(part, "Arrow")]
    return Table("a folder of datasets", _numbered(rows))


def _parts(folder: Path) -> list[Path]:
    """Return the Arrow files of a folder that `Dataset.save_to_disk` wrote.

    They are in the order of the rows.

    Raises:
        DataError: it is no such folder.
    """
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        found = sorted(part.name for part in folder.iterdir() if (part / "state.json").is_file())
        raise DataError(
            f"{folder}: holds the splits {', '.join(found) or 'of nothing'}; give the folder of one of them"
        )
    try:
        state = json.loads(read_regular(folder / "state.json"))
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"{folder}: is a folder and no saved dataset (no state.json of it); give {FORMATS}") from None
    if any(Path(name).name != name for name in names):
        raise DataError(f"{folder}: its state.json names a file outside the folder")
    if state.get("_indices_data_files"):
        raise DataError(
            f"{folder}: has a mapping of indices; write it with `dataset.flatten_indices().save_to_disk(...)`"
        )
    return [folder / name for name in names]


def _arrow_rows(path: Path, form: str) -> list[dict[str, Any]]:
    """Return the rows of a Parquet or Arrow file.

    Raises:
        DataError: pyarrow is not installed, or the file is damaged.
    """
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise DataError(
            f"{path}: is a file of {form}, which needs the package pyarrow: `python -m pip install pyarrow`; JSONL and CSV need nothing"
        ) from None
    content = _content(path)
    try:
        if form == "Parquet":
            table = parquet.read_table(io.BytesIO(content))
        elif content.startswith(b"ARROW1"):
            table = arrow.ipc.open_file(io.BytesIO(content)).read_all()
        else:
            table = arrow.ipc.open_stream(io.BytesIO(content)).read_all()
        rows: list[dict[str, Any]] = table.to_pylist()
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path}: is damaged: {form} cannot be read from it ({type(error).__name__})") from None
    return rows
